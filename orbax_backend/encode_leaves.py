"""Encode leaves as stored arrays or texts, with the annotations that keep their exact types."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np

from flax_ckpt_compat._core import array_boxes, tree
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.dtypes import dtype_from_name, dtype_name, is_storable, zarr_name
from flax_ckpt_compat._core.errors import LEAF_REMEDY, UnsupportedLeafError
from flax_ckpt_compat._core.memory import view_as
from flax_ckpt_compat._core.orbax_layout import JAX_ARRAY, NP_ARRAY
from flax_ckpt_compat._core.tree import HostCopy, KeyData, Path, Shard, is_jax_array, show_path

from .shardings import replicated_sharding, shard_shape, spans_processes
from .stored_names import SCALAR, STRING
from .type_annotations import LeafType
from .zarr import MAX_RANK

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_BYTE = np.dtype(np.uint8)
# In Orbax's words: replicated over all devices there are, however many (numpy's -1).
_MESH_OF_ALL = '{"sharding_type": "NamedSharding", "shape": [-1], "axis_names": ["devices"], "partition_spec": []}'
# Default of write_shape: derive it from the sharding, which takes time.
_FROM_SHARDING = (-1,)


@dataclasses.dataclass(slots=True, eq=False)
class EncodedLeaf:
    """The stored form of one leaf."""

    value_type: str  # Orbax's name of the type
    dtype: np.dtype[Any]  # of the stored array, like the next
    shape: tuple[int, ...]
    source: Any  # the user's array (numpy or jax), the handle of a stored one, or the text of a string leaf
    annotation: LeafType | None = None  # the type that Orbax's format does not keep, or None
    sharding: Any = None  # jax sharding, or None
    # Shape of one shard, or of the whole array; by default derived from the sharding, like the next.
    write_shape: tuple[int, ...] = _FROM_SHARDING
    spans_processes: bool = False  # whether several processes hold it, each some of its shards

    def __post_init__(self) -> None:
        if self.write_shape is _FROM_SHARDING:
            self.write_shape = shard_shape(self.shape, self.sharding)
            self.spans_processes = spans_processes(self.sharding)

    def whole(self) -> np.ndarray[Any, Any]:
        """Return the whole array in host memory and C order, with the stored dtype."""
        return self._stored_form(_whole(self.source))

    def written_by_one(self, *, is_here: bool) -> EncodedLeaf:
        """Return an array that several processes hold whole as one that this process, or another, writes."""
        box = array_boxes.full_box(self.source.shape)
        shards = (Shard(box, _whole(self.source)),) if is_here else ()
        source = HostCopy(self.source.shape, np.dtype(self.source.dtype), shards, self.sharding)
        return dataclasses.replace(self, source=source, spans_processes=True)

    def shards(self) -> list[Shard]:
        """Return each distinct shard, of several processes those with the first replica here, in host memory."""
        if self.write_shape == self.shape and not self.spans_processes:
            return [Shard(array_boxes.full_box(self.shape), self.whole())]
        if isinstance(source := self.source, LeafHandle):
            boxes = [box for _, box in array_boxes.cells(array_boxes.full_box(self.shape), self.write_shape)]
            parts = source.reader.read(list(map(source.part, boxes)))
            return [Shard(box, self._stored_form(part)) for box, part in zip(boxes, parts, strict=True)]
        return [Shard(shard.index, self._stored_form(shard.data)) for shard in tree.shards_of(self.source)]

    def _stored_form(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if array.dtype == self.dtype:
            return array
        # Only dtypes that jax lacks are stored with one more axis, and their arrays are never sharded.
        return view_as(array, self.dtype, array.shape if array.ndim == len(self.shape) else self.shape)


def _whole(source: Any) -> np.ndarray[Any, Any]:
    if isinstance(source, LeafHandle):
        source = source.read()
    is_placed = isinstance(source, HostCopy) or is_jax_array(source)
    return np.asarray(tree.on_host(source) if is_placed else source, order="C")


class Encoder:
    """Encodes the leaves of one tree; caches results by type, dtype and sharding."""

    def __init__(self, multiprocess: bool) -> None:
        self._multiprocess = multiprocess
        self._is_plain = functools.cache(_is_plain)
        self._jax_types: set[type] = set()
        # Sharding → the first equal one, and shape → (write_shape, spread).
        self._shardings = functools.cache(lambda sharding: (sharding, dict[Any, tuple[tuple[int, ...], bool]]()))

    def encode(self, leaf: Any, path: Path) -> EncodedLeaf:
        """Return what the function `encode` does, quickly for plain arrays."""
        kind = type(leaf)
        if kind is np.ndarray and self._is_plain(leaf.dtype) and leaf.ndim <= MAX_RANK:
            return EncodedLeaf(NP_ARRAY, leaf.dtype, leaf.shape, leaf, None, None, leaf.shape)
        if kind in self._jax_types and self._is_plain(dtype := leaf.dtype):
            sharding, parts = self._shardings(leaf.sharding)
            known = parts.get(shape := leaf.shape)
            if known is not None:
                return EncodedLeaf(JAX_ARRAY, dtype, shape, leaf, None, sharding, *known)
        stored = encode(leaf, show_path(path), self._multiprocess)
        if is_jax_array(leaf):
            # A sharding of one process is stored as another one, so it never gets here as a leaf's own.
            self._jax_types.add(kind)
            self._shardings(stored.sharding)[1][stored.shape] = stored.write_shape, stored.spans_processes
        return stored


def _is_plain(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and zarr_name(dtype) is not None


def encode(leaf: Any, keystr: str, multiprocess: bool = False) -> EncodedLeaf:
    """Encode any leaf that `Backend.prepare` accepts, except None; raise UnsupportedLeafError for others."""
    if isinstance(leaf, np.generic):
        return _numpy_scalar(leaf, keystr)
    if isinstance(leaf, np.ndarray):
        return _array(leaf, NP_ARRAY, keystr)
    if isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return _python_value(leaf, keystr)
    if isinstance(leaf, KeyData):
        stored = encode(leaf.data, keystr, multiprocess)
        sharding = leaf.sharding or stored.sharding or (replicated_sharding() if multiprocess else _MESH_OF_ALL)
        annotation = LeafType(LeafKind.PRNG_KEY, impl=leaf.impl)
        # Orbax turns only jax.Array leaves with a sharding back into typed keys.
        return dataclasses.replace(
            stored, value_type=JAX_ARRAY, annotation=annotation, sharding=sharding, write_shape=_FROM_SHARDING
        )
    if isinstance(leaf, HostCopy) or is_jax_array(leaf):
        return _placed(leaf, keystr, multiprocess)
    if isinstance(leaf, LeafHandle):
        stored = _array(leaf, NP_ARRAY if leaf.sharding is None else JAX_ARRAY, keystr, leaf.sharding)
        if len(stored.shape) == len(leaf.shape):
            stored.write_shape = leaf.reader.chunks_of(leaf)[0]
        return stored
    found = f"a leaf of type {type(leaf).__module__}.{type(leaf).__qualname__}"
    raise _unsupported(keystr, found, LEAF_REMEDY)


def _encode_bytes(data: bytes, annotation: LeafType) -> EncodedLeaf:
    """Encode a byte string as an array of uint8, which real Orbax can read."""
    return EncodedLeaf(NP_ARRAY, _BYTE, (len(data),), np.frombuffer(data, np.uint8), annotation)


def encode_text_as_bytes(text: str) -> EncodedLeaf:
    """Encode a text that ``_strings.json`` cannot hold as an array of its UTF-8 bytes."""
    return _encode_bytes(text.encode("utf-8", "surrogatepass"), LeafType(LeafKind.STR))


def _python_value(leaf: Any, keystr: str) -> EncodedLeaf:
    if isinstance(leaf, bytes):
        return _encode_bytes(leaf, LeafType(LeafKind.BYTES))
    if isinstance(leaf, str):
        # str.__str__, because a subclass may override it.
        text = str.__str__(leaf)
        try:
            text.encode()
        except UnicodeEncodeError:
            return encode_text_as_bytes(text)
        return EncodedLeaf(STRING, _BYTE, (), text)
    if isinstance(leaf, int | float):
        if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
            raise _unsupported(keystr, f"an int of {leaf.bit_length()} bits (64 are possible)")
        whole = "<u8" if leaf >= 2**63 else "<i8"
        name = "?" if isinstance(leaf, bool) else "<f8" if isinstance(leaf, float) else whole
        return EncodedLeaf(SCALAR, np.dtype(name), (), np.array(leaf, name))
    # As an array, because StandardCheckpointer cannot restore a complex scalar (Orbax 0.12.8, measured).
    return EncodedLeaf(NP_ARRAY, np.dtype("<c16"), (), np.array(leaf, "<c16"), LeafType(LeafKind.COMPLEX))


def _numpy_scalar(leaf: Any, keystr: str) -> EncodedLeaf:
    # numpy arrays strip trailing zeros off text and bytes.
    if isinstance(leaf, np.str_):
        data = str.__str__(leaf).encode("utf-8", "surrogatepass")
        return _encode_bytes(data, LeafType(LeafKind.NUMPY_SCALAR, dtype="str"))
    if isinstance(leaf, np.bytes_):
        return _encode_bytes(bytes(leaf), LeafType(LeafKind.NUMPY_SCALAR, dtype="bytes"))
    stored = _array(np.asarray(leaf), SCALAR, keystr)
    value_type = SCALAR if stored.shape == () and stored.dtype.kind != "c" else NP_ARRAY
    dtype = stored.annotation.dtype if stored.annotation else None
    return dataclasses.replace(stored, value_type=value_type, annotation=LeafType(LeafKind.NUMPY_SCALAR, dtype))


def _placed(leaf: Any, keystr: str, multiprocess: bool) -> EncodedLeaf:
    """Encode a ``jax.Array`` or `HostCopy`."""
    if not isinstance(leaf.dtype, np.dtype):
        raise _unsupported(keystr, f"a jax.Array of the extended dtype {leaf.dtype}")
    # If saved with a sharding of process 0 alone, real Orbax restores it in no other process (0.12.8, measured).
    local = multiprocess and leaf.sharding.is_fully_addressable
    stored = _array(leaf, JAX_ARRAY, keystr, replicated_sharding() if local else leaf.sharding)
    if stored.spans_processes and not multiprocess:
        raise UnsupportedLeafError(
            f"{keystr}: this process sees only a part of the array; use save_checkpoint_multiprocess", leaf=keystr
        )
    is_cut = stored.spans_processes and not leaf.sharding.is_fully_replicated
    if is_cut and stored.write_shape == stored.shape and 0 not in stored.shape:
        raise UnsupportedLeafError(
            f"{keystr}: the array is spread over processes in shards of different sizes ({leaf.sharding}), and zarr "
            f"has only grids of equal chunks; give it a NamedSharding with jax.device_put before saving",
            leaf=keystr,
        )
    return stored


def _array(array: Any, value_type: str, keystr: str, sharding: Any = None) -> EncodedLeaf:
    if isinstance(array, np.ma.MaskedArray):
        raise _unsupported(keystr, "a masked array")
    dtype, shape = np.dtype(array.dtype), tuple(array.shape)
    annotation, stored, view = None, shape, dtype
    if zarr_name(dtype) is None:
        if not _is_storable(dtype):
            raise _unsupported(keystr, f"an array of dtype {dtype!r}")
        annotation, unsigned = LeafType(dtype=dtype_name(dtype)), _unsigned_dtype(dtype)
        stored, view = (shape, unsigned) if unsigned is not None else ((*shape, dtype.itemsize), _BYTE)
    if len(stored) > MAX_RANK:
        raise UnsupportedLeafError(
            f"{keystr}: an array of {len(stored)} axes, as they are stored, does not fit Orbax's format; expected at "
            f"most {MAX_RANK}. Reshape it, or save it as msgpack",
            leaf=keystr,
        )
    return EncodedLeaf(value_type, view, stored, array, annotation, sharding)


def _unsigned_dtype(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    if dtype.kind in "mM":
        return np.dtype("<i8" if dtype.isnative else ">i8")
    return None if dtype.kind in "US" else _UNSIGNED.get(dtype.itemsize)


def _is_storable(dtype: np.dtype[Any]) -> bool:
    with contextlib.suppress(ValueError):
        return is_storable(dtype) and dtype_from_name(dtype_name(dtype)) == dtype
    return False


def _unsupported(
    keystr: str, what: str, remedy: str = "convert the leaf or leave it out of the tree"
) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"{keystr}: {what} cannot be stored in a checkpoint; expected an array of numbers, text or dates, a number, "
        f"str, bytes or None; {remedy}",
        leaf=keystr,
    )
