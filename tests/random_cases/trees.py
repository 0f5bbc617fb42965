"""Random trees as users save them, and targets that differ here and there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.support.samples import Fields, Pair

DTYPES = [np.dtype(one) for one in ("f4", "f8", "i4", "i8", "u1", "?", "c8", ml_dtypes.bfloat16, ml_dtypes.int4)]
NAMES = st.sampled_from(["a", "b", "layer_0", "layer_1", "name", "0", "value"])
SHAPES = st.sampled_from([(), (1,), (2,), (3,), (2, 3), (3, 2), (0,), (2, 0)])


@st.composite
def arrays(draw: Any) -> np.ndarray[Any, Any]:
    """Small arrays of different small numbers."""
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    return (np.arange(np.prod(shape, dtype=int)) + draw(st.integers(0, 3))).reshape(shape).astype(dtype)


LEAVES = st.one_of(
    arrays(),
    arrays().map(lambda array: jnp.asarray(array) if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else 1),
    st.sampled_from([0, 7, -1, 2**40, 1.5, float("nan"), True, "text", "", None]),
    st.sampled_from([np.float32(2.5), np.int64(3), np.bool_(True)]),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(NAMES, inner, max_size=4),
        st.dictionaries(NAMES, inner, max_size=3).map(flax.core.freeze),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Fields, inner, inner),
    )


TREES = st.dictionaries(NAMES, st.recursive(LEAVES, _nested, max_leaves=6), max_size=4)


def _leaf(draw: Any, leaf: Any) -> Any:
    """A target's leaf for a stored one, mostly of the same shape and dtype."""
    if not isinstance(leaf, np.ndarray | jax.Array):
        return draw(st.one_of(st.just(leaf), st.just(leaf), LEAVES, st.just({})))
    own: Any = np.zeros(leaf.shape, leaf.dtype)
    if draw(st.integers(0, 3)):
        return own
    kind = draw(st.sampled_from(["shape", "dtype", "none", "abstract", "jax", "number", "other"]))
    if kind == "shape":
        return np.zeros(draw(SHAPES), leaf.dtype)
    if kind == "dtype":
        return own.astype(draw(st.sampled_from(DTYPES)))
    if kind == "abstract":
        return jax.ShapeDtypeStruct(leaf.shape, draw(st.sampled_from([leaf.dtype, np.dtype("f4")])))
    if kind == "jax" and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype:
        return jnp.asarray(own)
    return {"none": None, "number": 5}.get(kind, draw(LEAVES))


def _changed(draw: Any, tree: Any) -> Any:
    if isinstance(tree, Pair):
        return Pair(*(_changed(draw, child) for child in tree))
    if isinstance(tree, Fields):
        return Fields(_changed(draw, tree.first), _changed(draw, tree.second))
    if isinstance(tree, list | tuple):
        return type(tree)(_changed(draw, child) for child in tree[: draw(st.sampled_from([9, 9, 9, 1]))])
    if not isinstance(tree, Mapping):
        return _leaf(draw, tree)
    children = {name: _changed(draw, child) for name, child in tree.items() if draw(st.integers(0, 9))}
    if not draw(st.integers(0, 9)):
        children[draw(NAMES)] = draw(LEAVES)
    return flax.core.freeze(children) if isinstance(tree, flax.core.FrozenDict) else children


@st.composite
def pairs(draw: Any) -> tuple[Any, Any]:
    """A tree, and a target: None, or one that was such a tree once."""
    tree = draw(TREES)
    return tree, _changed(draw, tree) if draw(st.integers(0, 9)) else None
