"""Proposes rules when a checkpoint lacks leaves of a target, from names, shapes, dtypes and structure alone."""

from __future__ import annotations

import dataclasses

from flax_ckpt_compat._core.printable import printable
from flax_ckpt_compat._core.tree import Branch, Node, show_path
from flax_ckpt_compat._suggest import _starts
from flax_ckpt_compat._suggest._akin import in_order
from flax_ckpt_compat._suggest._finish import finished, missing
from flax_ckpt_compat._suggest._judge import doubts
from flax_ckpt_compat._suggest._pairing import Pairing, State
from flax_ckpt_compat._suggest._rows import Step
from flax_ckpt_compat.rules import Rule

__all__ = ["Step", "Suggestion", "suggest"]
_MAX_STARTS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """Rules that make a checkpoint fit a target; prints as Python to paste.

    Attributes:
        steps: in the order in which they apply.
        confident: nothing is missing afterwards, and names or shapes speak for each step and against any other.
        remaining: key paths of target leaves that are still missing, joined with ``/``.
        doubts: what speaks against being confident, a sentence each.
    """

    steps: tuple[Step, ...]
    confident: bool
    remaining: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def rules(self) -> list[Rule]:
        """What ``transforms``, or ``orbax_transforms`` of `restore_checkpoint`, takes."""
        return [step.rule for step in self.steps]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Less is better: leaves still missing, doubts, steps."""
        return len(self.remaining), len(self.doubts), len(self.steps)

    def __str__(self) -> str:
        # A name with a line break must not become a line of Python.
        lines = [
            f"    {self._mark(step)}{step.rule},  # {printable(step.reason, one_line=True)}" for step in self.steps
        ]
        return "\n".join(["from flax_ckpt_compat import rules", "", "transforms = [", *lines, "]"])

    def _mark(self, step: Step) -> str:
        """Return what makes a comment of a guess that would throw stored values away."""
        return "# " if not self.confident and step.rule.source.startswith("rules.from_target") else ""


def suggest(stored: Node, target: Node) -> Suggestion | None:
    """Proposes steps from a checkpoint to a target that lacks leaves in it, or has them in other shapes.

    Args:
        stored: the checkpoint's tree of leaf handles; no array data is read.
        target: the target's tree, of `flax_ckpt_compat._trees.state_dict.describe`.

    Returns:
        The proposal, or None where nothing is missing or nothing helps.
    """
    if not isinstance(stored, Branch) or not isinstance(target, Branch) or not missing(stored, target):
        return None
    # Formats keep names in different orders, and what is proposed must not depend on it.
    stored, target = in_order(stored), in_order(target)
    pairing = Pairing(target)
    first = pairing.start(stored)
    for prelude in (_starts.pre_optax(stored), *_starts.endings(stored, target)):
        first = (pairing.tried(first, prelude[0]) if prelude else None) or first
    found = [pairing.paired(first)]
    likely = sorted(_starts.collections(first.tree, target, pairing.roles), key=lambda one: -one[1])
    for steps, _ in likely[:_MAX_STARTS]:
        begun = pairing.tried(first, steps)
        if begun is not None:
            found.append(pairing.paired(begun))
    best: Suggestion | None = None
    most, lacking = 0, len(missing(stored, target))
    for state in sorted(found, key=lambda one: (-one.matched, len(one.steps))):
        # Fewer leaves found is no better way, however sure.
        if state.matched < max(most, 1):
            break
        most = state.matched
        proposal = _judged(stored, target, finished(pairing, state, stored))
        if len(proposal.remaining) <= lacking / 2 and (best is None or proposal.rank < best.rank):
            best = proposal
    return best


def _judged(stored: Node, target: Node, state: State) -> Suggestion:
    lacking = missing(state.tree, target)
    against = doubts(stored, target, state, lacking)
    told = tuple(printable(doubt, one_line=True) for doubt in against)
    return Suggestion(state.steps, not against, tuple(map(show_path, lacking)), told)
