"""What a msgpack file cannot hold is refused before anything is written, with its key path."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from flax_ckpt_compat.legacy import BACKEND, format

from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.tree import Branch, KeyData


class _Int(int):
    """An int of another type, which Flax's strict packing refuses too."""


class _Str(str):
    """A str of another type."""

    __slots__ = ()


_REFUSED = {
    "object": np.array([None]),
    "record": np.zeros(2, "i4,i4"),
    "void": np.zeros(2, "V2"),
    "void scalar": np.void(b"ab"),
    "masked": np.ma.array([1, 2], mask=[0, 1]),
    "key": jax.random.key(0),
    "int too large": 2**64,
    "int too small": -(2**63) - 1,
    "int subclass": _Int(1),
    "str subclass": _Str("a"),
    "surrogate": "\ud800",
    "tuple": (1, 2),
    "set": {1},
    "instance": object(),
    "type": int,
    "placeholder": format.PLACEHOLDER + "a",
    "chunks": Branch(dict.fromkeys(format.CHUNK_KEYS, 1)),
    "prng": Branch(dict.fromkeys(format.KEY_KEYS, 1)),
    "key data": KeyData("rbg", np.zeros(2, np.int32)),
    "key impl": KeyData("\ud800", np.zeros(2, np.uint32)),
    "child key": Branch({"\udc00": 1}),
}


@pytest.mark.parametrize("leaf", _REFUSED.values(), ids=_REFUSED.keys())
def test_refused_with_path(leaf):
    """The error names the leaf by its key path."""
    with pytest.raises(UnsupportedLeafError, match="params/x") as caught:
        BACKEND.prepare(Branch({"a": 1, "params": Branch({"x": leaf})}))
    assert caught.value.leaf.startswith("params/x")


def test_bare_leaf():
    """A bare leaf is named as the root."""
    with pytest.raises(UnsupportedLeafError, match="<root>"):
        BACKEND.prepare(object())


def test_too_deep():
    """A tree deeper than can be read back is refused."""
    tree = 1
    for _ in range(format.MAX_DEPTH):
        tree = Branch({"a": tree})
    with pytest.raises(UnsupportedLeafError, match="deeper"):
        BACKEND.prepare(tree)


@pytest.mark.parametrize(
    ("leaf", "remedy"),
    [
        (len, "flax.struct.field(pytree_node=False)"),
        (int, "flax.struct.field(pytree_node=False)"),
        ({1}, "convert it to a sorted list"),
        (object(), "leave it out of the tree"),
    ],
)
def test_says_what_to_do(leaf, remedy):
    """A function belongs into a static field; anything else is converted or left out."""
    with pytest.raises(UnsupportedLeafError, match=re.escape(remedy)):
        BACKEND.prepare(Branch({"x": leaf}))
