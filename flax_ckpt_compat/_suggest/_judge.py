"""Whether a proposal is beyond doubt: looks at what each target leaf would get, not at how it was found."""

from __future__ import annotations

from collections.abc import Iterator

from flax_ckpt_compat._core.tree import Node, Path, show_path
from flax_ckpt_compat._suggest import _moments_judge, _rivals
from flax_ckpt_compat._suggest._outcome import Outcome, outcome_of
from flax_ckpt_compat._suggest._pairing import State

_GUESSES = ("rules.fuse", "rules.split", "rules.pad", "rules.cut")


def doubts(stored: Node, target: Node, state: State, lacking: list[Path]) -> list[str]:
    """Return the doubts about a proposal, a sentence each; none if it is certain.

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
    found += dict.fromkeys(step.doubt for step in state.steps if step.doubt)
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
    """Yield a doubt if a stored leaf would move while the target's leaf of its own path gets nothing."""
    for path, source in outcome.pairs.items():
        if source in outcome.kept:
            yield f"{show_path(source)} would go to {show_path(path)}, and nothing to the target's leaf of that name"
            return
