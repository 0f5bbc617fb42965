"""Open Orbax directories: leaves as handles, and their values."""

from __future__ import annotations

import collections
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import ArraySlice, Format, Inspection, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.bounded_reads import handles_of
from flax_ckpt_compat._core.errors import CorruptCheckpointError, DepthError, StorageError, UnrecognizedFormatError
from flax_ckpt_compat._core.grid import readable_boxes
from flax_ckpt_compat._core.tree import Branch, Node, show_path

from .aggregate import OpenMsgpack
from .build_tree import build_tree
from .checksum_file import Checksums
from .chunks import ArrayRead, checked_data
from .decode import KEY_WIDTHS, StoredLeaf, describe_leaf
from .inspection import inspect
from .items import implementation
from .key_index import Index, open_index
from .read_arrays import ArrayReader
from .structure import UNKNOWN, LeafEntry, Structure, read_structure
from .type_annotations import LeafType
from .zarr import ArrayInfo, parse_array_metadata

_EMPTY = {layout.NONE: None, **layout.EMPTY_CONTAINERS}
# Leaves of other types may be stored in any way, even if there are arrays of their names.
_ARRAY_TYPES = frozenset([layout.JAX_ARRAY, layout.NP_ARRAY, layout.SCALAR, UNKNOWN])
_STORED_TYPES = _ARRAY_TYPES | {layout.STRING}
_UNANNOTATED = LeafType()
_CHECKED_BYTES = 32 << 20
_log = logging.getLogger("flax_ckpt_compat")


class OrbaxReader(Reader):
    """An open directory; see `flax_ckpt_compat._core.backend.Reader`.

    Arrays up to 4 KiB that are inline in the database and read in one call share aligned blocks of up to 256 KiB.
    """

    format = Format.ORBAX
    places_on_device, keeps_lists = True, False

    def __init__(self, path: str, structure: Structure, recorded: Checksums | None = None) -> None:
        """Open the arrays; with ``recorded``, check them against these checksums."""
        self.path, self._recorded = path, recorded
        self._structure = structure
        self._aggregate = structure.aggregate
        self._is_closed = False
        names = [entry.name for entry in structure.entries if not entry.skipped and entry.value_type != layout.STRING]
        self._index: Index | None = open_index(path, names, structure.use_ocdbt) if names else None
        self._arrays = (
            ArrayReader(path, self._index, structure.fills_missing, recorded) if self._index is not None else None
        )
        self._stored: dict[Any, StoredLeaf] = {}
        try:
            _check_depth(structure)
            leaves = [self._leaf(entry) for entry in structure.entries]
            self.tree: Node = build_tree(structure, leaves)
        except RecursionError as error:
            raise DepthError(
                f"{path}: the stored tree is nested too deeply for Python's recursion limit; raise the limit with "
                "sys.setrecursionlimit",
                path=path,
            ) from error
        self._warn_of_lost_keys(leaves)
        self._warn_of_shared_names()

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:
        """Return the values of handles and slices; see `flax_ckpt_compat._core.backend.Reader.read`."""
        if self._is_closed:
            raise StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
        values: list[Any] = [None] * len(handles)
        # Arrays, or boxes of them, that may be inline in the index, and the keys of their chunks.
        small: list[tuple[int, LeafHandle, StoredLeaf]] = []
        keys: list[str] = []
        arrays: list[int] = []
        aggregated: list[tuple[int, LeafHandle | ArraySlice]] = []
        last, prefix = None, ""
        for number, one in enumerate(handles):
            handle, box = (one, None) if type(one) is LeafHandle else (one.handle, one.index)  # type: ignore[union-attr]
            leaf = handle.locator
            if type(leaf) is StoredLeaf:
                key = None
                if leaf.has_small_chunks:
                    key = leaf.whole_key if box is None else leaf.key_of(box)
                if key is None:
                    arrays.append(number)
                    continue
                if handle is not last:
                    last, prefix = handle, layout.key_prefix(handle.name)
                small.append((number, handle, leaf))
                keys.append(prefix + key)
            elif isinstance(leaf, LeafHandle):
                aggregated.append((number, leaf if box is None else ArraySlice(leaf, box)))
            else:
                values[number] = leaf
        if self._index is not None and self._arrays is not None:
            arrays += self._copy_inline(small, self._index.find_all(keys), values)
            reads = [_array_read(handles[number]) for number in arrays]
            if reads:
                self._arrays.read(reads, mapped=mapped)
            for number, read in zip(arrays, reads, strict=True):
                values[number] = self._decoded(handles[number], read.array)
        if aggregated and self._aggregate is not None:
            found = self._aggregate.reader.read([one for _, one in aggregated], mapped=mapped)
            for (number, _), value in zip(aggregated, found, strict=True):
                values[number] = value
        return values

    def boxes(self, handle: LeafHandle, nbytes: int) -> Iterator[tuple[slice, ...]]:
        """See `flax_ckpt_compat._core.backend.Reader.boxes`."""
        leaf = handle.locator
        if not isinstance(leaf, StoredLeaf):
            return super().boxes(handle, nbytes)
        limit = max(1, nbytes // max(1, leaf.dtype.itemsize))
        chunks = tuple(max(1, length) for length in leaf.info.chunks[: len(leaf.shape)])
        splits = leaf.info.raw and not leaf.info.checksum_nbytes
        return readable_boxes(leaf.shape, chunks, limit, splits_chunks=splits)

    def chunks_of(self, handle: LeafHandle) -> tuple[int, ...]:
        """See `flax_ckpt_compat._core.backend.Reader.chunks_of`."""
        leaf = handle.locator
        return leaf.info.chunks[: len(leaf.shape)] if isinstance(leaf, StoredLeaf) else handle.shape

    def inspect(self) -> Inspection:
        """See `flax_ckpt_compat._core.backend.Reader.inspect`."""
        infos = {leaf.name: leaf.locator.info for leaf in handles_of(self) if isinstance(leaf.locator, StoredLeaf)}
        return inspect(self.path, self._structure, self._index, infos)

    def verify_checksums(self, handle: LeafHandle | None = None) -> bool:
        """See `flax_ckpt_compat._core.backend.Reader.verify_checksums`."""
        recorded = self._recorded or Checksums(self.path)
        if handle is None:
            return recorded.check_files()
        leaf = handle.locator
        if not isinstance(leaf, StoredLeaf) or self._arrays is None:
            return isinstance(leaf, str) and layout.STRINGS in recorded.intact
        if leaf.info.checked:
            for box in self.boxes(handle, _CHECKED_BYTES):
                self.read([ArraySlice(handle, box)])
            return True
        return recorded.record() is not None and self._arrays.verify(
            ArrayRead(handle.name, leaf.info, handle.path, None), recorded
        )

    def sharding_of(self, name: str) -> str | None:
        """See `flax_ckpt_compat._core.backend.Reader.sharding_of`."""
        return self._structure.shardings.get(name)

    def close(self) -> None:
        """Close the reader; between reads only the msgpack file of old releases is open."""
        self._is_closed = True
        if self._aggregate is not None:
            self._aggregate.reader.close()

    def _copy_inline(
        self, small: Sequence[tuple[int, LeafHandle, StoredLeaf]], found: Sequence[Any], values: list[Any]
    ) -> list[int]:
        """Copy the chunks that are inline in the index to new memory; return the numbers of the others."""
        others, inline, chunks = list[int](), list[tuple[int, LeafHandle, StoredLeaf]](), list[Any]()
        for one, value in zip(small, found, strict=True):
            leaf, data = one[2], value
            if type(data) is not bytes or len(data) != leaf.chunk_nbytes:
                data = None
            elif leaf.info.checksum_nbytes:
                data = checked_data(data)  # ArrayReader names a damaged chunk
            if data is None:
                others.append(one[0])
            else:
                inline.append(one)
                chunks.append((leaf.info.chunks, leaf.info.dtype, data))
        with memory.pause_gc():
            for (number, handle, leaf), array in zip(inline, memory.pack(chunks), strict=True):
                values[number] = array if leaf.is_plain else self._decoded(handle, array)
        return others

    def _decoded(self, one: LeafHandle | ArraySlice, array: Any) -> Any:
        handle = one if isinstance(one, LeafHandle) else one.handle
        if handle.locator.is_plain:
            return array
        try:
            return handle.locator.decode(array)
        except ValueError as error:
            raise self._corrupt(handle, f"its text is no UTF-8 ({error})") from error

    def _leaf(self, entry: LeafEntry) -> Node:
        # A value in the msgpack file overrides the arrays, as in real Orbax.
        inner = self._aggregate.values.get(entry.path) if self._aggregate is not None else None
        if inner is not None:
            return self._handle(entry, inner.kind, inner.shape, inner.dtype, inner.nbytes, inner)
        if entry.value_type in _EMPTY:
            container = _EMPTY[entry.value_type]
            return None if container is None else Branch({}, container)
        if entry.value_type not in _STORED_TYPES:
            raise self._unknown_type(entry)
        if entry.skipped:
            raise self._corrupt(
                entry, f"its value should be in the msgpack file {layout.MSGPACK_FILE!r}, which lacks it"
            )
        stored = self._stored_leaf(entry)
        if stored is not None:
            kind, shape, dtype, nbytes = stored.described
            return LeafHandle(
                entry.path, kind, shape, dtype, nbytes, entry.name, self, stored, False, stored.possible_kinds
            )
        if entry.value_type == layout.STRING or (entry.value_type == UNKNOWN and self._structure.strings is not None):
            text = self._structure.text(entry)
            return self._handle(entry, LeafKind.STR, (), None, len(text.encode("utf-8", "surrogatepass")), text)
        key = layout.key_prefix(entry.name) + layout.ARRAY_METADATA_FILES[self._structure.zarr3]
        raise self._corrupt(entry, f"its metadata {key!r} is missing")

    def _handle(
        self, entry: LeafEntry, kind: LeafKind, shape: Any, dtype: Any, nbytes: int, locator: Any
    ) -> LeafHandle:
        return LeafHandle(entry.path, kind, shape, dtype, nbytes, entry.name, self, locator)

    def _stored_leaf(self, entry: LeafEntry) -> StoredLeaf | None:
        """Return how an array is stored, shared by all leaves that are stored alike; None if there is no array."""
        if self._index is None or entry.value_type == layout.STRING:
            return None
        structure, name, value_type = self._structure, entry.name, entry.value_type
        prefix, zarr3 = layout.key_prefix(name), structure.zarr3
        text = self._index.get(prefix + layout.ARRAY_METADATA_FILES[zarr3])
        if text is None:
            zarr3 = not zarr3
            text = self._index.get(prefix + layout.ARRAY_METADATA_FILES[zarr3])
            if text is None:
                return None
        annotation = None
        if structure.annotations is not None:
            annotation = structure.annotations.leaves.get(name, _UNANNOTATED)
        elif value_type == UNKNOWN and name in structure.shardings:
            value_type = layout.JAX_ARRAY  # since 0.4.0 exactly the jax arrays have a stored sharding
        alike = (text, zarr3, value_type, annotation, structure.key_impls.get(name))
        stored = self._stored.get(alike)
        if stored is None:
            stored = self._stored[alike] = self._describe(entry, value_type, text, zarr3, annotation)
        return stored

    def _describe(
        self, entry: LeafEntry, value_type: str, text: bytes, zarr3: bool, annotation: LeafType | None
    ) -> StoredLeaf:
        try:
            info = parse_array_metadata(text, zarr3)
        except ValueError as error:
            key = layout.key_prefix(entry.name) + layout.ARRAY_METADATA_FILES[zarr3]
            raise self._corrupt(entry, f"{key!r}: {error}") from error
        try:
            return describe_leaf(value_type, info, annotation, self._key_impl(entry, info))
        except ValueError as error:
            raise self._corrupt(entry, str(error)) from error

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

    def _warn_of_lost_keys(self, leaves: Sequence[Node]) -> None:
        """Warn of possible PRNG keys that ``array_metadatas``, the only file to tell them from arrays, lacks."""
        if self._structure.annotations is not None:
            return
        doubtful = []
        for entry, leaf in zip(self._structure.entries, leaves, strict=True):
            has_shape = entry.write_shape is not None
            unlisted = (
                entry.value_type == layout.JAX_ARRAY and has_shape and entry.name not in self._structure.key_impls
            )
            if unlisted and isinstance(leaf, LeafHandle) and _may_be_key(leaf):
                leaf.possible_kinds |= {LeafKind.PRNG_KEY}
                doubtful.append(leaf.name)
        if doubtful:
            _log.warning(
                f"{os.path.join(self.path, layout.ARRAY_METADATAS)} does not list the arrays {doubtful[:8]}, and it "
                f"alone tells PRNG keys from arrays; if they were keys, wrap them with jax.random.wrap_key_data"
            )

    def _warn_of_shared_names(self) -> None:
        """Warn of leaves with the same name, of which real Orbax kept one value (measured)."""
        names = [entry.name for entry in self._structure.entries if not entry.skipped]
        if len(set(names)) < len(names):
            shared = [name for name, count in collections.Counter(names).items() if count > 1]
            _log.warning(
                f"{self.path}: several leaves were stored under each of the names {shared[:8]}; only one value of each "
                f"survived, and all of them restore as that one"
            )

    def _unknown_type(self, entry: LeafEntry) -> UnrecognizedFormatError:
        leaf, known = show_path(entry.path), ", ".join(sorted((_STORED_TYPES - {UNKNOWN}) | _EMPTY.keys()))
        return UnrecognizedFormatError(
            f"{self.path}: the leaf {leaf!r} is of the type {entry.value_type!r}, which this release does not know "
            f"(it knows {known}); a type handler of its own saved it, or a newer Orbax: restore it with the "
            f"orbax_checkpointer that saved it",
            path=self.path,
            leaf=leaf,
        )

    def _corrupt(self, leaf: LeafEntry | LeafHandle, what: str) -> CorruptCheckpointError:
        keystr = show_path(leaf.path)
        return CorruptCheckpointError(
            f"{self.path}: the leaf {keystr!r} cannot be read: {what}; restore the files from a copy",
            path=self.path,
            leaf=keystr,
        )


def _array_read(one: LeafHandle | ArraySlice) -> ArrayRead:
    if isinstance(one, LeafHandle):
        return ArrayRead(one.name, one.locator.info, one.path, None)
    handle = one.handle
    return ArrayRead(handle.name, handle.locator.info, handle.path, handle.locator.stored_box(one.index))


def _check_depth(structure: Structure) -> None:
    """Raise RecursionError at once, because to build branches of so many levels takes quadratic time."""
    if max((len(entry.path) for entry in structure.entries), default=0) > sys.getrecursionlimit():
        raise RecursionError


def open_checkpoint(path: str, open_msgpack: OpenMsgpack | None = None, *, verify: bool = False) -> OrbaxReader:
    """Open a directory and read its structure; see `Backend.open`.

    ``open_msgpack`` opens the msgpack file of old releases."""
    recorded = Checksums(path) if verify else None
    structure = read_structure(path, open_msgpack, None if recorded is None else recorded.check_file)
    try:
        return OrbaxReader(path, structure, recorded)
    except BaseException:
        if structure.aggregate is not None:
            structure.aggregate.reader.close()
        raise


def _may_be_key(handle: LeafHandle) -> bool:
    return handle.dtype == np.uint32 and bool(handle.shape) and handle.shape[-1] in KEY_WIDTHS.values()
