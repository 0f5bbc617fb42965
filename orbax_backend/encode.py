"""One leaf → the array or text that is stored for it, and the mark that makes its type exact."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import LeafKind
from flax_ckpt_compat._core.dtypes import dtype_from_name, is_storable
from flax_ckpt_compat._core.dtypes import stored_name as dtype_name
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.memo import Memo
from flax_ckpt_compat._core.tree import HostCopy, KeyData, Path, Shard, is_jax_array, normalize_index, show_path

from .sharding import everywhere, is_spread, shard_shape
from .type_annotations import LeafMark
from .zarr import typestr

JAX_ARRAY, NP_ARRAY, SCALAR, STRING = "jax.Array", "np.ndarray", "scalar", "string"
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_BYTE = np.dtype(np.uint8)
# The part that the sharding says, which takes its time to find out.
_OF_SHARDING = (-1,)


@dataclasses.dataclass(slots=True, eq=False)
class Stored:
    """What is stored for one leaf.

    Attributes:
        value_type: Orbax's name of the type.
        dtype, shape: of the stored array.
        source: the array as the user has it (numpy or jax), or the text of a string leaf.
        mark: what the format does not keep, or None.
        sharding: the jax sharding that it had, or None.
        part: shape of what is written at once: of one shard, or of the whole array; that of the sharding, like
            ``spread``, unless given.
        spread: several processes hold it, each some of its shards.
    """

    value_type: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    source: Any
    mark: LeafMark | None = None
    sharding: Any = None
    part: tuple[int, ...] = _OF_SHARDING
    spread: bool = False

    def __post_init__(self) -> None:
        if self.part is _OF_SHARDING:
            self.part = shard_shape(self.shape, self.sharding)
            self.spread = is_spread(self.sharding)

    def whole(self) -> np.ndarray[Any, Any]:
        """What to store as one array, in host memory and C order, with the stored dtype."""
        return self._stored_form(_whole(self.source))

    def shards(self) -> list[Shard]:
        """What to store, each distinct shard once, in host memory and C order, with the stored dtype.

        Replicas are left out, and no shard is copied where the host can see a device's memory. Of what is spread
        over processes, these are the shards of which this one holds the first replica.
        """
        if self.part == self.shape and not self.spread:
            return [Shard(tuple(slice(0, length) for length in self.shape), self.whole())]
        return [Shard(shard.index, self._stored_form(shard.data)) for shard in host_shards(self.source)]

    def _stored_form(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if array.dtype == self.dtype:
            return array
        # Only dtypes that jax does not have are stored with an axis more, and those are in one piece.
        shape = array.shape if array.ndim == len(self.shape) else self.shape
        if array.nbytes == 0:
            return np.empty(shape, self.dtype)
        return array.reshape(-1).view(self.dtype).reshape(shape)


def host_shards(source: Any) -> tuple[Shard, ...]:
    """Each distinct shard of a ``jax.Array`` or `HostCopy` once among all processes, in host memory."""
    if isinstance(source, HostCopy):
        return source.shards
    return tuple(
        Shard(normalize_index(shard.index, source.shape), np.asarray(shard.data, order="C"))
        for shard in source.addressable_shards
        if shard.replica_id == 0
    )


def _whole(source: Any) -> np.ndarray[Any, Any]:
    return np.asarray(source.data if isinstance(source, HostCopy) else source, order="C")


class Encoder:
    """Encodes the leaves of one tree, and asks once for each type, dtype and sharding: most leaves have few of them."""

    def __init__(self, together: bool) -> None:
        self._together = together
        self._is_plain = Memo(_is_plain)
        self._jax_types: set[type] = set()
        # The first of equal shardings, and by shape: part and spread.
        self._shardings = Memo[tuple[Any, dict[Any, tuple[tuple[int, ...], bool]]]](lambda sharding: (sharding, {}))

    def encode(self, leaf: Any, path: Path) -> Stored:
        """What to store for a leaf; see `encode`."""
        kind = type(leaf)
        if kind is np.ndarray and self._is_plain[leaf.dtype]:
            return Stored(NP_ARRAY, leaf.dtype, leaf.shape, leaf, None, None, leaf.shape)
        if kind in self._jax_types and self._is_plain[leaf.dtype] and not leaf.is_deleted():
            sharding, parts = self._shardings.of(leaf.sharding)
            known = parts.get(leaf.shape)
            if known is not None:
                return Stored(JAX_ARRAY, leaf.dtype, leaf.shape, leaf, None, sharding, *known)
        stored = encode(leaf, show_path(path), self._together)
        if is_jax_array(leaf) and not self._together:
            self._jax_types.add(kind)
            self._shardings[stored.sharding][1][stored.shape] = stored.part, stored.spread
        return stored


def _is_plain(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and typestr(dtype) is not None


def encode(leaf: Any, shown: str, together: bool = False) -> Stored:
    """What to store for a leaf.

    Args:
        leaf: any leaf that `flax_ckpt_compat._core.backend.Backend.prepare` takes, except None.
        shown: its key path, for messages.
        together: several processes save it, so that an array may be spread over them.

    Raises:
        UnsupportedLeafError: the format cannot hold it.
    """
    if isinstance(leaf, np.generic):
        return _numpy_scalar(leaf, shown)
    if isinstance(leaf, np.ndarray):
        return _array(leaf, NP_ARRAY, shown)
    if isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return _python_value(leaf, shown)
    if isinstance(leaf, KeyData):
        stored = encode(leaf.data, shown, together)
        sharding = everywhere() if together and stored.sharding is None else stored.sharding
        mark = LeafMark(LeafKind.PRNG_KEY, impl=leaf.impl)
        # Orbax turns only jax.Array leaves back into typed keys.
        return dataclasses.replace(stored, value_type=JAX_ARRAY, mark=mark, sharding=sharding, part=_OF_SHARDING)
    if isinstance(leaf, HostCopy):
        return _placed(leaf, shown, together)
    if is_jax_array(leaf):
        return _jax_array(leaf, shown, together)
    raise _unsupported(shown, f"a leaf of type {type(leaf).__module__}.{type(leaf).__qualname__}")


def encode_bytes(data: bytes, mark: LeafMark) -> Stored:
    """A byte string as an array of uint8, which real Orbax can read."""
    return Stored(NP_ARRAY, _BYTE, (len(data),), np.frombuffer(data, np.uint8), mark)


def encode_text_as_bytes(text: str) -> Stored:
    """For a text that ``_strings.json`` cannot hold: its UTF-8 form as an array of uint8."""
    return encode_bytes(text.encode("utf-8", "surrogatepass"), LeafMark(LeafKind.STR))


def _python_value(leaf: Any, shown: str) -> Stored:
    if isinstance(leaf, bytes):
        return encode_bytes(leaf, LeafMark(LeafKind.BYTES))
    if isinstance(leaf, str):
        # str.__str__ so that a subclass cannot answer with another text.
        text = str.__str__(leaf)
        return Stored(STRING, _BYTE, (), text) if _is_utf8(text) else encode_text_as_bytes(text)
    if isinstance(leaf, bool):
        return _scalar(np.dtype("?"), leaf)
    if isinstance(leaf, int):
        return _scalar(_int_dtype(leaf, shown), leaf)
    if isinstance(leaf, float):
        return _scalar(np.dtype("<f8"), leaf)
    # An array, because StandardCheckpointer cannot restore a complex scalar (Orbax 0.12.8, measured).
    return Stored(NP_ARRAY, np.dtype("<c16"), (), np.array(leaf, "<c16"), LeafMark(LeafKind.COMPLEX))


def _scalar(dtype: np.dtype[Any], value: Any) -> Stored:
    return Stored(SCALAR, dtype, (), np.array(value, dtype))


def _int_dtype(value: int, shown: str) -> np.dtype[Any]:
    if -(2**63) <= value < 2**63:
        return np.dtype("<i8")
    if 0 <= value < 2**64:
        return np.dtype("<u8")
    raise _unsupported(shown, f"an int of {value.bit_length()} bits (64 are possible)")


def _numpy_scalar(leaf: Any, shown: str) -> Stored:
    # numpy strips trailing zeros off text and bytes arrays, so these two do not pass through one.
    if isinstance(leaf, np.str_):
        data = str.__str__(leaf).encode("utf-8", "surrogatepass")
        return encode_bytes(data, LeafMark(LeafKind.NUMPY_SCALAR, dtype="str"))
    if isinstance(leaf, np.bytes_):
        return encode_bytes(bytes(leaf), LeafMark(LeafKind.NUMPY_SCALAR, dtype="bytes"))
    stored = _array(np.asarray(leaf), SCALAR, shown)
    value_type = SCALAR if stored.shape == () and stored.dtype.kind != "c" else NP_ARRAY
    dtype = stored.mark.dtype if stored.mark else None
    return dataclasses.replace(stored, value_type=value_type, mark=LeafMark(LeafKind.NUMPY_SCALAR, dtype))


def _jax_array(leaf: Any, shown: str, together: bool) -> Stored:
    jax = sys.modules["jax"]
    if isinstance(leaf, jax.core.Tracer):
        raise _unsupported(shown, "an abstract value that jax is tracing")
    if leaf.is_deleted():
        raise _unsupported(shown, "a jax.Array that was deleted or donated")
    if not isinstance(leaf.dtype, np.dtype):
        raise _unsupported(shown, f"a jax.Array of the extended dtype {leaf.dtype}")
    return _placed(leaf, shown, together)


def _placed(leaf: Any, shown: str, together: bool) -> Stored:
    """A ``jax.Array`` or `HostCopy`."""
    # With a sharding of process 0 alone, real Orbax can restore the array in no other process (0.12.8, measured).
    local = together and leaf.sharding.is_fully_addressable
    stored = _array(leaf, JAX_ARRAY, shown, everywhere() if local else leaf.sharding)
    if stored.spread and not together:
        raise UnsupportedLeafError(
            f"{shown}: this process sees only a part of the array; use save_checkpoint_multiprocess", leaf=shown
        )
    is_cut = stored.spread and not leaf.sharding.is_fully_replicated
    if is_cut and stored.part == stored.shape and 0 not in stored.shape:
        raise UnsupportedLeafError(
            f"{shown}: the array is spread over processes in shards of different sizes ({leaf.sharding}), and zarr has "
            f"only grids of equal chunks; give it a NamedSharding with jax.device_put before saving",
            leaf=shown,
        )
    return stored


def _array(array: Any, value_type: str, shown: str, sharding: Any = None) -> Stored:
    if isinstance(array, np.ma.MaskedArray):
        raise _unsupported(shown, "a masked array")
    dtype, shape = np.dtype(array.dtype), tuple(array.shape)
    if typestr(dtype) is not None:
        return Stored(value_type, dtype, shape, array, None, sharding)
    _refuse_unstorable(dtype, shown)
    mark = LeafMark(dtype=dtype_name(dtype))
    view = _integers_as_wide(dtype)
    if view is None:
        return Stored(value_type, _BYTE, (*shape, dtype.itemsize), array, mark, sharding)
    return Stored(value_type, view, shape, array, mark, sharding)


def _integers_as_wide(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    if dtype.kind in "mM":
        return np.dtype("<i8" if dtype.isnative else ">i8")
    return None if dtype.kind in "US" else _UNSIGNED.get(dtype.itemsize)


def _refuse_unstorable(dtype: np.dtype[Any], shown: str) -> None:
    if is_storable(dtype):
        try:
            if dtype_from_name(dtype_name(dtype)) == dtype:
                return
        except ValueError:
            pass
    raise _unsupported(shown, f"an array of dtype {dtype!r}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unsupported(shown: str, what: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"{shown}: {what} cannot be stored in a checkpoint; expected an array of numbers, text or dates, a number, "
        f"str, bytes or None. Convert the leaf or leave it out of the tree",
        leaf=shown,
    )
