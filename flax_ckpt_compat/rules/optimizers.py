"""The rule that takes over the optimizer's state for the parameters that still exist."""

from __future__ import annotations

import dataclasses

from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.folding import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves, show_path
from flax_ckpt_compat._trees.leaf_sources import Own
from flax_ckpt_compat.rules import _states, _trees, targets
from flax_ckpt_compat.rules._rule import Apply, rule
from flax_ckpt_compat.rules._states import State


@rule
def optimizer_state(who: str, at: str = "opt_state", stored_at: str | None = None) -> Apply:
    """Takes the optimizer's state of the parameters that still exist; for others the target keeps its own.

    The states inside (Adam's count, mu and nu; a trace; …) are found by the names of their fields, wherever a chain
    or a wrapper has them now: ``adam`` ↔ ``chain(clip, adam)``, ``masked``, ``multi_transform``, ``MultiSteps``.
    Renamed parameters need a `rename` before this rule. A state none of whose parameters exist is not taken at all,
    so that no count comes without its moments.

    Of states that fit the same parameters, the one below equal names is taken (``gen``, ``disc``); the order decides
    only among members of a chain. What neither tells is an error. Where several become one, the count is that of the
    first by name.

    Where new parameters start with Adam's moments of zero beside an old count, Adam corrects their bias too little:
    their first steps are several times the usual length. Warm the learning rate up, or start the state anew with
    `from_target`.

    Args:
        at: literal path of the optimizer's state in the target.
        stored_at: the same in the checkpoint, if it differs.

    Raises:
        TransformError: when applied: the target or the checkpoint has no such path, no stored state fits the
            target's, several fit equally well, or the checkpoint's own at ``at`` would be lost.
    """
    source = at if stored_at is None else stored_at

    def apply(stored: Node, target: Node) -> Node:
        where = _trees.find(target, at, who, whose="the target")
        start = _trees.find(stored, source, who)
        _refuse_loss(stored, where, start, who)
        own, old = _trees.node_at(target, where), _trees.node_at(stored, start)
        wanted, branches = list(_states.target_states(own)), list(iter_branches(old))
        call = _Call(who, where, start)
        taken: dict[Path, Node] = {}
        for names in dict.fromkeys(state.names for state in wanted):
            group = [state for state in wanted if state.names == names]
            similar = [
                State(*one, _states.leaves_of(one[1])) for one in branches if _states.alike(one[1], group[0].node)
            ]
            taken |= _take(group, sorted(similar, key=State.order), call)
        if not taken:
            raise TransformError(_nothing(who, show_path(start), wanted, old), leaf=show_path(where))
        return targets.put(stored, where, _with(taken, own), who)

    return apply


@dataclasses.dataclass(frozen=True)
class _Call:
    """The rule for messages, and the paths of the optimizer's state in the target and in the checkpoint."""

    who: str
    where: Path
    start: Path

    def ambiguous(self, pairs: list[tuple[State, State]], wanted: list[State], stored: list[State]) -> TransformError:
        """The error for states of the target and stored ones that fit equally well."""
        first, second = (dict.fromkeys(states) for states in zip(*pairs, strict=True))
        targets_own = [show_path((*self.where, *one.path)) for one in first]
        others = [show_path((*self.start, *one.path)) for one in second]
        lines = " or ".join(self._line(*pair, wanted, stored) for pair in pairs[:4])
        return TransformError(
            f"{self.who}: the target's {one_line(targets_own)} and the stored {one_line(others)} fit equally well; "
            f"name those that belong together, each in a rule of its own: {lines}; use from_target for "
            "one that starts anew",
            leaf=targets_own[0],
        )

    def _line(self, one: State, source: State, wanted: list[State], stored: list[State]) -> str:
        """The rule for two that may belong together, with what is around them as long as no other is there."""
        here, there = one.path, source.path
        while here and there and here[-1] == there[-1] and _alone(here[:-1], wanted) and _alone(there[:-1], stored):
            here, there = here[:-1], there[:-1]
        paths = dict.fromkeys((show_path((*self.where, *here)), show_path((*self.start, *there))))
        return f"rules.optimizer_state({', '.join(map(repr, paths))})"


def _alone(path: Path, states: list[State]) -> bool:
    return sum(one.path[: len(path)] == path for one in states) == 1


def _refuse_loss(stored: Node, where: Path, start: Path, who: str) -> None:
    """Raises where another stored state than the one that is read would be overwritten; a later rule may read it."""
    node = stored
    for name in where:
        node = node.children.get(name) if isinstance(node, Branch) else None
    is_other = where[: len(start)] != start and start[: len(where)] != where
    if is_other and any(not _states.is_empty(leaf) for _, leaf in iter_leaves(node)):
        here, there = show_path(where), show_path(start)
        raise TransformError(
            f"{who}: the checkpoint has {here}, too, which {there} would replace; before this rule use "
            f"rules.drop({here!r}) if it is not wanted, else rules.move({start[0]!r}, 'old') and read old/… here",
            leaf=here,
        )


def _take(wanted: list[State], stored: list[State], call: _Call) -> dict[Path, Node]:
    """Path in the target's optimizer state → stored leaf, for states of the same fields."""
    chosen = [_choose(state, wanted, stored, call) for state in wanted]
    spare = [state for state in stored if state not in chosen]
    taken: dict[Path, Node] = {}
    users: dict[tuple[int, Path], State] = {}
    for state, source in zip(wanted, chosen, strict=True):
        if source is None:
            continue
        for path in state.fitting(source):
            other = users.setdefault((id(source), path), state)
            if other is not state and path in state.moments:
                raise call.ambiguous([(state, source), (other, source)], wanted, stored)
            taken[(*state.path, *path)] = source.leaves[path]
        # What several optimizers did, one may do now: its other moments come from those that nobody else takes.
        found: dict[Path, list[Node]] = {}
        for one in spare:
            if not state.overlap([source, one]):
                for path in state.fitting(one):
                    found.setdefault(path, []).append(one.leaves[path])
        for path in state.moments.keys() - set(state.fitting(source)):
            if len(fits := found.get(path, [])) == 1:
                taken[(*state.path, *path)] = fits[0]
    return taken


def _choose(state: State, wanted: list[State], stored: list[State], call: _Call) -> State | None:
    """The stored state that fits a wanted one best."""
    able = [one for one in stored if state.may_come_from(one)]
    able = [one for one in able if not any(state.is_nearer(other, one) for other in able)]
    if not able:
        return None
    best = max(map(state.fit, able))
    equal = [one for one in able if state.fit(one) == best]
    if len(equal) == 1:
        return equal[0]
    if found := _in_order(state, equal, wanted, stored):
        return found
    if state.moments and not state.overlap(equal):
        return equal[0]  # each has other parameters, and `_take` takes those of the rest, too
    raise call.ambiguous([(state, one) for one in equal], wanted, stored)


def _in_order(state: State, equal: list[State], wanted: list[State], stored: list[State]) -> State | None:
    """Of stored members of a chain the one at the wanted one's place, where as many are wanted; names have no order."""
    peers = sorted((one for one in wanted if one.plain == state.plain), key=State.order)
    members = [one for one in stored if one.plain == equal[0].plain]
    is_chain = all(one.is_in_order for one in peers)
    if len(peers) != len(members) or any(one not in members for one in equal):
        return None
    if not is_chain and [one.numbers for one in peers] != [one.numbers for one in members]:
        return None
    found = members[peers.index(state)]
    return found if found in equal else None


def _nothing(who: str, start: str, wanted: list[State], old: Node) -> str:
    fields = "; ".join(dict.fromkeys(", ".join(sorted(state.names)) for state in wanted)) or "none"
    there = "; ".join(dict.fromkeys(", ".join(branch.children) for _, branch in iter_branches(old) if branch.children))
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
