"""Open Orbax directories: leaves as handles, and their values."""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CorruptCheckpointError, DepthError, StorageError, UnrecognizedFormatError
from flax_ckpt_compat._core.orbax_layout import ARRAY_METADATA_FILES, ARRAY_METADATAS, MSGPACK_FILE
from flax_ckpt_compat._core.tree import Branch, Container, Node, iter_leaves, show_path

from .aggregate import OpenMsgpack, open_aggregate
from .build_tree import build_tree
from .decode import ArrayLocator, inline_key, kinds_of, make_decoder, take_inline
from .encode import JAX_ARRAY, NP_ARRAY, SCALAR, STRING
from .grid import Box
from .items import implementation
from .key_index import open_index
from .nested_databases import NestedIndex, SubdirIndex, unmerged_database
from .read_arrays import Fetcher
from .stored_names import key_prefix
from .stored_values import Index
from .structure import UNKNOWN, LeafEntry, Structure, read_structure
from .type_annotations import LeafType
from .zarr import ArrayInfo, parse_array_metadata

_EMPTY: dict[str, Callable[[], Node]] = {
    "None": lambda: None,
    "Dict": lambda: Branch({}),
    "List": lambda: Branch({}, Container.LIST),
    "Tuple": lambda: Branch({}, Container.TUPLE),
    "NamedTuple": lambda: Branch({}, Container.NAMEDTUPLE),
}
# Leaves of other types may be stored in any way, even if there are arrays of their names.
_ARRAY_TYPES = frozenset([JAX_ARRAY, NP_ARRAY, SCALAR, UNKNOWN])
_STORED_TYPES = _ARRAY_TYPES | {STRING}
_log = logging.getLogger("flax_ckpt_compat")
# Sizes of the last axis of key data, of jax's own implementations (threefry2x32; rbg and unsafe_rbg).
_KEY_WIDTHS = (2, 4)


def _slice_of(handle: LeafHandle, index: Box | None) -> LeafHandle | ArraySlice:
    return handle if index is None else ArraySlice(handle, index)


class OrbaxReader:
    """An open directory; see `flax_ckpt_compat._core.backend.Reader`.

    Arrays up to 4 KiB that are inline in the database and read in one call share aligned blocks of up to 256 KiB.
    """

    format = Format.ORBAX
    _closed = False

    def __init__(self, path: str, index: Index | None, structure: Structure) -> None:
        self.path = path
        self._structure = structure
        self._index = index
        self._fetcher = Fetcher(path, index, structure.fills_missing) if index is not None else None
        self._aggregate = structure.aggregate
        self._locators: dict[Any, ArrayLocator] = {}
        try:
            self.tree: Node = build_tree(structure, [self._node(entry) for entry in structure.entries])
        except RecursionError as error:
            raise DepthError(
                f"{path}: the stored tree is nested too deeply for Python's recursion limit; raise the limit with "
                "sys.setrecursionlimit",
                path=path,
            ) from error

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:
        """Return the values of handles and slices; see `flax_ckpt_compat._core.backend.Reader.read`."""
        if self._closed:
            raise StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
        values: list[Any] = [None] * len(handles)
        with memory.pause_gc():
            rest, coded = take_inline(self._index, handles, values)
        for handle, number in coded:
            values[number] = self._decode(handle, values[number])
        if rest:
            others = self._read([handles[number] for number in rest], mapped)
            for number, value in zip(rest, others, strict=True):
                values[number] = value
        return values

    def _read(self, handles: Sequence[LeafHandle | ArraySlice], mapped: bool) -> list[Any]:
        asked = [(one, None) if isinstance(one, LeafHandle) else (one.handle, one.index) for one in handles]
        jobs = [
            handle.locator.job(handle, index) for handle, index in asked if isinstance(handle.locator, ArrayLocator)
        ]
        inner = [_slice_of(handle.locator, index) for handle, index in asked if isinstance(handle.locator, LeafHandle)]
        arrays = iter(self._fetcher.fetch(jobs, mapped=mapped) if self._fetcher is not None else ())
        aggregated = iter(self._aggregate.read(inner, mapped=mapped) if self._aggregate is not None else ())
        return [self._value(handle, arrays, aggregated) for handle, _ in asked]

    def sharding_of(self, name: str) -> str | None:
        """See `flax_ckpt_compat._core.backend.Reader.sharding_of`."""
        return self._structure.shardings.get(name)

    def close(self) -> None:
        """Close the reader; between reads only the msgpack file of old releases is open."""
        self._closed = True
        if self._aggregate is not None:
            self._aggregate.close()

    def _value(self, handle: LeafHandle, arrays: Iterator[Any], aggregated: Iterator[Any]) -> Any:
        locator = handle.locator
        if isinstance(locator, ArrayLocator):
            return next(arrays) if locator.is_plain else self._decode(handle, next(arrays))
        return next(aggregated) if isinstance(locator, LeafHandle) else locator

    def _node(self, entry: LeafEntry) -> Node:
        # A value in the msgpack file overrides the arrays, as in real Orbax.
        inner = self._aggregate.value(entry.path) if self._aggregate is not None else None
        if inner is not None:
            return self._handle(entry, inner.kind, inner.shape, inner.dtype, inner.nbytes, inner)
        if entry.value_type in _EMPTY:
            return _EMPTY[entry.value_type]()
        if entry.skipped and entry.value_type not in _STORED_TYPES:
            raise self._unknown_type(entry)
        if entry.skipped:
            raise self._corrupt(
                show_path(entry.path), f"its value should be in the msgpack file {MSGPACK_FILE!r}, which lacks it"
            )
        if entry.value_type == STRING or (entry.value_type == UNKNOWN and self._is_text(entry)):
            text = self._structure.text(entry)
            return self._handle(entry, LeafKind.STR, (), None, len(text.encode("utf-8", "surrogatepass")), text)
        return self._array_handle(entry)

    def _is_text(self, entry: LeafEntry) -> bool:
        return self._structure.strings is not None and self._metadata_of(entry) is None

    def _array_handle(self, entry: LeafEntry) -> LeafHandle:
        if entry.value_type not in _ARRAY_TYPES:
            raise self._unknown_type(entry)
        found = self._metadata_of(entry)
        if found is None:
            key = key_prefix(entry.name) + ARRAY_METADATA_FILES[self._structure.zarr3]
            raise self._corrupt(show_path(entry.path), f"its metadata {key!r} is missing")
        annotation = self._structure.annotations.leaves.get(entry.name) if self._structure.annotations else None
        of_release = self._value_type(entry) if self._structure.annotations is None else None
        known = (found[1:], entry.value_type, of_release, annotation, self._structure.key_impls.get(entry.name))
        locator = self._locators.get(known)
        if locator is None:
            locator = self._locators[known] = self._make_locator(entry, found, annotation or LeafType())
        kind, shape, dtype, nbytes, possible_kinds = locator.handle
        return LeafHandle(entry.path, kind, shape, dtype, nbytes, entry.name, self, locator, False, possible_kinds)

    def _make_locator(self, entry: LeafEntry, found: tuple[str, bytes, bool], annotation: LeafType) -> ArrayLocator:
        """Parse the metadata of a leaf's array into its locator."""
        key, text, zarr3 = found
        keystr, possible_kinds = show_path(entry.path), frozenset[LeafKind]()
        try:
            info = parse_array_metadata(text, zarr3)
        except ValueError as error:
            raise self._corrupt(keystr, f"{key!r}: {error}") from error
        if self._structure.annotations is None:
            kind, possible_kinds = kinds_of(self._value_type(entry), info)
            annotation = LeafType(kind if kind is not LeafKind.ARRAY else None)
        try:
            decoder = make_decoder(entry.value_type, info, annotation, self._key_impl(entry, info))
        except ValueError as error:
            raise self._corrupt(keystr, str(error)) from error
        shape, dtype = decoder.shape, decoder.dtype
        if decoder.kind not in (LeafKind.ARRAY, LeafKind.PRNG_KEY):
            shape = ()
        if decoder.text is not None:
            dtype = np.dtype(decoder.text)
        typed = decoder.kind in (LeafKind.ARRAY, LeafKind.PRNG_KEY, LeafKind.NUMPY_SCALAR)
        is_plain = decoder.kind is LeafKind.ARRAY and decoder.dtype == info.dtype
        described = (decoder.kind, shape, dtype if typed else None, decoder.nbytes, possible_kinds)
        return ArrayLocator(info, decoder, is_plain, described, inline_key(info))

    def _value_type(self, entry: LeafEntry) -> str:
        # Since 0.4.0 exactly the jax arrays have a stored sharding.
        is_jax_array = entry.value_type == UNKNOWN and entry.name in self._structure.shardings
        return JAX_ARRAY if is_jax_array else entry.value_type

    def _decode(self, handle: LeafHandle, array: Any) -> Any:
        try:
            return handle.locator.decoder.decode(array)
        except ValueError as error:
            raise self._corrupt(show_path(handle.path), f"its text is no UTF-8 ({error})") from error

    def _handle(
        self, entry: LeafEntry, kind: LeafKind, shape: Any, dtype: Any, nbytes: int, locator: Any
    ) -> LeafHandle:
        return LeafHandle(entry.path, kind, shape, dtype, nbytes, entry.name, self, locator)

    def _key_impl(self, entry: LeafEntry, info: ArrayInfo) -> str | None:
        impl = self._structure.key_impls.get(entry.name)
        if impl is not None or not self._structure.is_typed_key:
            return impl
        impl, guessed = implementation(info.shape[-1] if info.shape else 0)
        if guessed:
            _log.warning(
                f"{self.path}: the files of this PRNG key do not name its implementation; {impl!r} is assumed, which "
                f"has the same shape as 'unsafe_rbg': for that one, wrap jax.random.key_data again"
            )
        return impl

    def _metadata_of(self, entry: LeafEntry) -> tuple[str, bytes, bool] | None:
        """Return key and text of an array's metadata, and whether it is zarr v3."""
        if self._index is None:
            return None
        for zarr3 in (self._structure.zarr3, not self._structure.zarr3):
            key = key_prefix(entry.name) + ARRAY_METADATA_FILES[zarr3]
            text = self._index.get(key)
            if text is not None:
                return key, text, zarr3
        return None

    def _unknown_type(self, entry: LeafEntry) -> UnrecognizedFormatError:
        leaf, known = show_path(entry.path), ", ".join(sorted((_STORED_TYPES - {UNKNOWN}) | _EMPTY.keys()))
        return UnrecognizedFormatError(
            f"{self.path}: the leaf {leaf!r} is of the type {entry.value_type!r}, which this release does not know "
            f"(it knows {known}); a type handler of its own saved it, or a newer Orbax: restore it with the "
            f"orbax_checkpointer that saved it",
            path=self.path,
            leaf=leaf,
        )

    def _corrupt(self, keystr: str, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.path}: the leaf {keystr!r} cannot be read: {what}; restore the files from a copy",
            path=self.path,
            leaf=keystr,
        )


def open_checkpoint(path: str, open_msgpack: OpenMsgpack | None = None) -> OrbaxReader:
    """Open a directory without reading array data.

    Args:
        path: directory of the checkpoint.
        open_msgpack: opens the msgpack file of old releases.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError, UnrecognizedFormatError: it is not a checkpoint directory.
        CorruptCheckpointError: it does not decode.
    """
    aggregate = open_aggregate(path, open_msgpack)
    try:
        structure = read_structure(path, aggregate)
        reader = OrbaxReader(path, _index_of(path, structure), structure)
    except BaseException:
        if aggregate is not None:
            aggregate.close()
        raise
    _warn_of_lost_keys(reader, structure)
    _warn_of_shared_names(path, structure)
    return reader


def _index_of(path: str, structure: Structure) -> Index | None:
    names = [e.name for e in structure.entries if not e.skipped and e.value_type != STRING]
    if not names:
        return None
    alone = unmerged_database(path, names) if structure.use_ocdbt else None
    index = SubdirIndex(path, alone) if alone else open_index(path, structure.use_ocdbt)
    return NestedIndex(path, index) if structure.use_ocdbt and any("/" in name for name in names) else index


def _warn_of_shared_names(path: str, structure: Structure) -> None:
    """Warn of leaves with the same name, of which real Orbax kept one value (measured)."""
    counts = collections.Counter(e.name for e in structure.entries if not e.skipped)
    shared = [name for name, count in counts.items() if count > 1]
    if shared:
        _log.warning(
            f"{path}: several leaves were stored under each of the names {shared[:8]}; only one value of each "
            f"survived, and all of them restore as that one"
        )


def _warn_of_lost_keys(reader: OrbaxReader, structure: Structure) -> None:
    """Warn of possible PRNG keys that ``array_metadatas``, the only file to tell them from arrays, does not list."""
    if structure.annotations is not None:
        return
    unlisted = {
        e.name for e in structure.entries
        if e.value_type == JAX_ARRAY and e.has_write_shape and e.name not in structure.key_impls
    }  # fmt: skip
    leaves = (leaf for _, leaf in iter_leaves(reader.tree) if isinstance(leaf, LeafHandle))
    handles = [leaf for leaf in leaves if leaf.name in unlisted and _may_be_key(leaf)]
    doubtful = [h.name for h in handles]
    for handle in handles:
        handle.possible_kinds |= {LeafKind.PRNG_KEY}
    if doubtful:
        _log.warning(
            f"{os.path.join(reader.path, ARRAY_METADATAS)} does not list the arrays {doubtful[:8]}, and it alone tells "
            f"PRNG keys from arrays; if they were keys, wrap them with jax.random.wrap_key_data"
        )


def _may_be_key(handle: LeafHandle) -> bool:
    return handle.dtype == np.uint32 and bool(handle.shape) and handle.shape[-1] in _KEY_WIDTHS
