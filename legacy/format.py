"""Define the msgpack format: extension codes, reserved names, limits, extension values, and maps that are one leaf."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]
import numpy as np

from flax_ckpt_compat._core import dtypes, numbered_names
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, Node, Path

# Extension codes, measured on files of Flax 0.3.6 to 0.12.8. Up to Flax 0.8.5 a Python complex was written as a
# numpy scalar; such a file does not distinguish the two, and Flax too reads np.complex128.
EXT_ARRAY = 1
EXT_COMPLEX = 2
EXT_NUMPY_SCALAR = 3
# Only in the files that Orbax up to 0.5.15 put into its directories: a tuple, as one msgpack array.
EXT_TUPLE = 4
# Only in memory: what a parsed file has in place of its arrays, and a tuple as a list after a mark.
REFERENCE = 127
NO_INDEX = b"\0"
BEGIN_TUPLE = b"\x92" + msgpack.packb(msgpack.ExtType(REFERENCE, NO_INDEX))

# Flax splits larger arrays into a map of flat pieces with exactly these keys.
MAX_CHUNK_SIZE = 2**30
CHUNK_FLAG = "__msgpack_chunked_array__"
CHUNK_KEYS = frozenset((CHUNK_FLAG, "shape", "chunks"))

# Ours: Flax refuses typed PRNG keys. It reads this map as a dict of a string and an array.
KEY_IMPL = "__flax_ckpt_compat_prng_key__"
KEY_KEYS = frozenset((KEY_IMPL, "data"))

# Prefix of a string that refers to an array in the folder beside the file.
PLACEHOLDER = numbered_names.ARRAYS_PLACEHOLDER

# Levels. msgpack's own packer stops near this depth, so no real file is deeper; a deeper one is hostile and would
# exhaust the Python stack when the tree is walked.
MAX_DEPTH = 512
# Bytes, more than any header needs: 64 dimensions of nine bytes and a dtype name.
MAX_HEADER = 2048
MAX_DIMS = 64  # numpy's own limit

# Raised while decoding a damaged extension value.
DECODE_ERRORS = (ValueError, TypeError, IndexError, OverflowError, msgpack.UnpackException)

# Sizes in memory of Python numbers.
NUMBER_NBYTES = {bool: 1, int: 8, float: 8, complex: 16}


class FileRanges(NamedTuple):
    """The locator of an array, or of bytes, in the file: offset and size of each range that holds a part of it."""

    ranges: tuple[tuple[int, int], ...]

    def part(self, start: int, nbytes: int) -> FileRanges:
        """Return the ranges that hold so many of the bytes, from ``start`` on."""
        found = []
        for at, size in self.ranges:
            first, last = max(0, start), min(size, start + nbytes)
            if first < last:
                found.append((at + first, last - first))
            start -= size
        return FileRanges(tuple(found))


_FIXEXT = {1: b"\xd4", 2: b"\xd5", 4: b"\xd6", 8: b"\xd7", 16: b"\xd8"}
_LENGTHS = ((1, 2**8), (2, 2**16), (4, 2**32))  # bytes of a length field, and the first length that it does not hold


def _sized(length: int, codes: tuple[int, int, int]) -> bytes:
    """Encode a header with the shortest length field that fits, as msgpack's own packer does."""
    width, code = next((width, code) for (width, end), code in zip(_LENGTHS, codes, strict=True) if length < end)
    return bytes((code,)) + length.to_bytes(width, "big")


@functools.lru_cache(maxsize=4096)
def array_header(code: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Encode all bytes of an array (`EXT_ARRAY`) or numpy scalar (`EXT_NUMPY_SCALAR`) before its data."""
    nbytes = math.prod(shape) * dtype.itemsize
    pack = msgpack.Packer().pack
    inner = b"\x93" + pack(shape) + pack(dtypes.dtype_name(dtype)) + _sized(nbytes, (0xC4, 0xC5, 0xC6))
    length = len(inner) + nbytes
    return (_FIXEXT.get(length) or _sized(length, (0xC7, 0xC8, 0xC9))) + bytes((code,)) + bytes(inner)


@dataclasses.dataclass(slots=True)
class ArrayHeader:
    """Header of an array, numpy scalar or bytes."""

    text: bytes  # the part of the payload before the data
    kind: LeafKind  # of the value, like shape and dtype
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    nbytes: int  # size of the data, in bytes


def parse_array_header(code: int, head: bytes, length: int) -> ArrayHeader:
    """Parse ``[shape, dtype name, data]`` up to the data, from at least `MAX_HEADER` bytes of the payload, or all.

    Raise one of `DECODE_ERRORS` if it is not an array."""
    unpacker = msgpack.Unpacker(raw=True, max_buffer_size=MAX_HEADER)
    unpacker.feed(head[:MAX_HEADER])
    if unpacker.read_array_header() != 3:
        raise ValueError("not three fields")
    shape, name = unpacker.unpack(), unpacker.unpack()
    if type(shape) is not list or len(shape) > MAX_DIMS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r} is not a shape")
    if type(name) is not bytes:
        raise ValueError(f"{name!r} is not a dtype name")
    # Flax before 0.3 stored the str of a dtype, not its name, and that of bfloat16 is what no other dtype has.
    dtype = dtypes.dtype_from_name("bfloat16" if name == b"<V2" else name.decode("ascii"))
    start, nbytes = _data_field(head, unpacker.tell())
    needed = math.prod(shape) * dtype.itemsize
    if dtype.itemsize == 0 or needed != nbytes:
        raise ValueError(f"shape {tuple(shape)} and dtype {dtype} need {needed} bytes, not {nbytes}")
    if nbytes == 0:
        np.empty(shape, dtype)  # numpy rejects some shapes even without elements
    if start + nbytes != length:
        raise ValueError(f"{length} bytes of payload, but {start + nbytes} of header and data")
    # Flax decodes a scalar's payload like an array's; only one without dimensions becomes a scalar.
    kind = LeafKind.NUMPY_SCALAR if code == EXT_NUMPY_SCALAR and not shape else LeafKind.ARRAY
    return ArrayHeader(head[:start], kind, tuple(shape), dtype, nbytes)


def _data_field(head: bytes, at: int) -> tuple[int, int]:
    """Return the start and length of the data. Accept text headers: msgpack before 2013 had no binary type."""
    tag = head[at]
    if 0xA0 <= tag <= 0xBF:
        return at + 1, tag & 0x1F
    width = {0xC4: 1, 0xD9: 1, 0xC5: 2, 0xDA: 2, 0xC6: 4, 0xDB: 4}.get(tag)
    if width is None:
        raise ValueError(f"data of msgpack type 0x{tag:02x}")
    field = head[at + 1 : at + 1 + width]
    if len(field) != width:
        raise ValueError("the header is cut")
    return at + 1 + width, int.from_bytes(field, "big")


def parse_complex(payload: bytes) -> complex:
    """Parse ``[real, imaginary]``; raise ValueError if it is not a complex number."""
    try:
        real, imaginary = msgpack.unpackb(payload)
    except DECODE_ERRORS as error:
        raise ValueError(f"{len(payload)} bytes that are not a complex number ({error})") from error
    if not {type(real), type(imaginary)} <= {int, float}:
        raise ValueError(f"{real!r:.40} and {imaginary!r:.40}, which are not a complex number")
    return complex(float(real), float(imaginary))


# Maps that encode one leaf. One with keys or types that Flax does not write is the user's own and stays a map.
def prng_key(branch: Branch, path: Path) -> LeafHandle | None:
    """Return the PRNG key that a map with the names `KEY_KEYS` encodes, or None."""
    impl, data = branch.children[KEY_IMPL], branch.children["data"]
    if not _is(impl, LeafKind.STR) or not _is(data, LeafKind.ARRAY) or data.dtype != np.uint32:
        return None
    about = LeafKind.PRNG_KEY, data.shape, data.dtype, data.nbytes, None, impl.reader, KeyData(impl.locator, data)
    return LeafHandle(path, *about, data.in_gda_folder)


def chunked_array(branch: Branch, path: Path) -> LeafHandle | None:
    """Return the chunked array of a map with the names `CHUNK_KEYS`, or None; ValueError for a wrong sum."""
    flag = branch.children[CHUNK_FLAG]
    sizes, chunks = _numbered(branch.children["shape"]), _numbered(branch.children["chunks"])
    if not _is(flag, LeafKind.BOOL) or flag.locator is not True or sizes is None or not chunks:
        return None
    # Flax joins them on the first axis: flat ones, or rows of an np.matrix, which it cannot flatten.
    are_arrays = all(_is(chunk, LeafKind.ARRAY) and chunk.shape[:1] for chunk in chunks)
    if not are_arrays or len({chunk.shape[1:] for chunk in chunks}) > 1:
        return None
    if not all(_is(size, LeafKind.INT) for size in sizes):
        return None
    data = [chunk.locator for chunk in chunks]
    if {type(one) for one in data} not in ({bytes}, {FileRanges}):
        return None  # arrays of several processes
    shape, dtype = tuple([size.locator for size in sizes]), chunks[0].dtype
    total = sum(chunk.nbytes for chunk in chunks)
    assert dtype is not None
    is_shape = min(shape, default=0) >= 0 and len(shape) <= MAX_DIMS
    if not is_shape or math.prod(shape) * dtype.itemsize != total:
        raise ValueError(f"pieces of {total} bytes for an array of shape {shape}")
    if any(chunk.dtype != dtype for chunk in chunks):
        raise ValueError("pieces of different dtypes for one array")
    if not total:
        np.empty(shape, dtype)  # numpy rejects some shapes even without elements
    is_in_memory = type(data[0]) is bytes
    found = b"".join(data) if is_in_memory else FileRanges(tuple([one for piece in data for one in piece.ranges]))
    return LeafHandle(path, LeafKind.ARRAY, shape, dtype, total, None, flag.reader, found)


def _numbered(node: Node) -> list[LeafHandle] | None:
    """Return the children of a map with the keys '0', '1', …, in numeric order, or None for other maps."""
    if not isinstance(node, Branch) or node.container is not Container.DICT or node.int_keys:
        return None
    names = [str(index) for index in range(len(node.children))]
    return [node.children[name] for name in names] if node.children.keys() == set(names) else None


def _is(node: Node, kind: LeafKind) -> bool:
    return isinstance(node, LeafHandle) and node.kind is kind
