"""Compare the files of a directory with its tree: what belongs to no leaf."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Inspection, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import Location

from .decode_leaves import StoredLeaf
from .files import list_names, read_json
from .open_index import Index
from .tree_structure import Structure, implementations_in

_FILES = {*layout.TREE_FILES, *layout.STEP_FILES, layout.JAX_KEY_METADATA}
# Releases 0.1 to 0.4.1 have databases in folders of their own, and 0.3.5 its texts.
_NAMES = "|".join(map(re.escape, (layout.MANIFEST, layout.CHECKSUMS, layout.STRINGS)))
_DATABASE = re.compile(rf"(?:.*/)?(?:{_NAMES}|{layout.DATA_DIRECTORY}/{layout.DATA_FILE_PATTERN})", re.DOTALL)
_ARRAY_METADATA = re.compile(rf"{layout.ARRAY_METADATAS}/{layout.ARRAY_METADATA_PREFIX}\d+")


def inspect(location: Location, structure: Structure, index: Index | None, leaves: Sequence[LeafHandle]) -> Inspection:
    """Compare the files in a directory with its leaves."""
    damaged: tuple[str, ...] = ()
    try:
        for file in list_names(location / layout.ARRAY_METADATAS):
            implementations_in(location / layout.ARRAY_METADATAS, file)
        read_json(location, layout.SHARDING, structure.check)  # which restores do without, with a warning
    except CorruptCheckpointError as error:
        damaged = (str(error),)
    names = [leaf.name for leaf in leaves if isinstance(leaf.locator, StoredLeaf)]
    lost = f"{layout.ARRAY_METADATAS} does not list it, and alone tells PRNG keys from their data"
    doubtful = [leaf.path for leaf in leaves if LeafKind.PRNG_KEY in leaf.possible_kinds]
    unexpected = [*_strange_files(location, names), *_orphans(structure, index)]
    return Inspection(tuple(unexpected), dict.fromkeys(doubtful, lost), damaged)


def _strange_files(location: Location, names: Iterable[str]) -> Iterator[str]:
    """Yield the files that are not part of the format, nor below the name of an array."""
    prefixes = set(map(layout.key_prefix, names))
    for file in sorted(location.files_below()):
        ends = [0, *(match.end() for match in re.finditer("/", file))]
        is_known = file in _FILES or _DATABASE.fullmatch(file) or _ARRAY_METADATA.fullmatch(file)
        if not is_known and prefixes.isdisjoint([file[:end] for end in ends]):
            yield file


def _orphans(structure: Structure, index: Index | None) -> Iterator[str]:
    """Yield the arrays of the database that no leaf refers to."""
    known = {layout.key_prefix(entry.name).encode() for entry in structure.entries}
    for key in index.keys() if index is not None else ():
        for name in layout.ARRAY_METADATA_FILES:
            if key.endswith(name.encode()) and key[: -len(name)] not in known:
                yield f"{key.decode('utf-8', 'replace').removesuffix('/' + name)} (an array of no leaf)"
