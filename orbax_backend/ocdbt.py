"""Read the keys of an OCDBT database: its manifest, then its B-tree, level by level.

We decode them ourselves, in `ocdbt_nodes`: TensorStore's own ``ocdbt.dump`` leaks every object that it returns (0.1.86,
measured), and its key-value store does not tell where values lie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import MANIFEST
from flax_ckpt_compat._core.thread_pools import in_parallel

from .files import AT_ONCE, ByteRange, CheckpointFiles, corrupt, read_existing
from .ocdbt_nodes import MAX_DECODED_BYTES, Entries, NodeRef, children_of, entries_of, newest_root


def read_entries(location: Location, base: str = "") -> Entries:
    """Return every key of the newest version of a database, with its value or byte range.

    ``base`` is its directory in the checkpoint's, with its slash."""
    database, found = _Database(location, base), Entries()
    level = database.roots()
    while level:
        below: list[NodeRef] = []
        for node, data in zip(level, database.read(level), strict=True):
            with database.decoding(node.extent.file, node.extent.offset):
                if len(data) != node.extent.length:
                    raise ValueError(f"{node.extent.length} bytes were expected, found {len(data)}")
                if node.height:
                    below += children_of(data, node)
                else:
                    found |= entries_of(data, node)
        level = below
    for file in {value.file for value in found.values() if type(value) is ByteRange}:
        database.files.check(file)
    return found


class _Database:
    def __init__(self, location: Location, base: str) -> None:
        self.files, self._location, self._base = CheckpointFiles(location), location, base
        self._at_once = AT_ONCE if location.is_remote else 1
        self._seen: set[ByteRange] = set()

    def roots(self) -> list[NodeRef]:
        """Return the root of the newest version; none where that has no keys."""
        manifest = self._base + MANIFEST
        data = self._read(manifest, 0, None)
        with self.decoding(manifest):
            return newest_root(data, self._base)

    def read(self, nodes: list[NodeRef]) -> list[bytes]:
        """Read the nodes of one level, concurrently from a store."""
        for node in nodes:
            with self.decoding(node.extent.file, node.extent.offset):
                if node.extent in self._seen:  # forty levels of shared nodes would make a tree of 2**40 keys
                    raise ValueError("one parent of the B-tree node was expected, found two")
                if node.extent.length > MAX_DECODED_BYTES:
                    raise ValueError(f"at most {MAX_DECODED_BYTES} bytes were expected, found {node.extent.length}")
            self._seen.add(node.extent)
        places = [(file, start, start + length) for file, start, length in (node.extent for node in nodes)]
        return in_parallel(lambda place: self._read(*place), places, self._at_once)

    def _read(self, name: str, start: int, stop: int | None) -> bytes:
        """Read a part of a file, or less where it ends before."""
        self.files.check(name)
        file = self._location / name
        missing = corrupt(file, "this file of the array database is missing", "restore it from a backup")
        return read_existing(file, start, stop, missing)

    @contextlib.contextmanager
    def decoding(self, file: str, offset: int = 0) -> Iterator[None]:
        """Name the file, and the place in it, of what does not decode."""
        try:
            yield
        except ValueError as error:
            what = f"the array database does not decode at byte {offset}: {error}"
            raise corrupt(self._location / file, what, "restore the files from a backup") from error
