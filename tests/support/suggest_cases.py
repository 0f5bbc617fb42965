"""Proposals for pairs of states, and which stored leaf each leaf of the target would get by them."""

from __future__ import annotations

from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_leaves, map_leaves
from flax_ckpt_compat._suggest import Suggestion, suggest
from flax_ckpt_compat._trees import leaf_sources, prng_keys, state_dict

_KINDS = {bool: LeafKind.BOOL, int: LeafKind.INT, float: LeafKind.FLOAT, str: LeafKind.STR}


def as_stored(tree: Any) -> Node:
    """The tree of handles that a checkpoint of this state would open as; msgpack files know no containers."""

    def handle(path: Path, leaf: Any) -> Any:
        if leaf is None:
            return None
        array = hasattr(leaf, "shape")
        shape = tuple(leaf.shape) if array else ()
        if prng_keys.is_prng_key(leaf):
            return LeafHandle(path, LeafKind.PRNG_KEY, (*shape, 2), np.dtype("uint32"), 0, "", _NoReader(), None)
        dtype = np.dtype(leaf.dtype) if array else None
        kind = LeafKind.ARRAY if array else _KINDS[type(leaf)]
        return LeafHandle(path, kind, shape, dtype, 0, "/".join(path), _NoReader(), None)

    return _plain(map_leaves(handle, state_dict.describe(tree)))


def _plain(node: Node) -> Node:
    if not isinstance(node, Branch):
        return node
    return Branch({name: _plain(child) for name, child in node.children.items()}, Container.DICT)


class _NoReader:
    """A reader for suggestions, which read nothing."""

    format = path = tree = None

    def read(self, _: Any) -> Any:
        """Fails."""
        raise AssertionError("a suggestion read array data")

    def close(self) -> None:
        """Nothing."""


def proposed(old: Any, new: Any) -> tuple[Suggestion | None, dict[str, str | None]]:
    """The suggestion for a pair of states, and what each leaf of the target would get by it: see `gets`."""
    stored, target = as_stored(old), state_dict.describe(new)
    suggestion = suggest(stored, target)
    return suggestion, gets(stored, target, suggestion)


def sure(old: Any, new: Any) -> list[str]:
    """The rules of a proposal that nothing speaks against."""
    suggestion, _ = proposed(old, new)
    assert suggestion is not None
    assert not suggestion.doubts
    return [step.rule.source for step in suggestion.steps]


def gets(stored: Node, target: Node, suggestion: Suggestion | None) -> dict[str, str | None]:
    """Target path → stored path (several joined with ``+``), None where the target keeps its own; missing ones not."""
    tree = stored
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
