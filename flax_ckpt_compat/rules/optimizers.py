"""Carry over the optimizer's state of parameters that still exist.

The states inside an optimizer's state are nodes with named fields, in the target and in checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_branches, map_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, shape_and_dtype
from flax_ckpt_compat.rules import _edit_tree, _patterns
from flax_ckpt_compat.rules._edit_tree import is_empty, leaves_of
from flax_ckpt_compat.rules._rule import Apply, RuleError, rule

# Fields of optax's states, to recognize one if the target has no namedtuples, as in NNX.
_FIELDS = frozenset(("count", "mu", "nu", "trace", "ema", "v_row", "sum_of_squares", "acc_grads", "notfinite_count"))
_NNX_VALUE = "value"  # the last name of every leaf of an nnx.State


@rule
def optimizer_state(at: str = "opt_state", stored_at: str | None = None, subtree: str | None = None) -> Apply:
    """Carry over the optimizer's state of parameters that still exist; others keep the target's.

    Inner states (Adam's count, mu and nu; a trace; …) are matched by their field names, wherever a chain or wrapper has
    them now: ``adam`` ↔ ``chain(clip, adam)``, ``masked``, ``multi_transform``, ``MultiSteps``. Renamed parameters need
    a `rename` before this rule. A state is carried over only if some of its parameters exist, so that no count comes
    without its moments; of a parameter, all moments are, or none if one of them has another shape (``novograd`` keeps
    one number where ``adam`` keeps an array).

    Of several states that fit the same parameters, the one with the same names in its path is used (``gen``, ``disc``);
    order decides only among members of a chain. An ambiguous match is an error. If several states become one, the count
    is that of the first by name.

    One state that became several, of ``gen`` and ``disc``, or several that became one, take a rule for each part, with
    the part's name if only one of the two states has it in its moments: ``optimizer_state("opt_gen", "opt", "gen")``.
    Of several that become one, the count is that of the first rule.

    New parameters with zero moments beside an old count get too little bias correction from Adam: their first steps are
    several times the usual length. Warm up the learning rate, or start the state anew with `from_target`.

    Args:
        at: pattern of the whole key path of the optimizer's state in the target.
        stored_at: the same in the checkpoint, if it differs.
        subtree: key path of the parameters' part, below ``mu``, ``nu`` and so on, that only the stored state or only
            the target's has: it is taken away, or added.

    Raises:
        TransformError: when applied: the target or the checkpoint has no such path, no stored state fits the
            target's, several fit equally well, or the checkpoint's own at ``at`` would be lost.
    """
    source = at if stored_at is None else stored_at
    for pattern in (at, source):
        _patterns.compiled(pattern)

    def apply(stored: Node, target: Node) -> Node:
        at_path = _patterns.select_one(target, at, whose="the target")
        start = _patterns.select_one(stored, source)
        own, old = node_at(target, at_path), node_at(stored, start)
        if subtree is not None:
            old = _in_part(old, own, _patterns.names_in(subtree))
        wanted, branches = list(_target_states(own)), list(iter_branches(old))
        taken: dict[Path, Node] = {}
        for names in dict.fromkeys(state.names for state in wanted):
            group = [state for state in wanted if state.names == names]
            similar = [_State(*one, leaves_of(one[1])) for one in branches if _alike(one[1], group[0].node)]
            taken |= _Group(at_path, start, group, sorted(similar, key=_State.order)).taken()
        if not taken:
            raise RuleError(_nothing(show_path(start), wanted, old), leaf=show_path(at_path))
        _refuse_loss(stored, at_path, start)

        def new_leaf(path: Path, leaf: Node) -> Node:
            # What earlier rules have put there goes first.
            given = node_at(stored, (*at_path, *path)) if _is_elsewhere(at_path, start) else None
            is_given = isinstance(given, LeafHandle | Derived) and not is_empty(leaf)
            return leaf if isinstance(leaf, Branch) else given if is_given else taken.get(path, Own.KEEP_TARGET)

        return _edit_tree.put(stored, at_path, map_leaves(new_leaf, own))

    return apply


@dataclasses.dataclass(frozen=True)
class _Group:
    """States in the target and in the checkpoint with the same fields."""

    at_path: Path  # of the optimizer's state in the target
    start: Path  # of that in the checkpoint
    wanted: list[_State]
    stored: list[_State]

    def taken(self) -> dict[Path, Node]:
        """Map paths in the target's optimizer state to stored leaves."""
        chosen = [self._chosen(state) for state in self.wanted]
        spare = [state for state in self.stored if state not in chosen]
        taken: dict[Path, Node] = {}
        users: dict[tuple[_State, Path], _State] = {}
        for state, source in zip(self.wanted, chosen, strict=True):
            if source is None:
                continue
            for path in state.common_paths(source):
                other = users.setdefault((source, path), state)
                if other is not state and path in state.moments:
                    raise self._ambiguous([(state, source), (other, source)])
                taken[(*state.path, *path)] = source.leaves[path]
            # Several optimizers may have become one: take its other moments from states that are not used otherwise.
            found: dict[Path, list[Node]] = {}
            for one in spare:
                if not state.overlap([source, one]):
                    for path in state.common_paths(one):
                        found.setdefault(path, []).append(one.leaves[path])
            for path in state.moments.keys() - set(state.common_paths(source)):
                if len(fits := found.get(path, [])) == 1:
                    taken[(*state.path, *path)] = fits[0]
        return taken

    def _chosen(self, state: _State) -> _State | None:
        """Return the stored state that fits a target's state best."""
        able = [one for one in self.stored if state.may_come_from(one)]
        able = [one for one in able if not any(state.is_nearer(other, one) for other in able)]
        if not able:
            return None
        best = max(map(state.fit, able))
        equal = [one for one in able if state.fit(one) == best]
        if len(equal) == 1:
            return equal[0]
        if found := self._in_order(state, equal):
            return found
        if state.moments and not state.overlap(equal):
            return equal[0]  # each has other parameters; `taken` adds those of the rest
        raise self._ambiguous([(state, one) for one in equal])

    def _in_order(self, state: _State, equal: list[_State]) -> _State | None:
        """Return the stored chain member at the same position, if the chains are equally long; names have no order."""
        peers = sorted((one for one in self.wanted if one.plain == state.plain), key=_State.order)
        members = [one for one in self.stored if one.plain == equal[0].plain]
        is_chain = all(one.is_in_order for one in peers)
        if len(peers) != len(members) or any(one not in members for one in equal):
            return None
        if not is_chain and [one.numbers for one in peers] != [one.numbers for one in members]:
            return None
        found = members[peers.index(state)]
        return found if found in equal else None

    def _ambiguous(self, pairs: list[tuple[_State, _State]]) -> RuleError:
        """Return the error for target states and stored states that fit equally well."""
        first, second = (dict.fromkeys(states) for states in zip(*pairs, strict=True))
        targets_own = [show_path((*self.at_path, *one.path)) for one in first]
        others = [show_path((*self.start, *one.path)) for one in second]
        lines = " or ".join(self._line(*pair) for pair in pairs[:4])
        return RuleError(
            f"the target's {one_line(targets_own)} and the stored {one_line(others)} fit equally "
            f"well; name those that belong together, each in a rule of its own: {lines}; use from_target for "
            "one that starts anew",
            leaf=targets_own[0],
        )

    def _line(self, one: _State, source: _State) -> str:
        """Return a rule that pairs two states, by the outermost paths that hold no other state."""
        here, there = one.path, source.path
        while here and there and here[-1] == there[-1] and self._holds_one(here[:-1], there[:-1]):
            here, there = here[:-1], there[:-1]
        paths = dict.fromkeys((show_path((*self.at_path, *here)), show_path((*self.start, *there))))
        return f"rules.optimizer_state({', '.join(map(repr, paths))})"

    def _holds_one(self, here: Path, there: Path) -> bool:
        both = ((here, self.wanted), (there, self.stored))
        return all(sum(one.path[: len(path)] == path for one in states) == 1 for path, states in both)


def _is_elsewhere(at_path: Path, start: Path) -> bool:
    return at_path[: len(start)] != start and start[: len(at_path)] != at_path


def _in_part(old: Node, own: Node, part: Path) -> Node:
    """Return a stored state whose moments have, or lack, a level of the parameters as those of the target do."""
    fields = [
        {name for _, branch in iter_branches(node) for name, child in branch.children.items() if _has(child, part)}
        for node in (old, own)
    ]
    if not any(fields) or all(fields):
        shown = show_path(part)
        where = "both states have" if all(fields) else "neither state has"
        raise RuleError(f"{where} {shown} below its moments, so that it is neither taken away nor added", leaf=shown)

    def new_paths(path: Path) -> list[Path]:
        end = next((end for end, name in enumerate(path, 1) if name in fields[1]), None)
        if end is not None:
            return [path[:end] + part + path[end:]]
        for end, name in enumerate(path, 1):
            if name in fields[0] and _has(node_at(old, path[:end]), part):
                is_inside = path[end : end + len(part)] == part
                return [path[:end] + path[end + len(part) :]] if is_inside else []
        return [path]

    return _edit_tree.remap(old, new_paths)


def _has(node: Node, part: Path) -> bool:
    return isinstance(node, Branch) and node_at(node, part) is not None


def _refuse_loss(stored: Node, at_path: Path, start: Path) -> None:
    """Raise if the rule would overwrite a stored state that it does not read; a later rule may read it."""

    def is_stored_here(path: Path, leaf: Node) -> bool:
        here = (*at_path, *path)
        return isinstance(leaf, LeafHandle) and here[max(len(here) - len(leaf.path), 0) :] == leaf.path

    lost = (is_stored_here(path, leaf) for path, leaf in leaves_of(node_at(stored, at_path)).items())
    if _is_elsewhere(at_path, start) and any(lost):
        here, there = show_path(at_path), show_path(start)
        raise RuleError(
            f"the checkpoint has {here}, too, which {there} would replace; before this rule use "
            f"rules.drop({here!r}) if it is not wanted, else rules.move({start[0]!r}, 'old') and read old/… here",
            leaf=here,
        )


def _nothing(start: str, wanted: list[_State], old: Node) -> str:
    fields = "; ".join(dict.fromkeys(", ".join(sorted(state.names)) for state in wanted)) or "none"
    there = "; ".join(dict.fromkeys(", ".join(branch.children) for _, branch in iter_branches(old) if branch.children))
    return (
        f"no stored state fits, by names and shapes. The target's have the fields: {fields}; below {start} the "
        f"checkpoint has: {there[:300] or 'nothing'}. Rename parameters before this rule, or use from_target for a new "
        "optimizer"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _State:
    """A node with named fields that holds values of its own, such as Adam's count, mu and nu."""

    path: Path  # from the root of the optimizer's state
    node: Branch
    leaves: dict[Path, Any]  # by key path from the node, without those of inner states
    # For the target's states only: names in the path that the user gave; all numbers in it are indices.
    labels: frozenset[str] = frozenset()
    is_in_order: bool = False
    _common_paths: dict[_State, list[Path]] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the fields."""
        return frozenset(self.node.children)

    @functools.cached_property
    def moments(self) -> dict[Path, Any]:
        """Return the leaves that belong to parameters."""
        return {
            path: leaf for path, leaf in self.leaves.items() if _shape(leaf) or len(path) - (path[-1] == _NNX_VALUE) > 1
        }

    @property
    def plain(self) -> Path:
        """Return the path without numbers."""
        return tuple(name for name in self.path if not name.isdecimal())

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers in the path."""
        return tuple(int(name) for name in self.path if name.isdecimal())

    def order(self) -> tuple[tuple[bool, int, str], ...]:
        """Return a sort key of the path: numbers by value, independent of the format's order of names."""
        return tuple((not one.isdecimal(), int(one) if one.isdecimal() else 0, one) for one in self.path)

    def common_paths(self, other: _State) -> list[Path]:
        """Return paths of the leaves that another state has in the same shape: of a parameter all moments, or none."""
        if other not in self._common_paths:
            fitting = {path for path, leaf in self.leaves.items() if _fits(other.leaves.get(path), leaf)}
            others = [path for path in self.moments if path not in fitting and other.leaves.get(path) is not None]
            differ = {path[1:] for path in others}
            self._common_paths[other] = [
                path for path in self.leaves if path in fitting and (path not in self.moments or path[1:] not in differ)
            ]
        return self._common_paths[other]

    def fit(self, other: _State) -> tuple[int, int]:
        """Rate the fit of a stored state: number of common leaves, then of the user's names in its path."""
        return len(self.common_paths(other)), len(self.labels & set(other.path))

    def overlap(self, others: list[_State]) -> bool:
        """Return whether two of several stored states have moments of the same parameter, in any shape."""
        held = [path for one in others for path in self.moments if one.leaves.get(path) is not None]
        return len(held) > len(set(held))

    def is_nearer(self, one: _State, other: _State) -> bool:
        """Return whether one of two stored states with common leaves has more of this state's names in its path."""
        if self.fit(one)[1] <= self.fit(other)[1]:
            return False
        return any(
            path in self.moments or not self.moments for path in {*self.common_paths(one)} & {*self.common_paths(other)}
        )

    def may_come_from(self, other: _State) -> bool:
        """Return whether another state has leaves for this one other than counts without their moments."""
        common_paths = self.common_paths(other)
        return any(path in self.moments for path in common_paths) if self.moments else bool(common_paths)


def _target_states(root: Node) -> Iterator[_State]:
    """Yield the states in the target: its namedtuples, or, without any, nodes with optax's field names."""
    nodes = {path: branch for path, branch in iter_branches(root) if branch.children}
    tuples = [path for path, branch in nodes.items() if branch.container is Container.NAMEDTUPLE]
    paths = tuples or [path for path, branch in nodes.items() if branch.children.keys() & _FIELDS]
    for path in paths:
        inner = {other[len(path) :] for other in paths if other != path and other[: len(path)] == path}
        leaves = leaves_of(nodes[path]).items()
        own = {below: leaf for below, leaf in leaves if _edit_tree.prefix_in(below, inner) is None}
        if own:
            way = [(nodes[path[:end]].container, name) for end, name in enumerate(path)]
            labels = frozenset(name for kind, name in way if kind is Container.DICT and not name.isdecimal())
            is_in_order = all(kind.is_sequence for kind, name in way if name.isdecimal())
            yield _State(path, nodes[path], own, labels, is_in_order)


def _alike(first: Branch, second: Branch) -> bool:
    """Return whether two nodes have the same fields; empty ones may be missing, as releases of optax add fields."""
    fields = {**first.children, **second.children}
    return all(is_empty(fields[name]) for name in first.children.keys() ^ second.children.keys())


def _shape(leaf: Any) -> tuple[int, ...]:
    return shape_and_dtype(leaf)[0] or ()


def _fits(stored: Any, own: Any) -> bool:
    """Return whether a stored leaf has the shape of the target's."""
    shape = _shape(own)
    if isinstance(stored, LeafHandle) and stored.kind is LeafKind.PRNG_KEY:
        return stored.shape[: len(shape)] == shape
    if isinstance(stored, LeafHandle | Derived):
        return stored.shape == shape
    return False
