"""Stream a tree into a file, with array data directly from the arrays' memory."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, is_jax_array

from . import encode, format, host_arrays
from .gda_tree import Reference
from .host_arrays import to_host

# Bytes below which copying pieces together is cheaper than a separate entry in a system call.
_COPY_BELOW = 16 * 2**10
# Bytes per system call. Headers are written with the data after them, and calls end on multiples of this in the
# file, so that the kernel fills whole pages: a third less time than a call per header and array.
_BATCH = 16 * 2**20
_MAX_PIECES = 512  # below every system's limit for one call (IOV_MAX, 1024 on Linux)


def write_tree(path: str, tree: Node) -> None:
    """Write and sync the file of a tree that `check_tree` accepts.

    Args:
        path: absolute path; must not exist.
        tree: branches become maps in the order of their children.

    Raises:
        StorageError: the file system refused; a partial file remains.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            stream = _Stream(fd)
            _write_node(stream, tree)
            stream.flush()
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        message = f"{path}: writing the checkpoint failed: {error.strerror or error}"
        raise StorageError(message, path=path, errno=error.errno) from error


class _Stream:
    """Buffer pieces and write them in large batches; large pieces without a copy."""

    def __init__(self, fd: int):
        self._fd = fd
        self._small = bytearray()
        self._pieces: list[memoryview] = []
        self._buffered = 0
        self._written = 0

    def put(self, piece: bytes | bytearray) -> None:
        self._small += piece
        if len(self._small) >= _BATCH:
            self.flush()

    def put_array(self, array: Any) -> None:
        if array.nbytes < _COPY_BELOW:
            self.put(array.tobytes())
            return
        self._end_small()
        for piece in host_arrays.pieces(array):
            rest = memory.as_bytes(piece)
            while rest:
                room = _BATCH - (self._written + self._buffered) % _BATCH
                self._add(rest[:room])
                rest = rest[room:]

    def flush(self) -> None:
        """Write all buffered pieces."""
        self._end_small()
        length = self._buffered
        _write_all(self._fd, self._pieces)
        self._pieces, self._buffered = [], 0
        # The disk writes while the next batch is prepared, so the final sync is short.
        atomic.start_writeback(self._fd, self._written, length)
        self._written += length

    def _end_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._add(memoryview(small))

    def _add(self, piece: memoryview) -> None:
        self._pieces.append(piece)
        self._buffered += len(piece)
        if (self._written + self._buffered) % _BATCH == 0 or len(self._pieces) >= _MAX_PIECES:
            self.flush()


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    """Write everything; one system call may write less than it is given (2 GiB at most on Linux)."""
    while pieces:
        written = os.writev(fd, pieces)
        if not written:
            raise OSError("the file system accepted no bytes")
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]


def _write_node(stream: _Stream, node: Node) -> None:
    if not isinstance(node, Branch):
        _write_leaf(stream, node)
        return
    stream.put(format.map_header(len(node.children)))
    for name, child in node.children.items():
        stream.put(encode.scalar(name))
        if type(child) is np.ndarray:
            _write_array(stream, child)
        else:
            _write_node(stream, child)


def _write_leaf(stream: _Stream, leaf: Any) -> None:
    kind = type(leaf)
    if is_jax_array(leaf):
        _write_array(stream, leaf if host_arrays.is_in_shards(leaf) else to_host(leaf))
    elif isinstance(leaf, np.ndarray):
        _write_array(stream, np.asarray(leaf))
    elif isinstance(leaf, np.generic):
        array = np.asarray(leaf)
        stream.put(format.array_header(format.EXT_NUMPY_SCALAR, (), array.dtype))
        stream.put(array.tobytes())
    elif kind is KeyData:
        stream.put(format.map_header(2) + encode.scalar(format.KEY_IMPL) + encode.scalar(leaf.impl))
        stream.put(encode.scalar("data"))
        _write_leaf(stream, leaf.data if isinstance(leaf.data, Reference) else to_host(leaf.data))
    elif kind is Reference:
        stream.put(encode.scalar(leaf.text))
    elif isinstance(leaf, complex):
        stream.put(encode.complex_value(leaf))
    elif kind is HostCopy:
        _write_array(stream, leaf if host_arrays.is_in_shards(leaf) else to_host(leaf))
    else:
        stream.put(encode.scalar(leaf))


def _write_array(stream: _Stream, array: Any) -> None:
    """Write an ``np.ndarray``, or an array for which `host_arrays.is_in_shards` is true."""
    if array.nbytes > format.MAX_CHUNK_SIZE:
        _write_chunked(stream, array, array.shape, array.dtype)
        return
    stream.put(format.array_header(format.EXT_ARRAY, array.shape, array.dtype))
    stream.put_array(array)


def _write_chunked(stream: _Stream, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Write Flax's map for arrays over its limit: shape and flat chunks, both as maps of '0', '1', …"""
    step, size = max(1, format.MAX_CHUNK_SIZE // dtype.itemsize), math.prod(shape)
    stream.put(format.map_header(3) + encode.scalar(format.CHUNK_FLAG) + encode.scalar(True))
    stream.put(encode.scalar("shape") + format.map_header(len(shape)))
    for index, length in enumerate(shape):
        stream.put(encode.scalar(str(index)) + encode.scalar(length))
    stream.put(encode.scalar("chunks") + format.map_header(math.ceil(size / step)))
    at = 0
    for piece in host_arrays.pieces(array):
        rest = piece.reshape(-1)
        while rest.size:
            if at % step == 0:
                count = min(step, size - at)
                header = format.array_header(format.EXT_ARRAY, (count,), dtype)
                stream.put(encode.scalar(str(at // step)) + header)
            part = rest[: step - at % step]
            stream.put_array(part)
            at, rest = at + part.size, rest[part.size :]
