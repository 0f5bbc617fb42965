"""Maps that are not the user's: arrays in pieces, and PRNG keys."""

from __future__ import annotations

import math

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, show_path

from . import markers
from .window import Window


def as_special(branch: Branch, path: Path, window: Window) -> LeafHandle | None:
    """The one leaf that a complete map stands for, or None if it is an ordinary map.

    A map with other keys or other types than Flax writes is the user's own and stays a map.

    Raises:
        CorruptCheckpointError: an array in pieces that do not add up.
    """
    names = branch.children.keys()
    if len(names) == 3 and names == markers.CHUNK_KEYS:
        return _chunked(branch, path, window)
    if len(names) == 2 and names == markers.KEY_KEYS:
        return _prng_key(branch, path)
    return None


def _chunked(branch: Branch, path: Path, window: Window) -> LeafHandle | None:
    flag = branch.children[markers.CHUNK_FLAG]
    sizes, pieces = _numbered(branch.children["shape"]), _numbered(branch.children["chunks"])
    if not _is(flag, LeafKind.BOOL) or flag.where is not True or sizes is None or not pieces:
        return None
    if not all(_is(size, LeafKind.INT) for size in sizes):
        return None
    if not all(_is(piece, LeafKind.ARRAY) and type(piece.where) is int and len(piece.shape) == 1 for piece in pieces):
        return None
    shape = tuple(size.where for size in sizes)
    dtype = pieces[0].dtype
    total = sum(piece.nbytes for piece in pieces)
    assert dtype is not None
    if min(shape, default=0) < 0 or len(shape) > 64 or math.prod(shape) * dtype.itemsize != total:
        raise window.corrupt(f"pieces of {total} bytes for an array of shape {shape} in {show_path(path)}")
    if any(piece.dtype != dtype for piece in pieces):
        raise window.corrupt(f"pieces of different dtypes for one array in {show_path(path)}")
    where = tuple((piece.where, piece.nbytes) for piece in pieces)
    return LeafHandle(path, LeafKind.ARRAY, shape, dtype, total, "/".join(path), flag.reader, where)


def _numbered(node: Node) -> list[Node] | None:
    """The children of a map with the keys '0', '1', …, in the order of those numbers, or None."""
    if not isinstance(node, Branch) or node.container is not Container.DICT or node.int_keys:
        return None
    names = [str(index) for index in range(len(node.children))]
    return [node.children[name] for name in names] if node.children.keys() == set(names) else None


def _prng_key(branch: Branch, path: Path) -> LeafHandle | None:
    impl, data = branch.children[markers.KEY_IMPL], branch.children["data"]
    if not _is(impl, LeafKind.STR) or not _is(data, LeafKind.ARRAY) or data.dtype != np.uint32:
        return None
    where = (impl.where, data)
    name = "/".join(path)
    handle = LeafHandle(path, LeafKind.PRNG_KEY, data.shape, data.dtype, data.nbytes, name, impl.reader, where)
    handle.distributed = data.distributed
    return handle


def _is(node: Node, kind: LeafKind) -> bool:
    return isinstance(node, LeafHandle) and node.kind is kind
