"""Compare the files of a directory with its tree: what belongs to no leaf, and what contradicts the arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Inspection
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Path

from .decode_leaves import may_be_key_data
from .files import list_names, read_json
from .open_index import Index
from .tree_structure import Structure, arrays_listed, is_unlisted
from .zarr import ArrayInfo

_FILES = {
    layout.COMMIT_FILE,
    layout.JAX_KEY_METADATA,
    layout.MSGPACK_FILE,
    layout.SHARDING,
    layout.STEP_METADATA,
    layout.STRINGS,
    layout.TREE_METADATA,
    layout.V1_MARKER,
}
# Releases 0.1 to 0.4.1 have databases in folders of their own, and 0.3.5 its texts.
_NAMES = "|".join(map(re.escape, (layout.MANIFEST, layout.CHECKSUMS, layout.STRINGS)))
_DATABASE = re.compile(rf"(?:.*/)?(?:{_NAMES}|{layout.DATA_DIRECTORY}/{layout.DATA_FILE_PATTERN})", re.DOTALL)
_ARRAY_METADATA = re.compile(rf"{layout.ARRAY_METADATAS}/{layout.ARRAY_METADATA_PREFIX}\d+")


def inspect(
    location: Location, structure: Structure, index: Index | None, infos: Mapping[str, ArrayInfo]
) -> Inspection:
    """Compare the files in a directory; ``infos`` is stored name → metadata of every array."""
    damaged, contradictions = [], {}
    try:
        contradictions = dict(_contradictions(location, structure, infos))
        read_json(location, layout.SHARDING, structure.check)  # which restores do without, with a warning
    except CorruptCheckpointError as error:
        damaged.append(str(error))
    unexpected = [*_strange_files(location, infos), *_orphans(structure, index)]
    return Inspection(tuple(unexpected), contradictions, tuple(damaged))


def _strange_files(location: Location, infos: Mapping[str, ArrayInfo]) -> Iterator[str]:
    """Yield the files that are not part of the format, and chunk files outside of their arrays' grids."""
    arrays = {layout.key_prefix(name): info for name, info in infos.items()}
    for file in sorted(location.files_below()):
        if file in _FILES or _DATABASE.fullmatch(file) or _ARRAY_METADATA.fullmatch(file):
            continue
        if not any(_is_part(arrays[prefix], file[len(prefix) :]) for prefix in _prefixes(file) if prefix in arrays):
            yield file


def _prefixes(file: str) -> Iterator[str]:
    yield ""
    for match in re.finditer("/", file):
        yield file[: match.end()]


def _is_part(info: ArrayInfo, key: str) -> bool:
    """Return whether a key below an array's prefix is its metadata or one of its chunks."""
    if key in layout.ARRAY_METADATA_FILES:
        return True
    parts = key.split(info.separator)
    if info.prefix and parts.pop(0) != info.prefix:
        return False
    if not info.shape:
        return parts in ([], ["0"])
    counts = [-(-length // chunk) for length, chunk in zip(info.shape, info.chunks, strict=True)]
    numbers = [int(part) if part.isdecimal() and len(part) < 20 else -1 for part in parts]
    return len(numbers) == len(counts) and all(0 <= at < n for at, n in zip(numbers, counts, strict=True))


def _orphans(structure: Structure, index: Index | None) -> Iterator[str]:
    """Yield the arrays of the database that no leaf refers to."""
    known = {layout.key_prefix(entry.name).encode() for entry in structure.entries}
    for key in index.keys() if index is not None else ():
        for name in layout.ARRAY_METADATA_FILES:
            if key.endswith(name.encode()) and key[: -len(name)] not in known:
                yield f"{key.decode('utf-8', 'replace').removesuffix('/' + name)} (an array of no leaf)"


def _contradictions(
    location: Location, structure: Structure, infos: Mapping[str, ArrayInfo]
) -> Iterator[tuple[Path, str]]:
    """Yield key path and problem of leaves whose shapes in JSON files do not fit their array."""
    listed = _listed(location / layout.ARRAY_METADATAS)
    for entry in structure.entries:
        info = infos.get(entry.name)
        if info is None:
            continue
        if is_unlisted(structure, entry) and may_be_key_data(info.dtype, info.shape):
            yield entry.path, f"{layout.ARRAY_METADATAS} does not list it, and alone tells PRNG keys from their data"
        if entry.write_shape is not None and not _fits(entry.write_shape, info):
            yield entry.path, _problem(f"the write_shape {entry.write_shape} in {layout.TREE_METADATA}", info)
        for file, chunks in listed.get(entry.name, ()):
            if chunks is not None and chunks != list(info.chunks):
                yield entry.path, _problem(f"the chunk_shape {chunks} in {layout.ARRAY_METADATAS}/{file}", info)


def _fits(write_shape: object, info: ArrayInfo) -> bool:
    """Return whether what was written at once is a part of the array, and at least a chunk."""
    if not isinstance(write_shape, list) or len(write_shape) != len(info.shape):
        return False
    sides = zip(info.chunks, write_shape, info.shape, strict=True)
    return all(type(side) is int and chunk <= max(1, side) and side <= length for chunk, side, length in sides)


def _problem(what: str, info: ArrayInfo) -> str:
    array = f"{info.dtype.name}{list(info.shape)} in chunks of {list(info.chunks)}"
    return f"{what} contradicts the stored array, {array}; restore the files from a backup"


def _listed(folder: Location) -> Mapping[str, Sequence[tuple[str, object]]]:
    """Return stored name → every file that lists it, and the chunk shape that it gives."""
    found: dict[str, list[tuple[str, object]]] = {}
    for file in list_names(folder):
        for name, chunks, _ in arrays_listed(folder, file):
            found.setdefault(name, []).append((file, chunks))
    return found
