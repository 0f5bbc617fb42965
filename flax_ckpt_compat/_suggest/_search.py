"""Tries candidates one after the other, on the real trees and with the real rules, and keeps those that help."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Node, Path
from flax_ckpt_compat._suggest import _layers, _names
from flax_ckpt_compat._suggest._gaps import Prints, gaps
from flax_ckpt_compat._suggest._looks import EMPTY, KEPT, Look, Roles, fits, flatten, items
from flax_ckpt_compat._suggest._names import Candidate, Step
from flax_ckpt_compat._suggest._scattered import scattered

# Leaves handled, over all candidates tried: about a second of work.
_BUDGET = 60_000
_LEAST_TRIES = 10
_LARGE = 1000
_FEW = 8
_MAX_COLLECTIONS = 20


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

    @property
    def rank(self) -> tuple[int, int]:
        """More is better: leaves found, then fewer steps."""
        return self.matched, -len(self.steps)


class Search:
    """One search for the steps from a checkpoint to a target."""

    def __init__(self, stored: Node, target: Node):
        self.target, self.goal = target, flatten(target)
        self.roles = Roles(target)
        self.wanted = sum(seen != EMPTY for seen in self.goal.values())
        self._cost = max(len(flatten(stored)), len(self.goal), 1)
        self._budget = max(_BUDGET, _LEAST_TRIES * self._cost)
        self.first = State(stored, (), self.matched(stored))
        for prelude in (_pre_optax(stored), *_names.endings(stored, target)):
            self.first = (self.tried(self.first, prelude.steps) if prelude else None) or self.first

    def matched(self, tree: Node) -> int:
        """How many leaves of the target a tree holds with their shape, or leaves to the target."""
        have = flatten(tree)
        return sum(
            path in have and fits(have[path], seen) and have[path] != KEPT
            for path, seen in self.goal.items()
            if seen != EMPTY
        )

    def tried(self, state: State, steps: tuple[Step, ...]) -> State | None:
        """The state after more steps; None where a rule does not fit, or all the work allowed is done."""
        tree = state.tree
        for step in steps:
            self._budget -= self._cost
            if self._budget < 0:
                return None
            try:
                tree = step.rule.apply(tree, self.target)
            except CheckpointError:
                return None
        return State(tree, (*state.steps, *steps), self.matched(tree))

    def outcomes(self) -> list[State]:
        """Several ways to find leaves of the target outside of optimizers, those that find most first."""
        found = [self._improved(self.first)]
        for start in self._starts():
            begun = self.tried(self.first, start.steps)
            if begun is not None:
                found.append(self._improved(begun))
        return sorted(found, key=lambda state: state.rank, reverse=True)

    def _is_done(self, state: State) -> bool:
        have = flatten(state.tree)
        return all(
            (path in have and fits(have[path], seen)) or self.roles.is_optimizer(path)
            for path, seen in self.goal.items()
            if seen != EMPTY
        )

    def _improved(self, state: State) -> State:
        while not self._is_done(state):
            better = self._step(state)
            if better is None:
                break
            state = better
        return state

    def _step(self, state: State) -> State | None:
        for found in self._candidates(state):
            ordered = sorted(found, key=lambda one: (-one.expected, len(one.steps)))
            renames = [one for one in ordered if one.steps[0].rule.source.startswith("rules.rename")]
            if self._cost > _LARGE and 1 < len(renames) == len(ordered):
                ordered.insert(0, _together(renames))
            elif len(renames) > 1:
                # Names that only fit when several have changed.
                ordered.append(_together(renames[:_FEW]))
            for candidate in ordered:
                better = self.tried(state, candidate.steps)
                if better is not None and better.matched > state.matched:
                    return better
        return None

    def _candidates(self, state: State) -> Iterator[list[Candidate]]:
        """Lists of candidates, the likelier first."""
        self._budget -= self._cost
        if self._budget < 0:
            return
        roles, prints = Roles(state.tree), Prints()
        found = list(gaps(state.tree, self.target, roles))
        yield [
            *_names.renames(found, prints, self._settled(state.tree), state.tree),
            *_names.wrappers(found, prints, roles, state.tree),
            *_layers.stacks(found, prints),
            *_layers.lists(found),
            *_layers.fused(found, prints),
        ]
        yield list(self._eras(state))
        yield list(scattered(state.tree, self.target, roles, self.roles))

    def _settled(self, tree: Node) -> frozenset[str]:
        """Names on the way to leaves that are found already."""
        have = flatten(tree)
        return frozenset(
            name for path, seen in self.goal.items() if path in have and fits(have[path], seen) for name in path
        )

    def _eras(self, state: State) -> Iterator[Candidate]:
        for at in ("params", "") if not state.steps else ():
            yield Candidate((Step(rules.pre_linen(at), "its names count modules of all classes together"),), 0)

    def _starts(self) -> Iterator[Candidate]:
        """First steps that may find nothing by themselves but make the rest possible, the likeliest first."""
        stored = self.first.tree
        if not isinstance(stored, Branch) or not isinstance(self.target, Branch):
            return
        likely = sorted(_collections(stored, self.target, self.roles), key=lambda one: -one.expected)
        yield from likely[:4]


def _together(candidates: list[Candidate]) -> Candidate:
    steps = tuple(step for one in candidates for step in one.steps)
    return Candidate(steps, sum(one.expected for one in candidates))


def _pre_optax(stored: Node) -> Candidate | None:
    optimizer = stored.children.get("optimizer") if isinstance(stored, Branch) else None
    if not isinstance(optimizer, Branch) or not {"target", "state"} <= optimizer.children.keys():
        return None
    return Candidate((Step(rules.pre_optax(), "optimizer/target and optimizer/state are flax.optim's"),), 0)


def _collections(stored: Branch, target: Branch, roles: Roles) -> Iterator[Candidate]:
    """Collections of the checkpoint that became the whole tree, or one part of it."""
    if len(stored.children) + len(target.children) > _MAX_COLLECTIONS:
        return
    kinds = ("params", "batch_stats")
    gone = {name: node for name, node in stored.children.items() if name not in target.children}
    present, had = [name for name in kinds if name in gone], Roles(stored)
    if "params" in gone:
        steps = tuple(Step(rules.unwrap(name), f"the target has no {name}") for name in present)
        yield Candidate(steps, _likeness(gone, present, target))
        yield Candidate(
            (Step(rules.move("params", ""), "the target has no params"),), _likeness(gone, ["params"], target)
        )
    for name, child in target.children.items():
        if name not in stored.children and not roles.is_optimizer((name,)):
            # An optimizer's state has the shapes of the parameters, too, and is none of them.
            for names in ([one] for one in gone if not had.is_optimizer((one,))):
                steps = tuple(Step(rules.move(one, name), f"{name} looks like {one}") for one in names)
                yield Candidate(steps, _likeness(gone, names, child))
            if len(present) > 1:
                steps = tuple(Step(rules.move(one, name), f"{name} looks like {one}") for one in present)
                yield Candidate(steps, _likeness(gone, present, child))
    if not any(name in target.children for name in stored.children):
        for name, child in target.children.items():
            yield Candidate(
                (Step(rules.wrap(name), f"{name} looks like the whole"),),
                _likeness(stored.children, list(stored.children), child),
            )


def _likeness(children: dict[str, Node], names: list[str], target: Node) -> int:
    """How many leaves have the same last name, shape and kind."""
    return (_ends({name: children[name] for name in names}) & _ends(target)).total()


def _ends(tree: Node | dict[str, Node]) -> Counter[tuple[str, Look]]:
    node = Branch(tree) if isinstance(tree, dict) else tree
    return Counter((_last(path), seen) for path, seen in items(node).items())


def _last(path: Path) -> str:
    return path[-2] if len(path) > 1 and path[-1] == "value" else (path[-1] if path else "")
