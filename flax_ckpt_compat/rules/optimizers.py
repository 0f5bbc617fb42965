"""Carry over the optimizer's state of parameters that still exist: of nodes with named fields."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_branches, map_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_key, shape_and_dtype
from flax_ckpt_compat.rules import _nodes
from flax_ckpt_compat.rules._nodes import is_empty, leaves_of
from flax_ckpt_compat.rules._rule import Trees, rule

# Fields of optax's states, to recognize one if the target has no namedtuples, as in NNX.
_FIELDS = frozenset(("count", "mu", "nu", "trace", "ema", "v_row", "sum_of_squares", "acc_grads", "notfinite_count"))
_NNX_VALUE = "value"  # the last name of every leaf of an nnx.State


@rule
def optimizer_state(
    trees: Trees, at: str = "opt_state", stored_at: str | None = None, subtree: str | None = None
) -> Node:
    """Carry over the optimizer's state of parameters that still exist; others keep the target's.

    Inner states (Adam's count, mu and nu; a trace; …) are matched by their field names, wherever a chain or wrapper has
    them now: ``adam`` ↔ ``chain(clip, adam)``, ``masked``, ``multi_transform``, ``MultiSteps``. Renamed parameters need
    a `rename` before this rule. A state is carried over only if some of its parameters exist, so that no count comes
    without its moments; of a parameter, all moments are, or none if one of them has another shape (``novograd`` keeps
    one number where ``adam`` keeps an array).

    Of several states that fit the same parameters, the one with the same names in its path is used (``gen``, ``disc``);
    order decides only among members of a chain. An ambiguous match is an error.

    One state that became several, of ``gen`` and ``disc``, or several that became one, take a rule for each part, with
    the part's name if only one of the two states has it in its moments: ``optimizer_state("opt_gen", "opt", "gen")``.
    Of several that become one, the count is that of the first rule, within one rule that of the first by name.

    New parameters with zero moments beside an old count get too little bias correction from Adam: their first steps are
    several times the usual length. Warm up the learning rate, or start the state anew with `from_target`.

    Args:
        at: pattern of the whole key path of the optimizer's state in the target.
        stored_at: the same in the checkpoint, if it differs.
        subtree: key path of the parameters' part, below ``mu``, ``nu`` and so on, that only the stored state or only
            the target's has: it is taken away, or added.
    """
    stored, target, _ = trees
    at_path = _place(target, at, "the target")
    start = _place(stored, at if stored_at is None else stored_at, "the checkpoint")
    is_elsewhere = at_path[: len(start)] != start and start[: len(at_path)] != at_path
    own, old = node_at(target, at_path), node_at(stored, start)
    if subtree is not None:
        old = _in_part(old, own, _nodes.new_names(subtree))
    wanted, branches = list(_target_states(at_path, own)), list(iter_branches(old))
    taken: dict[Path, Node] = {}
    for fields in dict.fromkeys(frozenset(state.node.children) for state in wanted):
        group = [state for state in wanted if state.node.children.keys() == fields]
        similar = [_State(start, *one, leaves_of(one[1])) for one in branches if _alike(one[1], group[0].node)]
        taken |= _taken(group, sorted(similar, key=_State.order))
    if not taken:
        ours, theirs = _fields(state.node for state in wanted), _fields(branch for _, branch in branches)
        raise TransformError(
            f"no stored state fits, by names and shapes. The target's have the fields: {ours}; below "
            f"{show_path(start)} the checkpoint has: {theirs}. Rename parameters first; from_target begins a new one",
            leaf=show_path(at_path),
        )
    if is_elsewhere:
        _refuse_loss(stored, at_path, start)

    def new_leaf(path: Path, leaf: Node) -> Node:
        if isinstance(leaf, Branch):
            return leaf
        # What earlier rules have put there goes first.
        given = node_at(stored, (*at_path, *path)) if is_elsewhere and leaf is not None else None
        return given if isinstance(given, LeafHandle | Derived) else taken.get(path, Own.KEEP_TARGET)

    return _nodes.put(stored, at_path, map_leaves(new_leaf, own))


def _fields(nodes: Iterable[Branch]) -> str:
    return "; ".join(dict.fromkeys(", ".join(node.children) for node in nodes if node.children))[:300] or "nothing"


def _place(tree: Node, pattern: str, whose: str) -> Path:
    """Return the only key path that a pattern matches."""
    found = list(_nodes.select(tree, [pattern], whose=whose))
    if len(found) > 1:
        raise TransformError(f"{pattern!r} must match one place in {whose}, found {one_line(map(show_path, found))}")
    return found[0]


@dataclasses.dataclass(frozen=True, eq=False)
class _State:
    """A node with named fields that holds values of its own, such as Adam's count, mu and nu."""

    root: Path  # of the optimizer's state
    path: Path  # from there
    node: Branch
    leaves: dict[Path, Any]  # by key path from the node, without those of inner states
    # For the target's states only: names in the path that the user gave; all numbers in it are indices.
    labels: frozenset[str] = frozenset()
    is_in_order: bool = False

    def order(self) -> tuple[tuple[bool, int, str], ...]:
        """Return a sort key of the path: numbers by value, independent of the format's order of names."""
        return tuple((not one.isdecimal(), int(one) if one.isdecimal() else 0, one) for one in self.path)

    def moments(self) -> set[Path]:
        """Return the paths of the leaves that belong to parameters."""
        leaves = self.leaves.items()
        return {path for path, leaf in leaves if shape_and_dtype(leaf)[0] or len(path) - (path[-1] == _NNX_VALUE) > 1}

    def common(self, other: _State) -> list[Path]:
        """Return paths of the leaves that another state has in the same shape: of a parameter all moments, or none."""
        fitting = [path for path, leaf in self.leaves.items() if _fits(other.leaves.get(path), leaf)]
        held = {path for path in self.moments() if other.leaves.get(path) is not None}
        differ = {path[1:] for path in held.difference(fitting)}
        return [path for path in fitting if path not in held or path[1:] not in differ]


def _taken(wanted: list[_State], stored: list[_State]) -> dict[Path, Node]:
    """Map paths in the target's optimizer state to stored leaves; all states have the same fields."""
    found = [(state, {one: state.common(one) for one in stored}) for state in wanted]
    chosen = [_chosen(state, common, wanted) for state, common in found]
    spare = [one for one in stored if one not in chosen]
    taken: dict[Path, Node] = {}
    users: dict[tuple[_State, Path], _State] = {}
    for (state, common), source in zip(found, chosen, strict=True):
        if source is None:
            continue
        moments = state.moments()
        for path in common[source]:
            other = users.setdefault((source, path), state)
            if other is not state and path in moments:
                raise _ambiguous([(state, source), (other, source)], wanted, stored)
            taken[(*state.path, *path)] = source.leaves[path]
        # Several optimizers may have become one: take its other moments from states that are not used otherwise.
        more = [(one, path) for one in spare if not _overlap(moments, [source, one]) for path in common[one]]
        counts = Counter(path for _, path in more)
        more = [(one, path) for one, path in more if path in moments and counts[path] == 1]
        taken |= {(*state.path, *path): one.leaves[path] for one, path in more}
    return taken


def _chosen(state: _State, common: dict[_State, list[Path]], wanted: list[_State]) -> _State | None:
    """Return the stored state that fits a target's state best, of those with the leaves that they have in common."""
    moments, stored = state.moments(), list(common)
    # No counts without their moments.
    held = {one: moments.intersection(paths) if moments else set(paths) for one, paths in common.items()}
    able = {one: len(state.labels.intersection(one.path)) for one, paths in held.items() if paths}
    # Of those with the same moments, the one with most of the user's names in its path is meant.
    nearest = (
        one for one in able if all(able[one] >= able[other] or held[one].isdisjoint(held[other]) for other in able)
    )
    fits = {one: (len(common[one]), able[one]) for one in nearest}
    equal = [one for one, fit in fits.items() if fit == max(fits.values())]
    here, there = _row(state, wanted), _row(equal[0], stored) if equal else []
    if len(here) == len(there) and set(equal).issubset(there):
        one = there[here.index(state)]  # members of a chain have an order, and names have none
        is_same = state.is_in_order or [*filter(str.isdecimal, state.path)] == [*filter(str.isdecimal, one.path)]
        equal = [one] if is_same and one in equal else equal
    if len(equal) > 1 and (not moments or _overlap(moments, equal)):
        raise _ambiguous([(state, one) for one in equal], wanted, stored)
    return equal[0] if equal else None  # others have other parameters; `_taken` adds those


def _ambiguous(pairs: list[tuple[_State, _State]], wanted: list[_State], stored: list[_State]) -> TransformError:
    """Return the error for states that fit equally well, with the rules for pairs of them."""

    def holds_one(path: Path, states: list[_State]) -> bool:
        return sum(one.path[: len(path)] == path for one in states) == 1

    lines = []
    for state, source in pairs[:4]:
        here, there = state.path, source.path
        # The outermost paths that hold no other state, which a rule for more would begin anew.
        while here[-1:] == there[-1:] != () and holds_one(here[:-1], wanted) and holds_one(there[:-1], stored):
            here, there = here[:-1], there[:-1]
        paths = dict.fromkeys((show_path((*state.root, *here)), show_path((*source.root, *there))))
        lines.append(f"rules.optimizer_state({', '.join(map(repr, paths))})")
    return TransformError(
        "several states fit equally well; name those that belong together, each in a rule of its own: "
        f"{' or '.join(lines)}; use from_target for one that starts anew",
        leaf=show_path((*pairs[0][0].root, *pairs[0][0].path)),
    )


def _row(state: _State, states: list[_State]) -> list[_State]:
    """Return those of several states whose paths differ from a state's in numbers only, in order."""
    names, *others = ([name for name in one.path if not name.isdecimal()] for one in (state, *states))
    return sorted((one for one, its in zip(states, others, strict=True) if its == names), key=_State.order)


def _overlap(moments: set[Path], states: list[_State]) -> bool:
    """Return whether two of several stored states have moments of the same parameter, in any shape."""
    return any(sum(one.leaves.get(path) is not None for one in states) > 1 for path in moments)


def _in_part(old: Node, own: Node, part: Path) -> Node:
    """Return a stored state whose moments have, or lack, a level of the parameters as those of the target do."""
    there, here = (
        {path[-1] for path, branch in iter_branches(node) if path and node_at(branch, part) is not None}
        for node in (old, own)
    )
    if bool(there) == bool(here):
        where = "both states have" if here else "neither state has"
        shown = show_path(part)
        raise TransformError(f"{where} {shown} below its moments, so it is neither taken away nor added", leaf=shown)

    def new_paths(path: Path) -> list[Path]:
        for end, name in enumerate(path, 1):
            field, below = path[:end], path[end:]
            if name in here:
                return [field + part + below]
            if name in there and node_at(old, field + part) is not None:
                return [field + below[len(part) :]] if below[: len(part)] == part else []
        return [path]

    return _nodes.remap(old, new_paths)


def _refuse_loss(stored: Node, at_path: Path, start: Path) -> None:
    """Raise if the rule would overwrite a stored state that it does not read; a later rule may read it."""
    for path, leaf in leaves_of(node_at(stored, at_path)).items():
        here = (*at_path, *path)
        if isinstance(leaf, LeafHandle) and here[max(len(here) - len(leaf.path), 0) :] == leaf.path:
            shown = show_path(at_path)
            raise TransformError(
                f"the checkpoint has {shown}, too, which {show_path(start)} would replace; before this rule use "
                f"rules.drop({shown!r}) if it is not wanted, else rules.move({start[0]!r}, 'old') and read old/… here",
                leaf=shown,
            )


def _target_states(root: Path, own: Node) -> Iterator[_State]:
    """Yield the states in the target: its namedtuples, or, without any, nodes with optax's field names."""
    nodes = {path: branch for path, branch in iter_branches(own) if branch.children}
    tuples = [path for path, branch in nodes.items() if branch.container is Container.NAMEDTUPLE]
    paths = tuples or [path for path, branch in nodes.items() if branch.children.keys() & _FIELDS]
    for path in paths:
        inner = {other[len(path) :] for other in paths if other != path and other[: len(path)] == path}
        leaves = leaves_of(nodes[path]).items()
        its = {below: leaf for below, leaf in leaves if _nodes.prefix_in(below, inner) is None}
        if its:
            way = [(nodes[path[:end]].container, name) for end, name in enumerate(path)]
            labels = frozenset(name for kind, name in way if kind is Container.DICT and not name.isdecimal())
            is_in_order = all(kind.is_sequence for kind, name in way if name.isdecimal())
            yield _State(root, path, nodes[path], its, labels, is_in_order)


def _alike(first: Branch, second: Branch) -> bool:
    """Return whether two nodes have the same fields; empty ones may be missing, as releases of optax add fields."""
    fields = {**first.children, **second.children}
    return all(is_empty(fields[name]) for name in first.children.keys() ^ second.children.keys())


def _fits(stored: Any, own: Any) -> bool:
    """Return whether a stored leaf has the shape of the target's."""
    (shape, _), (wanted, _) = shape_and_dtype(stored), shape_and_dtype(own)
    if shape is not None and isinstance(stored, LeafHandle) and is_key(stored):
        shape = shape[: len(wanted or ())]  # without that of a key's data
    return shape == (wanted or ())
