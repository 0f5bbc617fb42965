"""Read the keys of an OCDBT database: its manifest, then its B-tree, level by level.

We decode them ourselves, in `ocdbt_nodes`: TensorStore's own ``ocdbt.dump`` leaks every object that it returns (0.1.86,
measured), and its key-value store does not tell where values lie.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import MANIFEST
from flax_ckpt_compat._core.thread_pools import in_parallel

from .files import AT_ONCE, ByteRange, CheckpointFiles, corrupt, list_names, read_existing, sizes_of
from .ocdbt_nodes import (
    MAX_DECODED_BYTES,
    Entries,
    MemoryBudget,
    NodeRef,
    NumberedError,
    children_of,
    entries_of,
    newest_root,
    open_node,
)

# Manifests list at most a few hundred versions.
_MAX_MANIFEST_BYTES = 64 << 20
_NUMBERED_MANIFEST = re.compile(r"manifest\.[0-9a-f]{16}")


def read_entries(location: Location, base: str = "", locate: Callable[[str], Location] | None = None) -> Entries:
    """Return every key of the newest version of a database, with its value or byte range.

    ``base`` is its directory in the checkpoint's, with its slash. Of files that are elsewhere, ``locate`` returns
    the location by the name."""
    return _Database(location, base, locate).entries()


class _Database:
    def __init__(self, location: Location, base: str, locate: Callable[[str], Location] | None) -> None:
        self._location, self._base = location, base
        self._locate = locate or location.__truediv__
        self._files, self._budget = CheckpointFiles(location), MemoryBudget()
        self._seen: set[ByteRange] = set()

    def entries(self) -> Entries:
        """Read all nodes; check that values are in regular files of the checkpoint."""
        found: Entries = {}
        level = self._roots()
        while level:
            below: list[NodeRef] = []
            for node, data in zip(level, self._read(level), strict=True):
                with self._decoding(node):
                    self._budget.grow(len(data))
                    columns, files = open_node(data, node, self._budget)
                    if node.height:
                        below += children_of(columns, files, node)
                    else:
                        found |= entries_of(columns, files, node.prefix)
            level = below
        for file in {value.file for value in found.values() if type(value) is ByteRange}:
            self._files.check(file)
        return found

    @contextlib.contextmanager
    def _decoding(self, node: NodeRef) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise self._corrupt_node(node, error) from error

    def _roots(self, manifest: str = MANIFEST) -> list[NodeRef]:
        name = self._base + manifest
        file = self._locate(name)
        self._files.check(name)
        data = read_existing(file, 0, None if file.is_remote else _MAX_MANIFEST_BYTES, _missing(file))
        try:
            root = newest_root(data, self._base, self._budget)
        except NumberedError as error:
            names = list_names(self._locate(self._base.rstrip("/"))) if manifest == MANIFEST else []
            numbered = list(filter(_NUMBERED_MANIFEST.fullmatch, names))
            if not numbered:
                raise self._corrupt(name, "", "its versions are missing") from error
            return self._roots(max(numbered))
        except ValueError as error:
            raise self._corrupt(name, "", error) from error
        return [] if root is None else [root]

    def _read(self, nodes: list[NodeRef]) -> list[bytes]:
        """Read the nodes of one level, concurrently from a store."""
        for node in nodes:
            self._files.check(node.extent.file)
            if node.extent in self._seen:
                # Forty levels of shared nodes would make a tree of 2**40 keys.
                raise self._corrupt_node(node, "one parent of the B-tree node was expected, found two")
            self._seen.add(node.extent)
        self._check_lengths(nodes)
        return in_parallel(self._read_one, nodes, AT_ONCE if self._location.is_remote else 1)

    def _check_lengths(self, nodes: list[NodeRef]) -> None:
        """Check that local files contain the nodes, before memory is allocated."""
        files = {node.extent.file: self._locate(node.extent.file) for node in nodes}
        sizes = sizes_of([full for full in files.values() if not full.is_remote])
        for node in nodes:
            file, offset, length = node.extent
            size = sizes.get(files[file])
            if length > MAX_DECODED_BYTES:
                problem = f"at most {MAX_DECODED_BYTES} bytes were expected, found {length}"
                raise self._corrupt_node(node, problem)
            if isinstance(size, int) and offset + length > size:
                problem = f"a file of at least {offset + length} bytes was expected, found one of {size}"
                raise self._corrupt_node(node, problem)

    def _read_one(self, node: NodeRef) -> bytes:
        file = self._locate(node.extent.file)
        _, offset, length = node.extent
        data = read_existing(file, offset, offset + length, _missing(file))
        if len(data) != length:
            raise self._corrupt_node(node, f"{length} bytes were expected, found {len(data)}")
        return data

    def _corrupt_node(self, node: NodeRef, problem: object) -> CorruptCheckpointError:
        return self._corrupt(node.extent.file, f" at byte {node.extent.offset}", problem)

    def _corrupt(self, file: str, at: str, problem: object) -> CorruptCheckpointError:
        what = f"the array database does not decode{at}: {problem}"
        return corrupt(self._locate(file), what, "restore the files from a backup")


def _missing(file: Location) -> CorruptCheckpointError:
    return corrupt(file, "this file of the array database is missing", "restore it from a backup")
