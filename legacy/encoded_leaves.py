"""Recognize maps that encode one leaf: typed PRNG keys, and arrays in chunks.

A map with keys or types that Flax does not write is the user's own and stays a map.
"""

from __future__ import annotations

import math

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path

from . import format


def prng_key(branch: Branch, path: Path) -> LeafHandle | None:
    """Return the PRNG key that a map with the names `format.KEY_KEYS` encodes, or None."""
    impl, data = branch.children[format.KEY_IMPL], branch.children["data"]
    if not _is(impl, LeafKind.STR) or not _is(data, LeafKind.ARRAY) or data.dtype != np.uint32:
        return None
    locator = impl.locator, data
    handle = LeafHandle(path, LeafKind.PRNG_KEY, data.shape, data.dtype, data.nbytes, None, impl.reader, locator)
    handle.in_gda_folder = data.in_gda_folder
    return handle


def chunked_array(branch: Branch, path: Path) -> LeafHandle | None:
    """Return the chunked array of a map with the names `format.CHUNK_KEYS`, or None; ValueError for a wrong sum."""
    flag = branch.children[format.CHUNK_FLAG]
    sizes, chunks = _numbered(branch.children["shape"]), _numbered(branch.children["chunks"])
    if not _is(flag, LeafKind.BOOL) or flag.locator is not True or sizes is None or not chunks:
        return None
    if not all(_is(size, LeafKind.INT) for size in sizes):
        return None
    if not all(_is(chunk, LeafKind.ARRAY) and type(chunk.locator) is int and len(chunk.shape) == 1 for chunk in chunks):
        return None
    shape = tuple(size.locator for size in sizes)
    dtype = chunks[0].dtype
    total = sum(chunk.nbytes for chunk in chunks)
    assert dtype is not None
    is_shape = min(shape, default=0) >= 0 and len(shape) <= format.MAX_DIMS
    if not is_shape or math.prod(shape) * dtype.itemsize != total:
        raise ValueError(f"pieces of {total} bytes for an array of shape {shape}")
    if any(chunk.dtype != dtype for chunk in chunks):
        raise ValueError("pieces of different dtypes for one array")
    locator = tuple((chunk.locator, chunk.nbytes) for chunk in chunks)
    return LeafHandle(path, LeafKind.ARRAY, shape, dtype, total, None, flag.reader, locator)


def _numbered(node: Node) -> list[LeafHandle] | None:
    """Return the children of a map with the keys '0', '1', …, in numeric order, or None for other maps."""
    if not isinstance(node, Branch) or node.container is not Container.DICT or node.int_keys:
        return None
    names = [str(index) for index in range(len(node.children))]
    return [node.children[name] for name in names] if node.children.keys() == set(names) else None


def _is(node: Node, kind: LeafKind) -> bool:
    return isinstance(node, LeafHandle) and node.kind is kind
