"""Validate that a msgpack file can hold a tree, before anything is written."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from flax_ckpt_compat._core import dtypes
from flax_ckpt_compat._core.errors import LEAF_REMEDY, UnsupportedLeafError
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, Path, StoredArray, is_jax_array, show_path

from . import format

# Bytes; msgpack's length fields are four bytes wide.
_MAX_LENGTH = 2**32 - 1
_ALWAYS_PLAIN = frozenset({float, bool, type(None)})


def check_tree(tree: Node) -> None:
    """Raise UnsupportedLeafError if a msgpack file cannot hold a leaf or a name of a tree."""
    supported = functools.cache(_is_supported)
    stack: list[tuple[Path, Node]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if type(node) is not Branch:
            _check_leaf(path, node)
            continue
        _check_branch(path, node)
        for name, child in node.children.items():
            kind = type(child)  # fast paths for what almost all leaves are
            if kind in _ALWAYS_PLAIN or (kind is int and -(2**63) <= child < 2**64):
                continue
            if not ((kind is np.ndarray or kind is HostCopy) and supported(child.dtype)):
                stack.append(((*path, name), child))


def _is_supported(dtype: Any) -> bool:
    return dtypes.is_storable(dtype) and dtype.itemsize > 0


def _invalid(path: Path, found: str, remedy: str) -> UnsupportedLeafError:
    leaf = show_path(path)
    return UnsupportedLeafError(f"{leaf}: a msgpack checkpoint cannot hold {found}; {remedy}", leaf=leaf)


def _check_branch(path: Path, branch: Branch) -> None:
    if len(path) >= format.MAX_DEPTH - 1:
        raise _invalid(path, f"trees deeper than {format.MAX_DEPTH - 1} levels", "flatten the tree")
    if branch.children.keys() in (format.CHUNK_KEYS, format.KEY_KEYS):
        keys = ", ".join(sorted(branch.children))
        raise _invalid(path, f"a dict with exactly the keys {keys}: it would be read as an array", "rename a key")
    for name in branch.children:
        if type(name) is not str:
            raise _invalid((*path, str(name)), f"a key of type {type(name).__name__}", "use str keys")
        if not name.isascii() or len(name) > _MAX_LENGTH:
            _check_text((*path, name), name)


def _check_text(path: Path, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = tuple(name.encode("utf-8", "backslashreplace").decode() for name in path)
        raise _invalid(shown, f"text with a lone surrogate ({error})", "store the bytes instead") from error
    if len(text) * 4 > _MAX_LENGTH and len(text.encode()) > _MAX_LENGTH:
        raise _invalid(path, f"text of more than {_MAX_LENGTH} bytes", "store it as a uint8 array")


def _check_leaf(path: Path, leaf: Any) -> None:
    kind = type(leaf)
    if kind in (float, bool, complex) or leaf is None:
        return
    if isinstance(leaf, np.generic):  # numpy's empty text has item size 0, but becomes an array of item size 1
        _check_dtype(path, np.asarray(leaf).dtype)
    elif isinstance(leaf, (np.ndarray, HostCopy, StoredArray)):
        _check_dtype(path, leaf.dtype)
        if isinstance(leaf, np.ma.MaskedArray):
            raise _invalid(path, "a masked array, whose mask would be lost", "store .filled() or data and mask apart")
    elif kind is int:
        if not -(2**63) <= leaf < 2**64:
            raise _invalid(path, "a Python int outside -2**63 … 2**64-1", "store it as text")
    elif kind is str:
        _check_text(path, leaf)
        if leaf.startswith(format.PLACEHOLDER):
            raise _invalid(path, f"text that starts with {format.PLACEHOLDER!r}", "it would be read as an array")
    elif kind in (bytes, bytearray):
        if len(leaf) > _MAX_LENGTH:
            raise _invalid(path, f"more than {_MAX_LENGTH} bytes in one value", "store it as a uint8 array")
    elif kind is KeyData:
        _check_text(path, leaf.impl)
        _check_leaf((*path, "data"), leaf.data)
        if getattr(leaf.data, "dtype", None) != np.uint32:
            raise _invalid(path, f"a PRNG key with data of type {type(leaf.data).__name__}", "pass its uint32 key data")
    elif is_jax_array(leaf):
        if not isinstance(leaf.dtype, np.dtype):
            raise _invalid(path, f"a jax array of dtype {leaf.dtype}", "pass a PRNG key as KeyData")
        if not leaf.is_fully_addressable:
            raise _invalid(path, "an array that is not fully addressable", "use save_checkpoint_multiprocess")
    elif not isinstance(leaf, complex):
        raise _invalid(path, f"a {kind.__module__}.{kind.__qualname__}", LEAF_REMEDY)


def _check_dtype(path: Path, dtype: np.dtype[Any]) -> None:
    if not _is_supported(dtype):
        raise _invalid(path, f"an array of dtype {dtype}", "convert it to a numeric dtype, or store its fields")
