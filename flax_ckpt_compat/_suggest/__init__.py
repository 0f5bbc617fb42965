"""Propose rules when a checkpoint lacks leaves of a target, from names, shapes, dtypes and structure alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._core.tree import Branch, Node, Path, joined, map_leaves, show_path
from flax_ckpt_compat._suggest import proposals
from flax_ckpt_compat._suggest.confidence import judged
from flax_ckpt_compat._suggest.layouts import ProposedRule
from flax_ckpt_compat._suggest.names import natural
from flax_ckpt_compat._suggest.pairing import Pairing
from flax_ckpt_compat._trees.leaf_sources import Derived
from flax_ckpt_compat.rules import Rule

__all__ = ["ProposedRule", "Suggestion", "suggest"]
_MAX_STARTS = 4
_MANY = 5000  # missing leaves, above which one way less is tried


@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """Rules that make a checkpoint fit a target; prints as Python to paste.

    Attributes:
        steps: in the order in which they apply.
        remaining: key paths of target leaves that are still missing, joined with ``/``.
        doubts: what speaks against the steps, a sentence each.
    """

    steps: tuple[ProposedRule, ...]
    remaining: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def confident(self) -> bool:
        """Return whether the rules restore the target without an error, and nothing speaks against them."""
        return not (self.doubts or self.remaining or any(step.keeps for step in self.steps))

    @property
    def rules(self) -> list[Rule]:
        """Return the rules for ``transforms``, or ``orbax_transforms``, without those that print as comments."""
        return [step.rule for step in self.steps if not step.keeps]

    @property
    def keeps_all(self) -> bool:
        """Return whether it takes nothing from the checkpoint that is not there under its name."""
        return all(step.keeps for step in self.steps)

    @property
    def is_about_layout(self) -> bool:
        """Return whether nothing is missing, and all that is uncertain is in which order values lie in an array."""
        own = {printable(step.doubt, one_line=True) for step in self.steps if step.doubt}
        return bool(self.doubts) and not self.remaining and own >= set(self.doubts)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Return a sort key, the best first: leaves still missing, doubts, steps."""
        return len(self.remaining), len(self.doubts), len(self.steps)

    def __str__(self) -> str:
        lines = ["from flax_ckpt_compat import rules", "", "transforms = ["]
        for step in self.steps:
            # A name with a line break must not become a line of Python.
            reason = printable(step.reason, one_line=True)
            if step.keeps:  # pasted as it is, it must not leave stored values behind
                lines.append(f"    # {step.rule},  # to keep the target's own: {reason}")
            else:
                lines.append(f"    {step.rule},  # {reason}")
        return "\n".join([*lines, "]"])


def suggest(stored: Node, target: Node) -> Suggestion | None:
    """Propose steps from a checkpoint to a target that lacks leaves in it, or has them in other shapes; or None.

    ``target`` is a tree of `flax_ckpt_compat._trees.state_dict.describe`. No array data is read."""
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return None
    with memory.pause_gc():
        return _suggested(stored, target)


def _suggested(stored: Branch, target: Branch) -> Suggestion | None:
    # Formats keep names in different orders, and what is proposed must not depend on it.
    stored, target = _in_order(map_leaves(_here, stored)), _in_order(target)
    pairing = Pairing(target)
    lacking = len(pairing.missing(stored))
    first = pairing.start(stored)
    if not lacking:  # raw PRNG keys, which fit typed ones, may be all that differs
        keys = proposals.typed_keys(pairing, first).steps
        return Suggestion(keys, ()) if keys else None
    for prelude in proposals.preludes(pairing, stored):
        first = pairing.tried(first, [prelude]) or first
    begun = [first]
    if isinstance(first.tree, Branch):
        likely = proposals.collections(first.tree, target, pairing.roles)[:_MAX_STARTS]
        begun += filter(None, (pairing.tried(first, steps) for steps in likely))
    if lacking <= _MANY and (matched := pairing.leftovers(first)).matched > first.matched:
        begun.insert(0, matched)
    arranged = (pairing.laid_out(pairing.paired(state)) for state in begun)
    found = sorted(arranged, key=lambda one: (-one.matched, len(one.steps)))
    best: Suggestion | None = None
    for state in found:
        # Fewer leaves found is no better way, however sure; nor are more steps than those of what is certain.
        is_best = best is not None and not best.doubts and len(best.steps) <= len(state.steps)
        if is_best or state.matched < max(found[0].matched, 1):
            break
        state = proposals.finished(pairing, state)
        remaining = pairing.missing(state.tree)
        steps, against = judged(stored, target, state.tree, state.steps, remaining)
        sentences = tuple(printable(doubt, one_line=True) for doubt in against)
        proposal = Suggestion(steps, tuple(map(show_path, remaining)), sentences)
        if len(remaining) <= lacking / 2 and (best is None or proposal.rank < best.rank):
            best = proposal
    return best


def _here(path: Path, leaf: Any) -> Any:
    """Return a leaf that is named after its place, wherever it was before rules that were given, or in its item."""
    if isinstance(leaf, Derived) and leaf.shape is not None and leaf.dtype is not None:
        kind, name = LeafKind.ARRAY, joined(path)
        return LeafHandle(path, kind, leaf.shape, leaf.dtype, 0, name, leaf.handles[0].reader, None)
    return dataclasses.replace(leaf, path=path) if isinstance(leaf, LeafHandle) and leaf.path != path else leaf


def _in_order(node: Branch) -> Branch:
    """Return the tree with all names in natural order."""
    names = natural(node.children)
    children = {name: _in_order(one) if isinstance(one := node.children[name], Branch) else one for name in names}
    return dataclasses.replace(node, children=children)
