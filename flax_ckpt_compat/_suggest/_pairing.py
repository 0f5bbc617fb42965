"""Pairs the subtrees of a checkpoint with those of a target by what they hold, from the top down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Node, Path
from flax_ckpt_compat._suggest import _patterns
from flax_ckpt_compat._suggest._gap import Gap, torn
from flax_ckpt_compat._suggest._looks import EMPTY, Memo, Roles, fits, flatten
from flax_ckpt_compat._suggest._patterns import Change, Wrap
from flax_ckpt_compat._suggest._rows import Step

_ROUNDS = 12


@dataclasses.dataclass(slots=True)
class State:
    """A checkpoint's tree after some steps.

    Attributes:
        tree: of handles and what the rules made of them.
        steps: so far.
        matched: how many leaves of the target are found with their shape.
    """

    tree: Node
    steps: tuple[Step, ...]
    matched: int


class Pairing:
    """The steps from a checkpoint to a target."""

    def __init__(self, target: Node):
        self.target, self.goal = target, flatten(target)
        self.roles, self.memo = Roles(target), Memo()

    def start(self, stored: Node) -> State:
        """Return the state before any step."""
        return State(stored, (), self._matched(stored))

    def tried(self, state: State, steps: Iterable[Step]) -> State | None:
        """Return the state after more steps, or None where a rule does not fit."""
        tree, steps = state.tree, tuple(steps)
        for step in steps:
            try:
                tree = step.rule.apply(tree, self.target)
            except CheckpointError:
                return None
        return State(tree, (*state.steps, *steps), self._matched(tree))

    def _matched(self, tree: Node) -> int:
        have = flatten(tree)
        return sum(
            path in have and fits(have[path], seen) and have[path][1] != "kept"
            for path, seen in self.goal.items()
            if seen != EMPTY
        )

    def paired(self, state: State) -> State:
        """Return the state after the steps that the contents of both trees ask for."""
        best, done = state, set[str]()
        for _ in range(_ROUNDS):
            before = state
            for group in self._groups(state):
                steps = [step for step in group if step.rule.source not in done]
                done.update(step.rule.source for step in steps)
                after = self.tried(state, steps) if steps else None
                if after is not None and after.matched >= state.matched:
                    state = after
            if state is before:
                break
            if state.matched > best.matched:
                best = state
        return best

    def _groups(self, state: State) -> Iterator[list[Step]]:
        """Yield the steps of one round; those of one list make sense together alone."""
        own = Roles(state.tree)
        changes: list[Change] = []
        wraps: dict[str, list[Wrap]] = {}
        layouts: dict[str, list[Step]] = {}
        for path, stored, target in self._branches(state.tree, self.target, own, ()):
            gap = Gap(path, stored, target, self.memo)
            for steps in gap.layouts():
                layouts.setdefault(steps[0].rule.source, steps)
            for one in gap.wrappers(state.tree, own):
                if isinstance(one, Wrap):
                    wraps.setdefault(one.name, []).append(one)
                else:
                    layouts.setdefault(one.rule.source, [one])
            changes.extend(gap.renames())
        yield from layouts.values()
        yield from map(_patterns.wrapped, wraps.values())
        yield from ([step] for step in _patterns.renames(changes, state.tree, own))

    def _branches(
        self, stored: Branch, target: Branch, own: Roles, path: Path
    ) -> Iterator[tuple[Path, Branch, Branch]]:
        """Yield the branches of both trees that are paired and differ, the outer ones first."""
        yield path, stored, target
        for name, child in stored.children.items():
            other = target.children.get(name)
            if not isinstance(child, Branch) or not isinstance(other, Branch) or own.is_optimizer((*path, name)):
                continue
            if not torn(child, other, self.memo, at_root=not path) and self.memo.named(child) != self.memo.named(other):
                yield from self._branches(child, other, own, (*path, name))
