"""Whether a proposal is beyond doubt: looks at what each target leaf would get, not at how it was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.tree import Node, Path, iter_leaves, show_path
from flax_ckpt_compat._suggest import _moments_judge, _rivals
from flax_ckpt_compat._suggest._looks import Look
from flax_ckpt_compat._suggest._outcome import Outcome, outcome_of
from flax_ckpt_compat._suggest._pairing import State
from flax_ckpt_compat._trees.leaf_sources import Derived

_GUESSES = ("rules.fuse", "rules.split", "rules.pad", "rules.cut")


def doubts(stored: Node, target: Node, state: State, lacking: list[Path]) -> list[str]:
    """What speaks against a proposal, a sentence each; none where it is beyond doubt.

    Args:
        stored: the checkpoint's tree.
        target: the target's tree.
        state: the outcome of the proposal.
        lacking: target leaves that it does not find.
    """
    if lacking:
        return [f"{len(lacking)} leaves are still missing, such as {show_path(lacking[0])}"]
    found = [f"{step.rule} guesses the order" for step in state.steps if step.rule.source.startswith(_GUESSES)]
    outcome = outcome_of(stored, target, state.tree)
    found += _changed_kind(outcome)
    found += _taken_away(outcome)
    found += _stacks(state.tree, outcome.goal)
    found += _rivals.doubts(outcome)
    found += _moments_judge.doubts(outcome, stored, target)
    return found


def _changed_kind(outcome: Outcome) -> Iterator[str]:
    """Leaves that would come as another kind of number, or from a leaf of another role."""
    for path, source in outcome.pairs.items():
        kinds = {outcome.goal[path][1], outcome.stored[source][1]}
        if path != source and len(kinds) > 1:
            yield f"{show_path(path)} would come from {show_path(source)}, which is of another kind"
            return


def _taken_away(outcome: Outcome) -> Iterator[str]:
    """Stored leaves that would go elsewhere, while the target's leaf of just their path got nothing."""
    for path, source in outcome.pairs.items():
        if source in outcome.kept:
            yield f"{show_path(source)} would go to {show_path(path)}, and nothing to the target's leaf of that name"
            return


def _stacks(tree: Node, goal: dict[Path, Look]) -> list[str]:
    """Stacks whose axis the shapes do not tell."""
    shapes = [leaf.shape or () for path, leaf in iter_leaves(tree) if path in goal and _is_stack(leaf)]
    if shapes and all(shape[:1] == shape[1:2] for shape in shapes):
        return ["the shapes do not tell on which axis the layers lie"]
    return []


def _is_stack(leaf: Any) -> bool:
    return (
        isinstance(leaf, Derived) and len(leaf.inputs) > 1 and all(isinstance(one, LeafHandle) for one in leaf.inputs)
    )
