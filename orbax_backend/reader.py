"""Open Orbax directories: leaves as handles, and their values."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax_ckpt_compat._core import backend, memory
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format, Inspection, LeafHandle, LeafKind, Reader, handles_of
from flax_ckpt_compat._core.errors import CorruptCheckpointError, DepthError, StorageError, UnrecognizedFormatError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Node

from . import stored_names
from .chunk_codecs import RAW, UndecodableChunkError
from .files import corrupt_leaf, list_names, read_json
from .leaf_handles import LeafDescriptions, StoredLeaf
from .open_index import Index, open_index
from .read_arrays import ArrayReader
from .read_plan import ArrayRead, BoxLayout
from .recorded_checksums import Checksums
from .tree_structure import OpenMsgpack, Structure, build_tree, implementations_in
from .zarr import UnsupportedArrayError

_FILES = {*layout.TREE_FILES, *layout.STEP_FILES, stored_names.JAX_KEY_METADATA}
# Releases 0.1 to 0.4.1 have databases in folders of their own, and 0.3.5 its texts.
_NAMES = "|".join(map(re.escape, (layout.MANIFEST, layout.CHECKSUMS, layout.STRINGS)))
_DATABASE = re.compile(rf"(?:.*/)?(?:{_NAMES}|{layout.DATA_DIRECTORY}/{layout.DATA_FILE_PATTERN})", re.DOTALL)
_ARRAY_METADATA = re.compile(rf"{layout.ARRAY_METADATAS}/{stored_names.ARRAY_METADATA_PREFIX}\d+")
_OF_HANDLER = "restore it with the orbax_checkpointer, or newer Orbax, that saved it, or leave it out of the target"


class OrbaxReader(Reader):
    """An open directory; see `flax_ckpt_compat._core.backend.Reader`.

    Arrays up to 4 KiB that are inline in the database and read in one call share aligned blocks of up to 256 KiB.
    """

    format = Format.ORBAX
    places_on_device, keeps_lists = True, False

    def __init__(self, location: Location, open_msgpack: OpenMsgpack, *, verify: bool = False) -> None:
        """Open a directory and read its structure; ``open_msgpack`` opens the msgpack file of old releases."""
        self.location, self._is_closed, path = location.unlisted(), False, location.path
        recorded = self._recorded = Checksums(location) if verify else None
        check = None if recorded is None else recorded.check_file
        with contextlib.ExitStack() as on_failure:
            structure = self._structure = Structure(location, open_msgpack, check, on_failure)
            entries = structure.entries
            names = [entry.name for entry in entries if not entry.skipped and entry.value_type != stored_names.STRING]
            self._index = open_index(location, names, structure.use_ocdbt) if names else Index(location, {})
            self._arrays = ArrayReader(self.location, self._index, structure.fills_missing, recorded)
            try:
                self.tree: Node = build_tree(structure, LeafDescriptions(self, structure, self._index).handles())
            except RecursionError as error:
                raise DepthError(
                    f"{path}: the stored tree is nested too deeply for Python's recursion limit; raise the limit with "
                    "sys.setrecursionlimit",
                    path=path,
                ) from error
            on_failure.pop_all()
        structure.location = self.location  # what is read later is looked up then
        if recorded is not None:
            recorded.location = self.location

    def read(self, handles: Sequence[LeafHandle], *, mapped: bool = False) -> list[Any]:
        """Return the values of handles and slices; see `flax_ckpt_compat._core.backend.Reader.read`."""
        if self._is_closed:
            raise StorageError(f"{self.path}: the checkpoint was closed; open it again", path=self.path)
        values: list[Any] = [None] * len(handles)
        inline: list[tuple[int, StoredLeaf, BoxLayout]] = []  # arrays, or boxes of them, that may be so in the index
        arrays: list[tuple[int, ArrayRead]] = []
        aggregated: list[tuple[int, LeafHandle]] = []
        for number, one in enumerate(handles):
            leaf, box = one.locator, one.index
            if type(leaf) is StoredLeaf:
                parts = leaf.whole if box is None else leaf.layout_of(box)
                if leaf.has_small_chunks and parts.known:
                    inline.append((number, leaf, parts))
                else:
                    arrays.append((number, ArrayRead(one, parts)))
            elif isinstance(leaf, LeafHandle):
                aggregated.append((number, leaf if box is None else leaf.part(box)))
            elif isinstance(leaf, UnsupportedArrayError):
                what = f"it is {leaf}, which this release does not read"
                raise corrupt_leaf(self.path, one.path, what, UnrecognizedFormatError, _OF_HANDLER)
            else:
                values[number] = leaf
        # In a directory or store without a database, each key is looked up.
        with memory.pause_gc(enabled=not self.location.is_remote and self._index.is_database):
            arrays += self._read_inline(handles, inline, values)
        if arrays:
            self._arrays.read([read for _, read in arrays], self.meter, mapped=mapped)
        for number, read in arrays:
            values[number] = self._decoded(handles[number], read.array)
        found = backend.read_all([one for _, one in aggregated], mapped=mapped, meter=self.meter)
        for (number, _), value in zip(aggregated, found, strict=True):
            values[number] = value
        return values

    def chunks_of(self, handle: LeafHandle) -> tuple[tuple[int, ...], bool]:
        """See `flax_ckpt_compat._core.backend.Reader.chunks_of`."""
        leaf = handle.locator
        if isinstance(leaf, LeafHandle):
            return leaf.reader.chunks_of(leaf)
        if not isinstance(leaf, StoredLeaf):
            return super().chunks_of(handle)
        return leaf.info.chunks[: len(leaf.shape)], leaf.info.raw

    def inspect(self) -> Inspection:
        """See `flax_ckpt_compat._core.backend.Reader.inspect`."""
        location, folder, damaged = self.location, self.location / layout.ARRAY_METADATAS, tuple[str, ...]()
        try:
            for file in list_names(folder):
                implementations_in(folder, file)
            read_json(location, layout.SHARDING, self._structure.check)  # which restores do without, with a warning
        except CorruptCheckpointError as error:
            damaged = (str(error),)
        leaves = handles_of(self)
        names = [leaf.name for leaf in leaves if isinstance(leaf.locator, StoredLeaf)]
        lost = f"{layout.ARRAY_METADATAS} does not list it, and alone tells PRNG keys from their data"
        doubtful = [leaf.path for leaf in leaves if LeafKind.PRNG_KEY in leaf.possible_kinds]
        unexpected = [*_strange_files(location, names), *_orphans(self._structure, self._index)]
        return Inspection(tuple(unexpected), dict.fromkeys(doubtful, lost), damaged)

    def verify_checksums(self, handle: LeafHandle | None = None) -> bool:
        """See `flax_ckpt_compat._core.backend.Reader.verify_checksums`."""
        recorded = self._recorded or Checksums(self.location)
        if handle is None:
            return recorded.check_files()
        leaf = handle.locator
        if not isinstance(leaf, StoredLeaf):
            return isinstance(leaf, str) and layout.STRINGS in recorded.intact
        if leaf.info.codec is not None and leaf.info.codec.checksum:
            # Bytes are an array.
            as_stored = dataclasses.replace(handle, kind=LeafKind.ARRAY, shape=leaf.shape, dtype=leaf.dtype)
            for part in as_stored.parts():
                part.read()
            return True
        return recorded.record() is not None and self._arrays.verify(ArrayRead(handle, leaf.whole), recorded)

    def sharding_of(self, handle: LeafHandle) -> str | None:
        """See `flax_ckpt_compat._core.backend.Reader.sharding_of`."""
        return self._structure.shardings.get(handle.name)

    def close(self) -> None:
        """Close the reader; between reads only the msgpack file of old releases is open."""
        self._is_closed = True
        if self._structure.msgpack is not None:
            self._structure.msgpack.close()

    def _read_inline(
        self, handles: Sequence[LeafHandle], inline: Sequence[tuple[int, StoredLeaf, BoxLayout]], values: list[Any]
    ) -> list[tuple[int, ArrayRead]]:
        """Copy what is inline in the index to new memory, alike ones together; return the others, to be read."""
        others, alike = list[tuple[int, ArrayRead]](), dict[BoxLayout, tuple[StoredLeaf, list[int], list[bytes]]]()
        find = self._index.find
        for number, leaf, parts in inline:
            prefix = stored_names.key_prefix(handles[number].name)
            pieces = [_inline(leaf, find(prefix + part.key)) for part in parts.known or ()]
            if None in pieces:
                others.append((number, ArrayRead(handles[number], parts)))
                continue
            _, numbers, chunks = alike.setdefault(parts, (leaf, [], []))
            numbers.append(number)
            chunks.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        for parts, (leaf, numbers, chunks) in alike.items():
            copies, dtype = [(part.source, part.target) for part in parts.parts], parts.info.dtype
            packed = memory.pack_chunks(chunks, parts.shape, dtype, parts.info.chunks, copies)
            for number, array in zip(numbers, packed, strict=True):
                values[number] = array if leaf.is_plain else self._decoded(handles[number], array)
        return others

    def _decoded(self, handle: LeafHandle, array: Any) -> Any:
        if handle.locator.is_plain:
            return array
        try:
            return handle.locator.decode(array)
        except ValueError as error:
            raise corrupt_leaf(self.path, handle.path, f"its text is not UTF-8 ({error})") from error


def _inline(leaf: StoredLeaf, value: Any) -> Any:
    """Return the data of a chunk if all of it is inline, and intact: `ArrayReader` names a damaged one."""
    if type(value) is not bytes:
        return None
    if leaf.info.codec is RAW:
        return value if len(value) == leaf.chunk_nbytes else None
    with contextlib.suppress(UndecodableChunkError):
        return leaf.info.decode(value)
    return None


def _strange_files(location: Location, names: Iterable[str]) -> Iterator[str]:
    """Yield the files that are not part of the format, nor below the name of an array."""
    prefixes = set(map(stored_names.key_prefix, names))
    for file in sorted(location.files_below()):
        ends = [0, *(match.end() for match in re.finditer("/", file))]
        is_known = file in _FILES or _DATABASE.fullmatch(file) or _ARRAY_METADATA.fullmatch(file)
        if not is_known and prefixes.isdisjoint([file[:end] for end in ends]):
            yield file


def _orphans(structure: Structure, index: Index) -> Iterator[str]:
    """Yield the arrays of the database that no leaf refers to."""
    known = {stored_names.key_prefix(entry.name).encode() for entry in structure.entries}
    for key in index.entries:
        for name in layout.ARRAY_METADATA_FILES:
            if key.endswith(name.encode()) and key[: -len(name)] not in known:
                yield f"{key.decode('utf-8', 'replace').removesuffix('/' + name)} (an array of no leaf)"
