"""Convert checkpoints of earlier eras of Flax: before linen, and before Optax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flax_ckpt_compat._core.steps import linen_names
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, node_at, show_path
from flax_ckpt_compat.rules import _edit_tree, _patterns
from flax_ckpt_compat.rules._rule import Apply, RuleError, misfit, rule

# Fields of a parameter's state in flax.optim → fields of optax's state, whose values are the same.
_MOMENTS = {frozenset(("grad_ema", "grad_sq_ema")): {"grad_ema": "mu", "grad_sq_ema": "nu"}}
_MOMENTS[frozenset(("momentum",))] = {"momentum": "trace"}


@rule
def pre_linen(at: str = "params") -> Apply:
    """Rename pre-linen modules to linen's names, below a path: ``Conv_0, Dense_1`` → ``Conv_0, Dense_0``.

    Args:
        at: pattern of whole key paths in the checkpoint; with moments of an optimizer
            ``"params|opt_state/0/[mn]u"``.

    Raises:
        TransformError: when applied: the checkpoint has no such path, or all names below it are linen's already.
    """

    _patterns.compiled(at)

    def apply(stored: Node, _: Node) -> Node:
        new: dict[Path, Path] = {}
        for start in _patterns.select(stored, [at]):
            found = {path: (*start, *below) for path, below in _linen_paths(node_at(stored, start), start, ())}
            if all(path == other for path, other in found.items()):
                raise RuleError(
                    f"below {show_path(start)} all names are linen's already; leave the rule out", leaf=show_path(start)
                )
            new |= found
        return _edit_tree.remap(stored, lambda path: [new.get(path, path)])

    return apply


def _linen_paths(node: Node, path: Path, new: Path) -> Iterator[tuple[Path, Path]]:
    if not isinstance(node, Branch) or not node.children:
        yield path, new
        return
    renamed = linen_names(node.children)
    for name, child in node.children.items():
        yield from _linen_paths(child, (*path, name), (*new, renamed[name]))


@rule
def pre_optax() -> Apply:
    """Convert a checkpoint of ``flax.optim``, whose optimizer held the parameters, to a train state.

    The parameters go to ``params``, and the optimizer's step to ``step`` (unless there is one) and to the counts of the
    target's Adam and schedules. The moments of Adam and Momentum go to the target's ``mu``, ``nu`` and ``trace``
    (without a target, in ``opt_state/0``), and are dropped if the target has none. All else stays in place. Rules that
    rename modules can come before or after this one.

    Raises:
        TransformError: when applied: there is no ``optimizer`` with ``target`` and ``state``, or the moments of one
            parameter would fit in several places.
        NameCollisionError: when applied: the checkpoint has ``params`` or ``opt_state`` already.
    """

    def apply(stored: Node, target: Node) -> Node:
        old = _Old.of(stored, target)
        tree = _edit_tree.remap(stored, lambda path: filter(None, [old.renamed(path)]))
        for path, node in old.additions(tree):
            tree = _edit_tree.put(tree, path, node)
        return tree

    return apply


@dataclasses.dataclass(frozen=True)
class _Old:
    """A checkpoint of flax.optim, and the new paths of its leaves."""

    stored: Branch
    target: Node
    start: Path  # of the node with ``target`` and ``state``
    is_nested: bool  # its ``target`` is the dict of all collections, including ``params``, unlike the target's

    @classmethod
    def of(cls, stored: Node, target: Node) -> _Old:
        for start in ((), ("optimizer",)):
            node = node_at(stored, start)
            if isinstance(node_at(node, ("state",)), Branch) and isinstance(node_at(node, ("target",)), Branch):
                is_nested = isinstance(node_at(node, ("target", "params")), Branch)
                return cls(stored, target, start, is_nested and node_at(target, ("params", "params")) is None)
        raise RuleError(
            "the checkpoint has no optimizer/target and optimizer/state, as flax.optim wrote them; "
            f"{_patterns.near_names('optimizer/target', stored)}"
        )

    @property
    def step(self) -> Node:
        return node_at(self.stored, (*self.start, "state", "step"))

    def renamed(self, path: Path) -> Path | None:
        """Return a leaf's new path, or None to drop it."""
        kind, below = path[len(self.start) : len(self.start) + 1], path[len(self.start) + 1 :]
        if path[: len(self.start)] != self.start or kind not in (("target",), ("state",)):
            return path
        if kind == ("target",):
            return below if self.is_nested else ("params", *below)
        if below == ("step",):
            has_place = not isinstance(self.target, Branch) or "step" in self.target.children
            return below if has_place and "step" not in self.stored.children else None
        return self._moment(path, below) if below[:1] == ("param_states",) else path

    def _moment(self, path: Path, below: Path) -> Path | None:
        node = node_at(self.stored, path)
        if isinstance(node, Branch):
            return None  # plain gradient descent has an empty state for every parameter
        fields = _MOMENTS.get(frozenset(node_at(self.stored, path[:-1]).children))
        if fields is None:
            return path
        parameter = below[2:-1] if self.is_nested and below[1:2] == ("params",) else below[1:-1]
        homes = [(*home, fields[below[-1]]) for home in self._homes(set(fields.values()))]
        if len(homes) > 1:
            homes = [home for home in homes if node_at(self.target, (*home, *parameter)) is not None]
        if len(homes) > 1:
            states = show_path((*self.start, "state", "param_states"))
            remedy = f"to begin these anew, rules.drop({states!r}) before this rule, and from_target for them"
            raise misfit(path, f"would fit in {one_line(map(show_path, homes))}; {remedy}")
        return (*homes[0], *parameter) if homes else None

    def _homes(self, fields: set[str]) -> list[Path]:
        """Return paths of the target's optimizer states that have these fields."""
        if not isinstance(self.target, Branch):
            return [("opt_state", "0")]
        return [path for path, branch in self._target_states() if fields <= branch.children.keys()]

    def additions(self, tree: Node) -> Iterator[tuple[Path, Node]]:
        """Yield the step for each count of the target's optimizer, and states without values, such as EmptyState.

        In ``tree`` names are the new ones. Adam's count goes only where its moments went."""
        if self.step is not None and not isinstance(self.target, Branch) and node_at(tree, ("opt_state", "0", "mu")):
            yield ("opt_state", "0", "count"), self.step
        for path, branch in self._target_states():
            names = branch.children.keys()
            is_adam = names == {"count", "mu", "nu"} and node_at(tree, (*path, "mu")) is not None
            if not names and node_at(tree, path) is None:
                yield path, branch
            elif self.step is not None and (is_adam or names == {"count"}):
                yield (*path, "count"), self.step

    def _target_states(self) -> Iterator[tuple[Path, Branch]]:
        return iter_branches(node_at(self.target, ("opt_state",)), ("opt_state",))
