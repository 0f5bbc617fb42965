"""Pair the subtrees of a checkpoint with those of a target by what they hold, from the top down."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Set

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.numbered_names import numbered
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves
from flax_ckpt_compat._suggest import layouts, match_unused
from flax_ckpt_compat._suggest.differences import Change, Gap, torn
from flax_ckpt_compat._suggest.layouts import ProposedRule, either, rename
from flax_ckpt_compat._suggest.leaf_features import EMPTY, KEPT, MOMENTS, Look, Roles, SubtreeMemo, bare, fits, flatten
from flax_ckpt_compat._suggest.names import unnumbered

_ROUNDS = 8
_LAYERS = re.compile(r"rules\.(un)?stack\(")
# Renames of one round: more than a few make one mapping, and too many are no evidence for any.
_SEPARATE, _MAX_RENAMES = 24, 300
_LARGE = 20_000  # nodes of a tree for which each rule takes long


@dataclasses.dataclass(slots=True)
class State:
    """A checkpoint's tree after some steps."""

    tree: Node  # of handles and what the rules made of them
    looks: dict[Path, Look]  # of its leaves
    steps: tuple[ProposedRule, ...]
    fitting: Set[Path]  # the target's leaves that are found with their shape

    @property
    def matched(self) -> int:
        """Return the number of leaves that fit."""
        return len(self.fitting)


class Pairing:
    """The steps from a checkpoint to a target."""

    def __init__(self, target: Node):
        self.target, self.goal = target, flatten(target)
        self.roles, self.memo = Roles(target), SubtreeMemo()

    def start(self, tree: Node, steps: tuple[ProposedRule, ...] = ()) -> State:
        """Return the state of a tree after some steps."""
        have = flatten(tree)
        wanted = ((path, seen) for path, seen in self.goal.items() if seen != EMPTY and have.get(path, KEPT) != KEPT)
        return State(tree, have, steps, {path for path, seen in wanted if fits(have[path], seen)})

    def tried(self, state: State, steps: Iterable[ProposedRule]) -> State | None:
        """Return the state after more steps, or None where a rule does not fit."""
        tree, steps = state.tree, tuple(steps)
        for step in steps:
            try:
                tree = step.rule.apply(tree, self.target)
            except CheckpointError:
                return None
        return self.start(tree, (*state.steps, *steps))

    def missing(self, state: State, at: Path = ()) -> list[Path]:
        """Return the target's leaves, below one of its nodes, that a tree lacks or has in other shapes."""
        have = state.looks
        inner = {path[:end] for path in have for end in range(len(path))}
        return [
            path
            for path, seen in self.goal.items()
            if path[: len(at)] == at
            and ((path not in have and path not in inner) or (seen != EMPTY and not fits(have.get(path, EMPTY), seen)))
        ]

    def paired(self, state: State) -> State:
        """Return the state after the steps that the contents of both trees ask for, and for what they leave over."""
        return self.leftovers(self._repeated(state, self._groups))

    def leftovers(self, state: State) -> State:
        """Return the state after the steps that take what is left over to its only place; see `match_unused`."""
        return self._repeated(state, self._leftovers)

    def laid_out(self, state: State) -> State:
        """Return the state after the steps for arrays that have their names and lie otherwise."""
        arrays = [
            layouts.Stored(path, (bare(leaf.path)[-1], bare(path)[-1]), leaf.shape, self.goal[path][0])
            for path, leaf in iter_leaves(state.tree)
            if isinstance(leaf, LeafHandle) and leaf.kind is LeafKind.ARRAY and path in self.goal
        ]
        for step in layouts.steps(arrays):
            after = self.tried(state, [step])
            state = after if after is not None and after.matched > state.matched else state
        return state

    def _repeated(self, state: State, groups_of: Callable[[State], Iterator[list[ProposedRule]]]) -> State:
        done = set[str]()
        for _ in range(_ROUNDS):
            before = state
            for group in groups_of(state):
                steps = [step for step in group if step.rule.source not in done]
                done.update(step.rule.source for step in steps)
                after = self.tried(state, steps) if steps else None
                if after is None or after.matched < state.matched:
                    continue
                # Layers elsewhere that lie as they should must not be stacked, too.
                if not any(map(_LAYERS.match, (step.rule.source for step in steps))) or state.fitting <= after.fitting:
                    state = after
            if state is before:
                break
        return state

    def _leftovers(self, state: State) -> Iterator[list[ProposedRule]]:
        found = list(match_unused.changes(state.tree, state.looks, self.target, self.goal, self.memo))
        if found:
            yield from _renamed(found, _places(state.tree), Roles(state.tree))

    def _groups(self, state: State) -> Iterator[list[ProposedRule]]:
        """Yield the steps of one round; those of one list make sense together alone."""
        own = Roles(state.tree)
        places = _places(state.tree)
        stacks: dict[str, list[ProposedRule]] = {}
        rows: list[Change] = []
        changes: list[Change] = []
        for path, stored, target in self._branches(state.tree, self.target, own, ()):
            gap = Gap(path, stored, target, self.memo)
            rows += gap.rows()
            for found in gap.others():
                if isinstance(found, Change):
                    changes += [found] if self._keeps_roles(found, own) else []
                else:
                    stacks.setdefault(found[0].rule.source, found)
        yield from _renamed(rows, places, own)
        yield from stacks.values()
        yield from _renamed(changes, places, own)

    def _keeps_roles(self, change: Change, own: Roles) -> bool:
        """Return whether no optimizer's state, whose moments look like parameters, becomes another thing."""
        was_optimizer = all(own.is_optimizer((*change.path, name)) for name in change.old)
        if was_optimizer and not change.path and len(own.roots) != len(self.roles.roots):
            return False  # one became several, or the other way round
        return not was_optimizer or any(self.roles.is_optimizer((*change.path, name)) for name in change.new)

    def _branches(
        self, stored: Branch, target: Branch, own: Roles, path: Path
    ) -> Iterator[tuple[Path, Branch, Branch]]:
        """Yield the branches of both trees that are paired and differ, the outer ones first."""
        yield path, stored, target
        sides = [{name: self.memo.print(child) for name, child in one.children.items()} for one in (stored, target)]
        # Of the children that are not as they were; a tower is none that moved because another one is like it.
        prints = [{one[name] for name in one if one[name] != other.get(name)} for one, other in (sides, sides[::-1])]
        for name, child in stored.children.items():
            other = target.children.get(name)
            if not isinstance(child, Branch) or not isinstance(other, Branch) or own.is_optimizer((*path, name)):
                continue
            if self.memo.named(child) == self.memo.named(other):
                continue
            # Of one name, but without a leaf in common: where neither is there under another name, all of it changed.
            changed = bool(path) and self.memo.print(child) not in prints[1] and self.memo.print(other) not in prints[0]
            if changed or not torn(child, other, self.memo, at_root=not path):
                yield from self._branches(child, other, own, (*path, name))


def _places(tree: Node) -> dict[str, set[Path]]:
    """Return the key paths of the branches that have a child of each name."""
    places: dict[str, set[Path]] = {}
    for path, branch in iter_branches(tree):
        for name in branch.children:
            places.setdefault(name, set()).add(path)
    return places


def _renamed(changes: list[Change], places: dict[str, set[Path]], own: Roles) -> Iterator[list[ProposedRule]]:
    """Yield renames, with parent names if a name is ambiguous; those that reuse old names together, in one step."""
    homes: dict[str, set[Path]] = {}
    kinds: dict[tuple[str, Path], Change] = {}
    for change in sorted(changes, key=lambda one: len(one.path)):
        homes.setdefault(str(change.patterns), set()).add(change.path)
        kinds.setdefault((str(change.patterns), unnumbered(change.path)), change)
    if len(kinds) > _MAX_RENAMES:
        return
    separate = _SEPARATE if sum(map(len, places.values())) < _LARGE else 2
    found: dict[str, dict[str, Change]] = {}
    for (key, _), change in kinds.items():
        prefix = _prefix(change, homes[key], places, own)
        found.setdefault(prefix, {}).setdefault(key, change)
    for prefix, group in found.items():
        together: dict[str, str] = {}
        olds = {name: change for change in group.values() for name in change.old}
        for change in group.values():
            patterns = {
                prefix + pattern: to if prefix in ("", "^") else r"\1/" + to.replace(r"\1", r"\2")
                for pattern, to in change.patterns.items()
            }
            if (
                len(group) > separate
                or any(olds.get(name, change) is not change for name in change.new)
                or any(name in other.new for other in group.values() if other is not change for name in change.old)
            ):
                together |= patterns
            else:
                yield [rename(patterns, change.reason)]
        if together:
            many = f"{len(group)} names" if len(group) > separate else "some new names are old names of others"
            yield [rename(together, f"in one step, because {many}" if "are" in many else many)]


def _prefix(change: Change, homes: set[Path], places: dict[str, set[Path]], own: Roles) -> str:
    """Return a pattern for as many names above a child as tell it from children that keep their name."""
    path = change.path
    everywhere = {at for name in change.old for at in places.get(name, ())}
    inside = {at for at in everywhere if own.is_optimizer(at) and not own.is_optimizer(path)}
    moments = {at for at in inside if not MOMENTS.isdisjoint(at)}  # other names there may be an optimizer's own
    strangers = {unnumbered(at) for at in everywhere - moments - homes}
    if not strangers or not path:
        return "^" if strangers else ""
    like = unnumbered(path)
    many = sum(unnumbered(home) == like for home in homes) > 1
    shown = [_any_number(name) if many else literal(name) for name in path]
    for count in range(1, len(path)):
        if not any(other[-count:] == like[-count:] for other in strangers):
            return f"({'/'.join(shown[-count:])})/"
    above = {at[-len(path)] for at in moments if len(at) >= len(path) and at[len(at) - len(path) + 1 :] == path[1:]}
    above = {path[0]} | (above & MOMENTS)
    first = f"(?:{either(above)})" if len(above) > 1 else literal(path[0])
    return f"({'/'.join([first, *shown[1:]])})/"


def _any_number(name: str) -> str:
    found = numbered(name)  # the last one alone: others tell rows apart
    return rf"{literal(found[0])}\d+" if found else literal(name)
