"""Proposals for pairs of states, and which stored leaf each leaf of the target would get by them."""

from typing import Any

from flax_ckpt_compat._core.tree import Branch, Node, iter_leaves, map_leaves
from flax_ckpt_compat._suggest import Suggestion, suggest
from flax_ckpt_compat._trees import leaf_sources, prng_keys, state_dict
from tests.support.stored import stored


def as_stored(tree: Any) -> Node:
    """The tree of handles that a checkpoint of this state would open as; msgpack files know no containers."""
    described = map_leaves(lambda _, leaf: prng_keys.split_key(leaf), state_dict.describe(tree))
    return stored(state_dict.from_stored(described, None, "flax"))


def proposed(old: Any, new: Any) -> tuple[Suggestion | None, dict[str, str | None]]:
    """The suggestion for a pair of states, and what each leaf of the target would get by it: see `gets`."""
    tree, target = as_stored(old), state_dict.describe(new)
    suggestion = suggest(tree, target)
    return suggestion, gets(tree, target, suggestion)


def sure(old: Any, new: Any) -> list[str]:
    """The rules of a proposal that nothing speaks against."""
    suggestion, _ = proposed(old, new)
    assert suggestion is not None
    assert not suggestion.doubts
    return [step.rule.source for step in suggestion.steps]


def gets(tree: Node, target: Node, suggestion: Suggestion | None) -> dict[str, str | None]:
    """Target path → stored path (several joined with ``+``), None where the target keeps its own; missing ones not."""
    for step in suggestion.steps if suggestion else ():
        tree = step.rule.apply(tree, target)
    there = dict(iter_leaves(tree))
    found: dict[str, str | None] = {}
    for path, leaf in iter_leaves(target):
        if isinstance(leaf, Branch) or leaf is None or path not in there:
            continue
        sources = leaf_sources.handles_of(there[path])
        found["/".join(path)] = "+".join("/".join(one.path) for one in sources) or None
    return found
