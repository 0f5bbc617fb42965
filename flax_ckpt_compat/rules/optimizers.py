"""The rule that takes over the optimizer's state for the parameters that still exist."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_leaves, show_path
from flax_ckpt_compat.leaves import Computed, Own
from flax_ckpt_compat.rules import _trees, targets
from flax_ckpt_compat.rules._rule import Apply, rule

# Fields of optax's states, by which one is known where the target's containers do not tell, as in NNX.
_FIELDS = frozenset(("count", "mu", "nu", "trace", "ema", "v_row", "sum_of_squares", "acc_grads", "notfinite_count"))
_NNX_VALUE = "value"  # the last name of every leaf of an nnx.State


@rule
def optimizer_state(at: str = "opt_state", stored_at: str | None = None) -> Apply:
    """Takes the optimizer's state of the parameters that still exist; for others the target keeps its own.

    The states inside (Adam's count, mu and nu; a trace; …) are found by the names of their fields, wherever a chain
    or a wrapper has them now: ``adam`` ↔ ``chain(clip, adam)``, ``masked``, ``multi_transform``, ``MultiSteps``.
    Renamed parameters need a `rename` before this rule. A state none of whose parameters exist is not taken at all,
    so that no count comes without its moments.

    Where new parameters start with Adam's moments of zero beside an old count, Adam corrects their bias too little: their
    first steps are several times the usual length. Warm the learning rate up, or start the state anew with `from_target`.

    Args:
        at: literal path of the optimizer's state in the target.
        stored_at: the same in the checkpoint, if it differs.

    Raises:
        TransformError: when applied: the target or the checkpoint has no such path, no stored state fits the
            target's, or several fit equally well.
    """
    source = at if stored_at is None else stored_at
    who = f"optimizer_state({at!r}{'' if stored_at is None else f', {stored_at!r}'})"

    def apply(stored: Node, target: Node) -> Node:
        where = _trees.find(target, at, who, whose="the target")
        start = _trees.find(stored, source, who)
        own, old = _trees.node_at(target, where), _trees.node_at(stored, start)
        wanted, branches = list(_target_states(own)), list(_trees.branches(old))
        taken: dict[Path, Node] = {}
        for names in dict.fromkeys(state.names for state in wanted):
            group = [state for state in wanted if state.names == names]
            taken |= _take(
                group, [_State(*one, _leaves(one[1])) for one in branches if _alike(one[1], group[0].node)], who
            )
        if not taken:
            raise TransformError(_nothing(who, show_path(start), wanted, old), leaf=show_path(where))
        return targets.put(stored, where, _with(taken, own), who)

    return apply


@dataclasses.dataclass(frozen=True, eq=False)
class _State:
    """A node with named fields that holds values of its own, such as Adam's count, mu and nu.

    Attributes:
        path: from the root of the optimizer's state.
        node: itself.
        leaves: key path from the node → leaf, without those of states inside of it.
    """

    path: Path
    node: Branch
    leaves: dict[Path, Any]
    _fitting: dict[_State, list[Path]] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.node.children)

    @functools.cached_property
    def moments(self) -> dict[Path, Any]:
        """The leaves that belong to parameters."""
        return {
            path: leaf for path, leaf in self.leaves.items() if _shape(leaf) or len(path) - (path[-1] == _NNX_VALUE) > 1
        }

    def fitting(self, other: _State) -> list[Path]:
        """Paths of the leaves that another has, too, in the same shape."""
        if other not in self._fitting:
            there = other.leaves
            self._fitting[other] = [path for path, leaf in self.leaves.items() if _fits(there.get(path), leaf)]
        return self._fitting[other]

    def fit(self, other: _State) -> tuple[int, int]:
        """How well another, stored one fits: leaves, then names on the way to it."""
        names = {name for name in self.path if not name.isdecimal()} & set(other.path)
        return len(self.fitting(other)), len(names)

    def may_come_from(self, other: _State) -> bool:
        """Whether anything but numbers without their moments would come from another."""
        fitting = self.fitting(other)
        return any(path in self.moments for path in fitting) if self.moments else bool(fitting)


def _target_states(node: Node) -> Iterator[_State]:
    """States in the target: its named tuples, or, where it has none, what has the names of optax's fields."""
    nodes = [(path, branch) for path, branch in _trees.branches(node) if branch.children]
    tuples = [path for path, branch in nodes if branch.container is Container.NAMEDTUPLE]
    yield from _at(node, tuples or [path for path, branch in nodes if branch.children.keys() & _FIELDS])


def _alike(first: Branch, second: Branch) -> bool:
    """Same fields; one that is empty in one of them may be lacking in the other, as releases of optax add some."""
    fields = {**first.children, **second.children}
    return all(_is_empty(fields[name]) for name in first.children.keys() ^ second.children.keys())


def _at(node: Node, paths: list[Path]) -> Iterator[_State]:
    for path in paths:
        inner = [other[len(path) :] for other in paths if other != path and other[: len(path)] == path]
        branch = _trees.node_at(node, path)
        own = {
            below: leaf for below, leaf in _leaves(branch).items() if not any(below[: len(one)] == one for one in inner)
        }
        if own:
            yield _State(path, branch, own)


def _leaves(branch: Branch) -> dict[Path, Any]:
    return {path: leaf for path, leaf in iter_leaves(branch) if not isinstance(leaf, Branch)}


def _take(wanted: list[_State], stored: list[_State], who: str) -> dict[Path, Node]:
    """Path in the target's optimizer state → stored leaf, for states of the same fields."""
    chosen = [_choose(number, wanted, stored, who) for number in range(len(wanted))]
    spare = [state for state in stored if state not in chosen]
    taken: dict[Path, Node] = {}
    users: dict[tuple[int, Path], _State] = {}
    for state, source in zip(wanted, chosen, strict=True):
        if source is None:
            continue
        for path in state.fitting(source):
            other = users.setdefault((id(source), path), state)
            if other is not state and path in state.moments:
                raise _ambiguous(who, [state, other], [source])
            taken[(*state.path, *path)] = source.leaves[path]
        # What several optimizers did, one may do now: its other moments come from those that nobody else takes.
        for path in state.moments.keys() - set(state.fitting(source)):
            fits = [one.leaves[path] for one in spare if path in state.fitting(one)]
            if len(fits) == 1:
                taken[(*state.path, *path)] = fits[0]
    return taken


def _choose(number: int, wanted: list[_State], stored: list[_State], who: str) -> _State | None:
    """The stored state that fits a wanted one best."""
    state = wanted[number]
    able = [one for one in stored if state.may_come_from(one)]
    if not able:
        return None
    best = max(map(state.fit, able))
    equal = [one for one in able if state.fit(one) == best]
    if len(equal) == 1:
        return equal[0]
    if len(wanted) == len(stored) and stored[number] in equal:
        return stored[number]
    moments = [path for one in equal for path in state.fitting(one) if path in state.moments]
    if moments and len(moments) == len(set(moments)):
        return equal[0]  # each has other parameters, and `_take` takes those of the rest, too
    raise _ambiguous(who, [state], equal)


def _ambiguous(who: str, wanted: list[_State], stored: list[_State]) -> TransformError:
    first, second = (", ".join(show_path(state.path) for state in states) for states in (wanted, stored))
    return TransformError(
        f"{who}: the target's {first} fit the stored {second} equally well; name the ones that belong together, "
        f"such as optimizer_state('opt_state/{first.split(', ')[0]}', 'opt_state/{second.split(', ')[0]}')",
        leaf=first.split(", ")[0],
    )


def _nothing(who: str, start: str, wanted: list[_State], old: Node) -> str:
    fields = "; ".join(dict.fromkeys(", ".join(sorted(state.names)) for state in wanted)) or "none"
    there = "; ".join(
        dict.fromkeys(", ".join(branch.children) for _, branch in _trees.branches(old) if branch.children)
    )
    return (
        f"{who}: no stored state fits. The target's have the fields: {fields}; below {start} the checkpoint has: "
        f"{there[:300] or 'nothing'}. Rename parameters before this rule, or use from_target for a new optimizer"
    )


def _with(taken: dict[Path, Node], own: Node, path: Path = ()) -> Node:
    """The target's optimizer state with what was taken, and the target's own elsewhere."""
    if isinstance(own, Branch):
        children = {name: _with(taken, child, (*path, name)) for name, child in own.children.items()}
        return Branch(children, own.container, own.int_keys)
    return taken.get(path, Own.TARGET)


def _is_empty(node: Node) -> bool:
    return node is None or (isinstance(node, Branch) and not node.children)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", None) or ())


def _fits(stored: Any, own: Any) -> bool:
    """Whether a stored leaf has the shape of the target's."""
    shape = _shape(own)
    if isinstance(stored, LeafHandle) and stored.kind is LeafKind.PRNG_KEY:
        return stored.shape[: len(shape)] == shape
    if isinstance(stored, LeafHandle | Computed):
        return stored.shape == shape
    return False
