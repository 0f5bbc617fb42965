"""Carry over the optimizer's state of parameters that still exist: of nodes with named fields."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_branches, map_leaves, node_at, show_path
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_key, shape_and_dtype
from flax_ckpt_compat.rules import _nodes
from flax_ckpt_compat.rules._rule import Trees, rule

# Fields of optax's states, to recognize one if the target has no namedtuples, as in NNX.
FIELDS = frozenset(("count", "mu", "nu", "trace", "ema", "v_row", "sum_of_squares", "acc_grads", "notfinite_count"))
_WRAPPERS = frozenset(("inner_state", "inner_states", "inner_opt_state"))  # fields that hold states, likewise
_NNX_VALUE = "value"  # the last name of every leaf of an nnx.State


@rule
def optimizer_state(
    trees: Trees, at: str = "opt_state", stored_at: str | None = None, subtree: str | None = None
) -> Node:
    """Carry over the optimizer's state of parameters that still exist; others keep the target's.

    Inner states (Adam's count, mu and nu; a trace; …) are matched by their field names, wherever a chain or wrapper has
    them now: ``adam`` ↔ ``chain(clip, adam)``, ``masked``, ``multi_transform``, ``MultiSteps``. Rules that change names
    or shapes go before this one and match moments, too; a warning names stored moments left unused. A state is
    carried over only if some of its parameters exist, so that no count comes without its moments; of a parameter, all
    moments are, or none if one of them has another shape (``novograd`` keeps a number where ``adam`` has an array).

    Of several states that fit the same parameters, the one with the same names in its path is used (``gen``, ``disc``),
    and never that of another such name; order decides only among members of a chain. An ambiguous match is an error.

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
    at_path = _nodes.only_place(target, at, "the target")
    start = _nodes.only_place(stored, at if stored_at is None else stored_at, "the checkpoint")
    own, old = node_at(target, at_path), node_at(stored, start)
    part = () if subtree is None else _nodes.new_names(subtree)
    has, had = (bool(_holders(node, part)) for node in (own, old))
    if part and has == had:
        raise _nodes.misfit(part, f"is below the moments of {'both states; omit subtree=' if has else 'neither state'}")
    wanted, branches = sorted(_target_states(at_path, own), key=_State.order), list(iter_branches(old))
    taken: dict[Path, Node] = {}
    for fields in dict.fromkeys(frozenset(state.node.children) for state in wanted):
        group = [state for state in wanted if state.node.children.keys() == fields]
        taken |= _taken(group, sorted(_similar(start, branches, part, group), key=_State.order), wanted)
    if not taken:
        ours, theirs = (
            "; ".join(dict.fromkeys(", ".join(one.children) for one in nodes if one.children))[:300] or "nothing"
            for nodes in ([state.node for state in wanted], [branch for _, branch in branches])
        )
        raise TransformError(
            f"no stored state fits, by names and shapes. The target's have the fields: {ours}; below "
            f"{show_path(start)} the checkpoint has: {theirs}. Rename parameters first; from_target begins a new one",
            leaf=show_path(at_path),
        )
    taken |= _given(stored, at_path, start)
    return _nodes.put(stored, at_path, map_leaves(lambda path, _: taken.get(path, Own.KEEP_TARGET), own))


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

    def order(self) -> tuple[list[str], list[int]]:
        """Return names and numbers in the path, as a sort key: formats have orders of their own."""
        return [one for one in self.path if not one.isdecimal()], [int(one) for one in self.path if one.isdecimal()]

    @functools.cached_property
    def moments(self) -> set[Path]:
        """Return the paths of the leaves that belong to parameters."""
        leaves = self.leaves.items()
        return {path for path, leaf in leaves if shape_and_dtype(leaf)[0] or len(path) - (path[-1] == _NNX_VALUE) > 1}

    def common(self, other: _State) -> list[Path]:
        """Return paths of the leaves that another state has in the same shape: of a parameter all moments, or none."""
        fitting = [path for path, leaf in self.leaves.items() if _fits(other.leaves.get(path), leaf)]
        held = {path for path in self.moments if other.leaves.get(path) is not None}
        differ = {path[1:] for path in held.difference(fitting)}
        found = [path for path in fitting if path not in held or path[1:] not in differ]
        return [] if self.moments and self.moments.isdisjoint(found) else found  # no count without moments


def _taken(group: list[_State], stored: list[_State], every: list[_State]) -> dict[Path, Node]:
    """Map paths in the target to stored leaves, for states with the same fields; ``every`` has all of the target's."""
    pairs = [(state, {one: state.common(one) for one in stored}) for state in group]
    chosen = [_chosen(state, common, group, every) for state, common in pairs]
    spare = [one for one in stored if one not in chosen]
    taken: dict[Path, Node] = {}
    for source in stored:
        users = [pair for pair, one in zip(pairs, chosen, strict=True) if one is source]
        if source.moments and _overlap(source, [state for state, _ in users]):
            raise _ambiguous([(state, source) for state, _ in users], group, stored)
        for state, common in users:
            # Several optimizers may have become one: take its other moments from states that are not used otherwise.
            more = [one for one in spare if not _overlap(state, [source, one]) and not _is_anothers(state, one, every)]
            moments = Counter(path for one in more for path in common[one] if path in state.moments)
            for one in (source, *more):
                its = [path for path in common[one] if one is source or moments[path] == 1]
                taken |= {(*state.path, *path): one.leaves[path] for path in its}
    return taken


def _is_anothers(state: _State, source: _State, every: list[_State]) -> bool:
    """Return whether another network of the target has more of a stored state's names, and a parameter in common."""
    names = frozenset(source.path) - _WRAPPERS
    others = [one for one in every if len(one.labels & names) > len(state.labels & names)]
    alike = [one for one in every if others and one.labels == state.labels]
    # Neither a setting, such as a learning rate, nor an array that is a field of its own belongs to a parameter.
    parameters = {path[1:] for one in alike for path in one.moments if path[0] != "hyperparams"} - {(), (_NNX_VALUE,)}
    return any(path[1:] in parameters for one in others if state.labels - one.labels for path in one.moments)


def _chosen(state: _State, common: dict[_State, list[Path]], group: list[_State], every: list[_State]) -> _State | None:
    """Return the stored state that fits a target's state best, by names and leaves that they have in common."""
    able = {one: len(state.labels.intersection(one.path)) for one, paths in common.items() if paths}
    # Of those with the same moments, the one with most of the user's names in its path is meant.
    worse = [one for one, other in permutations(able, 2) if able[one] < able[other] and _overlap(state, [one, other])]
    fits = {one: (len(common[one]), able[one]) for one in able if one not in worse}
    equal = [one for one, fit in fits.items() if fit == max(fits.values())]
    if len(equal) > 1:
        here = [one for one in group if one.order()[0] == state.order()[0]]
        there = [one for one in common if one.order()[0] == equal[0].order()[0]]
        if len(here) == len(there) and set(equal).issubset(there):
            one = there[here.index(state)]  # members of a chain have an order, and names have none
            equal = [one] if one in equal and (state.is_in_order or state.order()[1] == one.order()[1]) else equal
    if len(equal) > 1 and _overlap(state, equal):  # others have other parameters, which `_taken` adds
        raise _ambiguous([(state, one) for one in equal], group, list(common))
    if not equal or not _is_anothers(state, equal[0], every):
        return equal[0] if equal else None
    if rest := [one for one in able if not _is_anothers(state, one, every)]:  # of a network that was renamed, perhaps
        raise _ambiguous([(state, one) for one in (equal[0], *rest)], group, list(common))
    return None


def _ambiguous(pairs: list[tuple[_State, _State]], wanted: list[_State], stored: list[_State]) -> TransformError:
    """Return the error for states that fit equally well, with rules for pairs; one in its place is last."""
    own, old = (Counter(one.path[:end] for one in many for end in range(len(one.path))) for many in (wanted, stored))
    lines = []
    for state, source in sorted(pairs[:4], key=lambda pair: pair[0].path == pair[1].path):
        here, there = state.path, source.path
        # The outermost paths that hold no other state, which a rule for more would begin anew.
        while here[-1:] == there[-1:] != () and own[here[:-1]] == old[there[:-1]] == 1:
            here, there = here[:-1], there[:-1]
        paths = dict.fromkeys((show_path((*state.root, *here)), show_path((*source.root, *there))))
        lines.append(f"rules.optimizer_state({', '.join(map(repr, paths))})")
    return TransformError(
        "several states fit equally well; name those that belong together, each in a rule of its own: "
        f"{' or '.join(lines)}; use from_target for one that starts anew",
        leaf=show_path((*pairs[0][0].root, *pairs[0][0].path)),
    )


def _overlap(state: _State, states: list[_State]) -> bool:
    """Return whether two of several states have moments of the same parameter as a state, in any shape."""
    return any(sum(one.leaves.get(path) is not None for one in states) > 1 for path in state.moments or state.leaves)


def _given(stored: Node, at_path: Path, start: Path) -> dict[Path, LeafHandle | Derived]:
    """Return what earlier rules put there, which goes first; raise if a stored state is there, for later rules."""
    if at_path[: len(start)] == start or start[: len(at_path)] == at_path:
        return {}  # it is the state that is read, or a part of it
    there = _nodes.leaves_of(node_at(stored, at_path)).items()
    given = {path: leaf for path, leaf in there if isinstance(leaf, LeafHandle | Derived)}
    for path, leaf in given.items():
        if isinstance(leaf, LeafHandle) and (*at_path, *path)[-len(leaf.path) :] == leaf.path:
            shown = show_path(at_path)
            raise TransformError(
                f"the checkpoint has {shown}, too, which {show_path(start)} would replace; before this rule use "
                f"rules.drop({shown!r}) if it is not wanted, else rules.move({start[0]!r}, 'old') and read old/… here",
                leaf=shown,
            )
    return given


def _target_states(root: Path, own: Node) -> Iterator[_State]:
    """Yield the states in the target: its namedtuples, or, without any, nodes with optax's field names."""
    nodes = {path: branch for path, branch in iter_branches(own) if branch.children}
    tuples = [path for path, branch in nodes.items() if branch.container is Container.NAMEDTUPLE]
    paths = tuples or [path for path, branch in nodes.items() if branch.children.keys() & FIELDS]
    for path in paths:
        inner = {other[len(path) :] for other in paths if other != path and other[: len(path)] == path}
        leaves = _nodes.leaves_of(nodes[path]).items()
        its = {below: leaf for below, leaf in leaves if _nodes.prefix_in(below, inner) is None}
        if its:
            way = [(nodes[path[:end]].container, name) for end, name in enumerate(path)]
            labels = frozenset(name for kind, name in way if kind is Container.DICT and not name.isdecimal())
            is_in_order = all(kind.is_sequence for kind, name in way if name.isdecimal())
            yield _State(root, path, nodes[path], its, labels, is_in_order)


def _similar(root: Path, branches: list[tuple[Path, Branch]], part: Path, group: list[_State]) -> Iterator[_State]:
    """Yield stored states with the fields of a group, after a part was added to their moments or taken away."""
    own = group[0].node.children
    here = {place for one in group for place in _holders(one.node, part)}
    for path, node in branches:
        extra = own.keys() ^ node.children.keys()  # releases of optax add fields that are empty
        if any(not _nodes.is_empty(one.get(name)) for one in (own, node.children) for name in extra):
            continue
        places = here or _holders(node, part)  # only the target's or only the stored state's, of any depth
        leaves: dict[Path, Any] = {}
        for its, leaf in _nodes.leaves_of(node).items():
            place = _nodes.prefix_in(its, places)
            if place is None:
                leaves[its] = leaf
            elif here:
                leaves[(*place, *part, *its[len(place) :])] = leaf
            elif its[len(place) :][: len(part)] == part:
                leaves[(*place, *its[len(place) + len(part) :])] = leaf
        yield _State(root, path, node, leaves)


def _holders(node: Node, part: Path) -> set[Path]:
    """Return the key paths below a node that have a part of the parameters below them; none for an empty part."""
    return {path for path, one in iter_branches(node) if path and part and node_at(one, part) is not None}


def _fits(stored: Any, own: Any) -> bool:
    """Return whether a stored leaf has the shape of the target's."""
    (shape, _), (wanted, _) = shape_and_dtype(stored), shape_and_dtype(own)
    if shape is not None and isinstance(stored, LeafHandle) and is_key(stored):
        shape = shape[: len(wanted or ())]  # without that of a key's data
    return shape == (wanted or ())
