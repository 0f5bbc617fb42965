"""Compare and convert kinds of leaves: array, typed PRNG key, number, text, bytes."""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import KIND_OF_NUMBER, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CorruptCheckpointError, KindMismatchError, UnsupportedLeafError
from flax_ckpt_compat._core.text_formatting import literal, one_line
from flax_ckpt_compat._core.tree import Branch, KeyData, Path, joined, show_path
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived, is_array, is_key

_log = logging.getLogger("flax_ckpt_compat")
_DTYPES = {kind: np.dtype(python) for python, kind in KIND_OF_NUMBER.items()}
PYTHON_NUMBERS = frozenset(_DTYPES)
RAW_KEYS = "Add rules.wrap_key_data(pattern) to the transforms, or give the target jax.random.key_data(key)."
_ARRAYS = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)


class TargetKind(enum.Enum):
    """Kind of value that a leaf of the target asks for."""

    ARRAY = "array"
    KEY = "typed PRNG key"
    NUMBER = "number"
    TEXT = "text"
    BYTES = "bytes"
    OTHER = "not a leaf"


_FITTING = {
    TargetKind.ARRAY: frozenset({LeafKind.ARRAY, LeafKind.NUMPY_SCALAR}),
    TargetKind.KEY: frozenset({LeafKind.PRNG_KEY}),
    TargetKind.NUMBER: frozenset({*PYTHON_NUMBERS, LeafKind.NUMPY_SCALAR}),
    TargetKind.TEXT: frozenset({LeafKind.STR}),
    TargetKind.BYTES: frozenset({LeafKind.BYTES}),
}


@dataclasses.dataclass(frozen=True, slots=True)
class KindDifference:
    """A leaf or sequence of the target whose stored counterpart is of another kind."""

    path: Path  # key path in the target
    stored: str  # the stored kind, in a few words
    wanted: str  # the target's kind, in a few words
    hint: str = ""  # a remedy, or empty
    is_leaf: bool = True  # the target has an array, a number, text or bytes there
    is_cut: bool = False  # entries or fields are stored that the target lacks, which are dropped


def target_kind(leaf: Any) -> TargetKind:
    """Return the kind that a leaf of the target, not None, asks for."""
    if isinstance(leaf, np.generic | bool | int | float | complex) and not isinstance(leaf, np.str_ | np.bytes_):
        return TargetKind.NUMBER
    if isinstance(leaf, np.ndarray):
        return TargetKind.ARRAY
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return TargetKind.KEY if prng_keys.is_prng_key(leaf) else TargetKind.ARRAY
    if isinstance(leaf, str):
        return TargetKind.TEXT
    if isinstance(leaf, bytes | bytearray | memoryview):
        return TargetKind.BYTES
    # Descriptions of arrays by other libraries, such as Orbax's metadata.
    is_described = isinstance(getattr(leaf, "shape", None), tuple) and hasattr(leaf, "dtype")
    return TargetKind.ARRAY if is_described else TargetKind.OTHER


def becomes_array(target: Any, casts: bool) -> bool:
    """Return whether a stored number is restored as an array, for a target's leaf of the kind ARRAY."""
    return isinstance(target, jax.ShapeDtypeStruct) or casts


def difference_at(path: Path, stored: Any, target: Any, casts: bool) -> KindDifference | None:
    """Return how the kinds of a stored node and a target's leaf differ, or None. A None target accepts anything.

    ``casts`` is the setting ``dtype="target"``, which makes arrays of numbers."""
    if target is None or (isinstance(stored, Derived) and stored.shape is None):
        return None
    if isinstance(stored, LeafHandle) and stored.kind is LeafKind.UNSUPPORTED:  # of whatever kind; it is refused
        return None
    wanted = target_kind(target)
    is_leaf = wanted is not TargetKind.OTHER
    if is_leaf and _fits(stored, target, wanted, casts):
        return None
    texts = _show_stored(stored), _show_target(target, wanted), _hint(path, stored, target)
    return KindDifference(path, *texts, is_leaf)


def longer_sequence(path: Path, stored: int, target: int) -> KindDifference:
    """Return the difference for a stored sequence with more entries than the target's."""
    count = stored - target
    wanted = f"one of {target}, which drops the last {'entry' if count == 1 else f'{count} entries'}"
    hint = "To keep all entries, extend the target's sequence; to drop them without this message, use rules.drop."
    return KindDifference(path, f"a sequence of {stored} entries", wanted, hint, is_leaf=False, is_cut=True)


def other_type(path: Path, stored: Sequence[str], left: Sequence[str]) -> KindDifference:
    """Return the difference for a stored namedtuple or dataclass with fields that the target's lacks."""
    hint = "It is of another type, such as another optimizer's: see rules.optimizer_state, or rules.drop the fields."
    fields, wanted = f"the fields {one_line(stored)}", f"one without {one_line(left)}"
    return KindDifference(path, fields, wanted, hint, is_leaf=False, is_cut=True)


def _fits(stored: Any, target: Any, wanted: TargetKind, casts: bool) -> bool:
    if isinstance(stored, Derived):
        return wanted is TargetKind.KEY if is_key(stored) else wanted in (TargetKind.ARRAY, TargetKind.NUMBER)
    if not isinstance(stored, LeafHandle):
        return False
    kinds = {stored.kind, *stored.possible_kinds}
    if (text := _text_of_numpy(stored)) is not None:
        return wanted in (text, TargetKind.ARRAY)
    if kinds & _FITTING[wanted]:
        return True
    if wanted is TargetKind.ARRAY and stored.kind is LeafKind.PRNG_KEY:
        return bool(target.dtype == stored.dtype)  # the data of keys, of the same shape
    if wanted is TargetKind.NUMBER:
        return stored.kind is LeafKind.ARRAY and stored.shape == ()
    return wanted is TargetKind.ARRAY and stored.kind in PYTHON_NUMBERS and becomes_array(target, casts)


def _text_of_numpy(stored: LeafHandle) -> TargetKind | None:
    """Return the kind of a stored numpy text or bytes, which numpy calls scalars like its numbers; else None."""
    is_text = stored.kind is LeafKind.NUMPY_SCALAR and stored.dtype is not None
    return {"U": TargetKind.TEXT, "S": TargetKind.BYTES}.get(stored.dtype.kind) if is_text else None  # type: ignore[union-attr]


def _show_stored(stored: Any) -> str:
    if stored is None:
        return "None"
    if isinstance(stored, Branch):
        count = len(stored.children)
        return f"a subtree of {count} {'entry' if count == 1 else 'entries'}" if count else "an empty subtree"
    if isinstance(stored, Derived):
        return "a typed PRNG key" if is_key(stored) else f"an array {stored.shape} {stored.dtype}"
    if stored.kind is LeafKind.ARRAY:
        return f"an array {stored.shape} {stored.dtype}"
    if (text := _text_of_numpy(stored)) is not None:
        return text.value
    names = {LeafKind.STR: "text", LeafKind.BYTES: "bytes", LeafKind.PRNG_KEY: "a typed PRNG key"}
    names[LeafKind.UNSUPPORTED] = "a leaf of a type that is not read"
    return names.get(stored.kind, f"a number ({stored.kind.value})")


def _show_target(target: Any, wanted: TargetKind) -> str:
    if wanted is TargetKind.ARRAY:
        return f"an array {tuple(target.shape)} {target.dtype}"
    if wanted is TargetKind.OTHER:
        is_class = isinstance(target, type)
        return f"the class {target.__name__}" if is_class else f"an object of type {type(target).__name__}"
    article = "a " if wanted in (TargetKind.KEY, TargetKind.NUMBER) else ""
    return f"{article}{wanted.value}"


def _hint(path: Path, stored: Any, target: Any) -> str:
    if not path and isinstance(target, str):
        return "The target is text, not a tree; pass a step as step=, and a prefix as prefix=."
    if path and is_array(stored) and math.prod(stored.shape) == 1 and target_kind(target) is TargetKind.NUMBER:
        return f"Take its one value out with rules.reshape({'^' + literal(joined(path)) + '$'!r}, [])."
    if isinstance(target, _ARRAYS) and isinstance(stored, Branch):  # as an nnx.State or nn.with_partitioning has them
        return "Rules can take an array out of such a subtree: flax_ckpt_compat.plan_restore looks for them."
    if isinstance(target, _ARRAYS) and isinstance(stored, LeafHandle):
        if stored.kind is LeafKind.PRNG_KEY and not prng_keys.is_prng_key(target):
            return "Add rules.key_data(pattern) to the transforms, or give the target a typed key (jax.random.key)."
        if stored.kind is LeafKind.ARRAY and prng_keys.is_prng_key(target):
            return RAW_KEYS
        if stored.kind in PYTHON_NUMBERS and target.shape == () and not prng_keys.is_prng_key(target):
            return "Stored numbers become arrays with dtype='target', or where the target has a jax.ShapeDtypeStruct."
    return ""


def resolved_kind(handle: LeafHandle, target: Any) -> LeafKind:
    """Return the kind of a stored leaf: that of the target's leaf, if it may have been saved as that."""
    kind = _kind_of(target) if handle.possible_kinds else None
    return kind if kind is not None and kind in handle.possible_kinds else handle.kind


def converted(value: Any, handle: LeafHandle, target: Any) -> Any:
    """Return a stored number as the `resolved_kind`."""
    kind = _kind_of(target)
    if kind not in handle.possible_kinds:
        return value
    array = np.asarray(value)
    return array if kind is LeafKind.ARRAY else array[()] if kind is LeafKind.NUMPY_SCALAR else array.item()


def data_of_unknown_key(key: KeyData, handle: LeafHandle, target: Any) -> np.ndarray[Any, Any]:
    """Return the data of a typed key whose implementation this jax lacks; raise if the target wants a typed key."""
    leaf, path = show_path(handle.path), handle.reader.path
    reason = f"{path}: the leaf {leaf!r} is a PRNG key of the implementation {key.impl!r}, which this jax does not have"
    remedy = "install or register what defines it, and wrap the data with jax.random.wrap_key_data"
    if prng_keys.is_prng_key(target):
        raise UnsupportedLeafError(
            f"{reason}; give a uint32 array as the target's leaf, or no target, to get its raw data; or {remedy}",
            path=path,
            leaf=leaf,
        )
    _log.warning("%s; its raw data is restored. To use it as a key, %s", reason, remedy)
    return np.array(key.data)


def check_computed(name: str, value: Any, target: Any, path: str, policy: str) -> None:
    """Apply the policy for kinds to what a user's function returned for a leaf of the target: None, if it lacks one.

    ``name`` and ``path`` are the leaf's and the checkpoint's, for the message."""
    wanted = target_kind(target)
    fits = target_kind(value) is wanted or (wanted is TargetKind.NUMBER and getattr(value, "shape", None) == ())
    if wanted is TargetKind.ARRAY:
        fits = isinstance(value, np.ndarray | jax.Array)
    if fits or policy == "ignore" or wanted in (TargetKind.KEY, TargetKind.OTHER):
        return
    found = "None, as functions without a return do" if value is None else f"{type(value).__name__}: {value!r:.60}"
    message = (
        f"{path}: {name}: the function returned {found}, and the target has {_show_target(target, wanted)}. Return "
        "the new value from it"
    )
    if policy == "error":
        raise KindMismatchError(f"{message}, or set kind_mismatch='warn'.", path=path, leaf=name)
    _log.warning("%s; what it returned is the result.", message)


def is_ambiguous(handle: LeafHandle, target: Any) -> bool:
    """Return whether a leaf may be a typed key or its data, and the target's leaf does not decide it."""
    may_be_key = LeafKind.PRNG_KEY in handle.possible_kinds
    return may_be_key and (_kind_of(target) is not LeafKind.ARRAY or prng_keys.is_prng_key(target))


def cast_of_number(kind: LeafKind, dtype: np.dtype[Any] | None, target: Any, casts: bool) -> Any:
    """Return the dtype that a stored number is cast to: that of an abstract target, or of any by a cast; or None.

    ``kind`` is the `resolved_kind`, and ``casts`` the setting ``dtype="target"``."""
    if kind not in PYTHON_NUMBERS and kind is not LeafKind.NUMPY_SCALAR:
        return None
    if wants_array(target):
        return target.dtype if becomes_array(target, casts) else None
    if not casts or KIND_OF_NUMBER.get(type(target)) is kind:
        return None
    if isinstance(target, np.generic):
        return target.dtype
    if type(target) is int and dtype is not None and dtype.kind in "iu":
        return dtype  # Python's integers have no limit, and no dtype
    return np.dtype(type(target)) if type(target) in KIND_OF_NUMBER else None


def wants_array(target: Any) -> bool:
    """Return whether a target's leaf is an array, abstract or not, and no typed key."""
    return isinstance(target, _ARRAYS) and not prng_keys.is_prng_key(target)


def stored_dtype(handle: LeafHandle) -> np.dtype[Any] | None:
    """Return the dtype of a stored array or number, or None for text and bytes."""
    return handle.dtype if handle.dtype is not None else _DTYPES.get(handle.kind)


def _kind_of(target: Any) -> LeafKind | None:
    if isinstance(target, np.generic):
        return LeafKind.NUMPY_SCALAR
    if isinstance(target, _ARRAYS):
        return LeafKind.ARRAY
    return KIND_OF_NUMBER.get(type(target))


def ambiguous_key(handle: LeafHandle) -> CorruptCheckpointError:
    """Return the error for a leaf that may be a typed key or its data."""
    leaf = show_path(handle.path)
    return CorruptCheckpointError(
        f"{handle.reader.path}: the leaf {leaf!r} may be a typed PRNG key or its raw data, which the lost files "
        f"array_metadatas/process_* record; restore them from a backup, or give a uint32 array as the target's leaf, "
        f"which gets the raw data, and wrap it with jax.random.wrap_key_data if it was a key",
        path=handle.reader.path,
        leaf=leaf,
    )
