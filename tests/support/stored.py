"""Trees of stored leaves in memory, and the values of what rules make of them, checked against what they promise."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, iter_leaves
from flax_ckpt_compat._trees import leaf_sources, state_dict
from tests.support.trees import fingerprint

_KINDS = {bool: LeafKind.BOOL, int: LeafKind.INT, float: LeafKind.FLOAT, str: LeafKind.STR}
_ARRAYS = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)


class Memory:
    """A reader of values that are there already; it notes how many bytes of arrays were asked for."""

    format = Format.MSGPACK
    places_on_device, keeps_lists = False, True
    path = "memory"

    def __init__(self, tree: Any):
        self.bytes_read = 0
        self.tree = self._node(tree, ())

    def _node(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return Branch({name: self._node(child, (*path, name)) for name, child in value.items()})
        if isinstance(value, list):
            children = {str(index): self._node(child, (*path, str(index))) for index, child in enumerate(value)}
            return Branch(children, Container.LIST)
        if value is None:
            return None
        if isinstance(value, KeyData):
            kind, array = LeafKind.PRNG_KEY, value.data
        else:
            kind = LeafKind.ARRAY if isinstance(value, _ARRAYS) else _KINDS.get(type(value), LeafKind.NUMPY_SCALAR)
            array = value if isinstance(value, (*_ARRAYS, np.generic)) else None
        shape, dtype = getattr(array, "shape", ()), getattr(array, "dtype", None)
        return LeafHandle(path, kind, shape, dtype, getattr(array, "nbytes", 0), "/".join(path), self, value)

    def read(self, handles: Any) -> list[Any]:
        """Copies of the values."""
        found = []
        for one in handles:
            value = one.cut(one.locator)
            assert not isinstance(value, jax.ShapeDtypeStruct), "nothing may read an abstract array"
            self.bytes_read += getattr(value, "nbytes", 0)
            found.append(value.copy() if isinstance(value, np.ndarray) else value)
        return found

    def close(self) -> None:
        """Nothing is open."""


def stored(tree: Any) -> Any:
    """A tree of stored leaves with these values: nested dicts and lists of arrays, numpy scalars, Python values."""
    return Memory(tree).tree


def value_of(leaf: Any) -> Any:
    """The value of a leaf; of a computed one the function's inputs are read-only, and shape and dtype must be true."""
    if isinstance(leaf, LeafHandle):
        return leaf.read()
    if not isinstance(leaf, leaf_sources.Derived):
        return leaf
    inputs = [value_of(one) for one in leaf.inputs]
    for value in inputs:
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    result = leaf.function(*inputs)
    assert isinstance(result, np.ndarray)
    assert (result.shape, result.dtype) == (leaf.shape, leaf.dtype), leaf.how
    assert leaf.how
    return result


def values(node: Any) -> dict[str, Any]:
    """Key path joined with ``/`` → value, for every leaf; an empty subtree is an empty dict."""
    found = {"/".join(path): {} if isinstance(leaf, Branch) else value_of(leaf) for path, leaf in iter_leaves(node)}
    assert all(value.flags.c_contiguous for value in found.values() if isinstance(value, np.ndarray))
    return found


def applied(tree: Any, *rules: Any, target: Any = None) -> dict[str, Any]:
    """The `values` after rules, of a tree of values and perhaps a user's target."""
    node, described = stored(tree), None if target is None else state_dict.describe(target)
    for rule in rules:
        node = rule.apply(node, described)
    return values(node)


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """The same of the values themselves."""
    if not isinstance(tree, Mapping) or not tree:
        return {"/".join(path): tree}
    return {name: leaf for key, child in tree.items() for name, leaf in flat(child, (*path, key)).items()}


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Fails unless the two have the same names, and values of the same types, dtypes, shapes and bits."""
    assert fingerprint(dict(first)) == fingerprint(dict(second))


def count(shape: tuple[int, ...], dtype: Any = np.float32, start: int = 0) -> np.ndarray[Any, Any]:
    """An array of different values."""
    return (np.arange(math.prod(shape)) + start).astype(dtype).reshape(shape)
