"""Parse the headers of Flax's msgpack extension values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from flax_ckpt_compat._core import dtypes
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, show_path

from . import format
from .window import LOOKAHEAD, Window

_MAX_DIMS = 64  # numpy's own limit


@dataclasses.dataclass(slots=True)
class ArrayHeader:
    """Header of an array or numpy scalar.

    Attributes:
        text: bytes from the extension's tag up to the data.
        kind: array or numpy scalar.
        shape: shape of the array.
        dtype: dtype of the array.
        nbytes: size of the data, in bytes.
    """

    text: bytes
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int


def parse_array_header(window: Window, tag_at: int, code: int, length: int, path: Path) -> ArrayHeader:
    """Parse ``[shape, dtype name, data]`` up to the data, without moving the window.

    Args:
        window: window at the payload, which ends within the file.
        tag_at: position of the extension's tag in the window.
        code: extension code.
        length: length of the payload, in bytes.
        path: key path of the leaf, for errors.
    """
    head = window.data[window.at : window.at + min(length, LOOKAHEAD)]
    try:
        shape, name, end = _shape_and_name(head)
        dtype = dtypes.dtype_from_name(name)
        start, nbytes = _data_field(head, end)
        _check_shape(shape, dtype, nbytes)
        _check_length(start + nbytes, length)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise window.corrupt(f"an array that does not decode in {show_path(path)}: {reason}") from error
    # Flax decodes a scalar's payload like an array's; only one without dimensions becomes a scalar.
    kind = LeafKind.NUMPY_SCALAR if code == format.EXT_NUMPY_SCALAR and not shape else LeafKind.ARRAY
    return ArrayHeader(window.data[tag_at : window.at + start], kind, shape, dtype, nbytes)


def _shape_and_name(head: bytes) -> tuple[tuple[int, ...], str, int]:
    """Parse the shape and dtype name; return them and the position after them."""
    unpacker = msgpack.Unpacker(raw=True, max_buffer_size=LOOKAHEAD)
    unpacker.feed(head)
    if unpacker.read_array_header() != 3:
        raise ValueError("not three fields")
    shape, name = unpacker.unpack(), unpacker.unpack()
    if type(shape) is not list or len(shape) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r} is not a shape")
    if type(name) is not bytes:
        raise ValueError(f"{name!r} is not a dtype name")
    return tuple(shape), name.decode("ascii"), unpacker.tell()


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


def _check_shape(shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> None:
    if dtype.itemsize == 0:
        raise ValueError(f"dtype {dtype} without a size")
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(
            f"shape {shape} and dtype {dtype} need {math.prod(shape) * dtype.itemsize} bytes, not {nbytes}"
        )
    if nbytes == 0:
        np.empty(shape, dtype)  # numpy rejects some shapes even without elements


def _check_length(described: int, length: int) -> None:
    if described != length:
        raise ValueError(f"{length} bytes of payload, but {described} of header and data")


def parse_complex(window: Window, length: int) -> complex:
    """Read ``[real, imaginary]`` and move the window past it."""
    payload = window.take(length)
    try:
        real, imaginary = msgpack.unpackb(payload)
        return complex(_number(real), _number(imaginary))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise window.corrupt(f"{length} bytes that are not a complex number: {error}") from error


def _number(part: Any) -> float:
    if type(part) not in (int, float):
        raise ValueError(f"{part!r} is not a number")
    return float(part)


def as_single_leaf(branch: Branch, path: Path, window: Window) -> LeafHandle | None:
    """Return the leaf that a complete map encodes: a chunked array or a PRNG key; None for an ordinary map.

    A map with keys or types that Flax does not write is the user's own and stays a map.

    Raises:
        CorruptCheckpointError: the chunks of an array do not add up.
    """
    names = branch.children.keys()
    if len(names) == 3 and names == format.CHUNK_KEYS:
        return _chunked(branch, path, window)
    if len(names) == 2 and names == format.KEY_KEYS:
        return _prng_key(branch, path)
    return None


def _chunked(branch: Branch, path: Path, window: Window) -> LeafHandle | None:
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
    if min(shape, default=0) < 0 or len(shape) > _MAX_DIMS or math.prod(shape) * dtype.itemsize != total:
        raise window.corrupt(f"pieces of {total} bytes for an array of shape {shape} in {show_path(path)}")
    if any(chunk.dtype != dtype for chunk in chunks):
        raise window.corrupt(f"pieces of different dtypes for one array in {show_path(path)}")
    locator = tuple((chunk.locator, chunk.nbytes) for chunk in chunks)
    return LeafHandle(path, LeafKind.ARRAY, shape, dtype, total, "/".join(path), flag.reader, locator)


def _numbered(node: Node) -> list[Node] | None:
    """Return the children of a map with the keys '0', '1', …, in numeric order, or None for other maps."""
    if not isinstance(node, Branch) or node.container is not Container.DICT or node.int_keys:
        return None
    names = [str(index) for index in range(len(node.children))]
    return [node.children[name] for name in names] if node.children.keys() == set(names) else None


def _prng_key(branch: Branch, path: Path) -> LeafHandle | None:
    impl, data = branch.children[format.KEY_IMPL], branch.children["data"]
    if not _is(impl, LeafKind.STR) or not _is(data, LeafKind.ARRAY) or data.dtype != np.uint32:
        return None
    name, locator = "/".join(path), (impl.locator, data)
    handle = LeafHandle(path, LeafKind.PRNG_KEY, data.shape, data.dtype, data.nbytes, name, impl.reader, locator)
    handle.in_gda_folder = data.in_gda_folder
    return handle


def _is(node: Node, kind: LeafKind) -> bool:
    return isinstance(node, LeafHandle) and node.kind is kind
