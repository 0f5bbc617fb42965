"""Encode a tree as one msgpack document, streamed into a file with array data directly from the arrays' memory.

That a file can hold the tree is checked before anything is written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from flax_ckpt_compat._core import array_boxes, checksums, dtypes, memory
from flax_ckpt_compat._core.backend import LeafHandle, WriteOptions
from flax_ckpt_compat._core.errors import LEAF_REMEDY, UnsupportedLeafError, translated
from flax_ckpt_compat._core.local import local_file, new_file
from flax_ckpt_compat._core.local.new_file import NewFile
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.tree import (
    Branch,
    HostCopy,
    KeyData,
    Node,
    Path,
    Shard,
    is_jax_array,
    on_host,
    shards_of,
    show_path,
)

from . import format

# All sizes in bytes. Below this, copying arrays together is cheaper than a separate entry in a system call.
_COPY_BELOW = 16 * 2**10
# Per system call. Headers are written with the data after them, and calls end on multiples of this in the file, so
# that the kernel fills whole pages: a third less time than a call per header and array.
_BATCH = 16 * 2**20
_MAX_PIECES = 512  # of a batch
_BLOCK = 8 * 2**20  # of copies of strided and sharded arrays
# Below this, an array in shards is assembled in memory, to be written with its neighbours.
_MIN_SHARDED = 256 * 2**10

_MAX_LENGTH = 2**32 - 1  # bytes; msgpack's length fields are four bytes wide
# Types that msgpack's encoder takes as they are, also many at once.
_VALUES = frozenset({int, float, bool, str, type(None)})
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
    elif isinstance(leaf, (np.ndarray, HostCopy, LeafHandle)):
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


def _check_dtype(path: Path, dtype: Any) -> None:
    if not _is_supported(dtype):
        raise _invalid(path, f"an array of dtype {dtype}", "convert it to a numeric dtype, or store its fields")


def write_tree(path: str, tree: Node, options: WriteOptions) -> None:
    """Write and sync the new file of a tree that `check_tree` accepts; see `Backend.write`.

    Checksums of the file are recorded in an attribute of it, where the file system has them."""
    with translated(path, "written"):
        file = new_file.create(path, past_cache=options.past_cache)
        try:
            _Writer(file, BlockSums() if options.checksums else None, options.meter).write(tree)
        except BaseException:
            file.discard()
            raise
        file.close()


class BlockSums:
    """The checksums of a stream of bytes, block by block."""

    def __init__(self) -> None:
        self._sums, self._size = list[int](), 0

    def update(self, data: Any) -> None:
        """Add bytes: a buffer of single bytes."""
        at, view = 0, memoryview(data)
        while at < len(view):
            filled = self._size % checksums.BLOCK_BYTES
            part = view[at : at + checksums.BLOCK_BYTES - filled]
            self._sums.append(checksums.crc32c(part, self._sums.pop() if filled else 0))
            self._size += len(part)
            at += len(part)

    def encoded(self) -> bytes:
        """Return the checksums of all blocks; no bytes have no block."""
        return b"".join(map(checksums.encode, self._sums))


class _Writer:
    """Encode a tree; buffer small pieces and write large batches, large arrays without a copy."""

    def __init__(self, file: NewFile, sums: BlockSums | None, meter: Meter):
        self._file, self._sums, self._meter = file, sums, meter
        self._at: Path = ()  # key path of the last large leaf
        # strict: Flax's files hold exact types only; validation refuses subclasses.
        packer = msgpack.Packer(strict_types=True)
        self._pack, self._map_header = packer.pack, packer.pack_map_header
        self._small = bytearray()
        self._pieces: list[memoryview] = []
        self._buffered = 0
        self._written = 0

    def write(self, tree: Node) -> None:
        """Write the tree, and record the checksums."""
        pack, put, small = self._pack, self._put, min(_COPY_BELOW, format.MAX_CHUNK_SIZE)
        stack: list[Iterator[tuple[str | None, Node]]] = [iter([(None, tree)])]
        trail: list[str] = []  # names of the branches, but the root
        while stack:
            for name, node in stack[-1]:
                key = b"" if name is None else pack(name)
                kind = type(node)
                if kind is Branch:
                    if _VALUES.issuperset(map(type, node.children.values())):
                        put(key + pack(node.children))
                        continue
                    put(key + self._map_header(len(node.children)))
                    stack.append(iter(node.children.items()))
                    trail += [] if name is None else [name]
                    break
                if kind in _VALUES:
                    put(key + pack(node))
                elif kind is np.ndarray and node.nbytes < small:
                    put(key + format.array_header(format.EXT_ARRAY, node.shape, node.dtype) + node.tobytes())
                else:
                    put(key)
                    self._at = (*trail, name or "")
                    self._write_leaf(node)
            else:
                stack.pop()
                del trail[-1:]
        self._flush()
        if self._sums is not None:
            self._file.write_rest()
            local_file.record_checksums(self._file.descriptor, self._sums.encoded())

    def _write_leaf(self, leaf: Any, *, is_own: bool = False) -> None:
        """Write a leaf; an array that is not our own may change meanwhile."""
        if isinstance(leaf, HostCopy) or is_jax_array(leaf):
            leaf, is_own = _on_host(leaf), True
        elif isinstance(leaf, LeafHandle):
            self._write_leaf(leaf.read(), is_own=True)
            if leaf.nbytes >= _COPY_BELOW:
                self._flush()  # so that nothing holds the array while the next one is read
            return
        elif isinstance(leaf, np.ndarray):
            leaf = np.asarray(leaf)  # an array of a subclass
        if isinstance(leaf, np.generic):
            array = np.asarray(leaf)
            self._put(format.array_header(format.EXT_NUMPY_SCALAR, (), array.dtype) + array.tobytes())
        elif type(leaf) is KeyData:
            self._put(self._map_header(2) + self._pack(format.KEY_IMPL) + self._pack(leaf.impl) + self._pack("data"))
            self._write_leaf(leaf.data)
        elif isinstance(leaf, complex):
            self._put(self._pack(msgpack.ExtType(format.EXT_COMPLEX, self._pack([leaf.real, leaf.imag]))))
        elif not hasattr(leaf, "dtype"):
            self._put(self._pack(leaf))
        elif leaf.nbytes > format.MAX_CHUNK_SIZE:
            self._write_chunked(leaf, is_own)
        else:
            self._put(format.array_header(format.EXT_ARRAY, leaf.shape, leaf.dtype))
            self._put_array(leaf, is_own)

    def _write_chunked(self, array: Any, is_own: bool) -> None:
        """Write Flax's map for arrays over its limit: shape and flat chunks, both as maps of '0', '1', …"""
        step, size = max(1, format.MAX_CHUNK_SIZE // array.dtype.itemsize), math.prod(array.shape)
        pack = self._pack
        self._put(self._map_header(3) + pack(format.CHUNK_FLAG) + pack(True))
        self._put(pack("shape") + pack({str(axis): length for axis, length in enumerate(array.shape)}))
        self._put(pack("chunks") + self._map_header(math.ceil(size / step)))
        at = 0
        for piece in pieces(array):
            rest = piece.reshape(-1)
            while rest.size:
                if at % step == 0:
                    header = format.array_header(format.EXT_ARRAY, (min(step, size - at),), array.dtype)
                    self._put(pack(str(at // step)) + header)
                part = rest[: step - at % step]
                self._put_array(part, is_own)
                at, rest = at + part.size, rest[part.size :]

    def _put(self, data: bytes | memoryview) -> None:
        """Write small pieces, or what another thread may change meanwhile: a copy."""
        self._small += data
        if len(self._small) >= _BATCH:
            self._flush()

    def _put_array(self, array: Any, is_own: bool) -> None:
        # What is summed must be what is written, though another thread writes to the array.
        must_copy = self._sums is not None and not is_own and memory.may_change(array)
        for piece in pieces(array):
            rest = memory.as_bytes(piece)
            while rest:
                room = _BATCH - (self._written + self._buffered + len(self._small)) % _BATCH
                if must_copy or len(rest) < _COPY_BELOW:
                    self._put(rest[:room])
                else:
                    self._end_small()
                    self._pieces.append(rest[:room])
                    self._buffered += len(rest[:room])
                is_full = len(rest) >= room or len(self._pieces) >= _MAX_PIECES
                rest = rest[room:]
                if is_full:
                    self._flush()

    def _end_small(self) -> None:
        if self._small:
            self._pieces.append(memoryview(self._small))
            self._buffered += len(self._small)
            self._small = bytearray()

    def _flush(self) -> None:
        """Write everything."""
        self._end_small()
        if self._sums is not None:
            for piece in self._pieces:
                self._sums.update(piece)
        self._file.write(self._pieces)
        self._written += self._buffered
        self._meter.add(self._buffered, self._at)
        self._buffered = 0


def _on_host(leaf: Any) -> Any:
    """Return a ``jax.Array`` or `HostCopy` as an ndarray; a large one in shards as it is, for `pieces`."""
    is_sharded = len(leaf.shards) > 1 if isinstance(leaf, HostCopy) else not leaf.is_fully_replicated
    if is_sharded and leaf.nbytes >= _MIN_SHARDED:
        return leaf
    return on_host(leaf)


def pieces(array: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the values of an array, jax's or a `HostCopy` too, in C order as consecutive contiguous arrays.

    Copies are blocks of at most 8 MiB."""
    if isinstance(array, np.ndarray) and array.flags.c_contiguous:
        yield array
        return
    whole = array_boxes.full_box(array.shape)
    shards = [Shard(whole, array)] if isinstance(array, np.ndarray) else list(shards_of(array))
    for box in array_boxes.bands(whole, array.shape, max(1, _BLOCK // array.dtype.itemsize)):
        block = memory.empty(array_boxes.shape_of(box), array.dtype)
        for shard in shards:
            if array_boxes.overlaps(box, shard.index):
                part = array_boxes.overlap(box, shard.index)
                block[array_boxes.relative_to(part, box)] = shard.data[array_boxes.relative_to(part, shard.index)]
        yield block
