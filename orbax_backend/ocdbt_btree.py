"""Read the keys of an OCDBT database: its manifest, then its B-tree, level by level."""

from __future__ import annotations

import os
from collections.abc import Callable

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.object_store import client
from flax_ckpt_compat._core.orbax_layout import MANIFEST

from .codecs import MAX_DECODED_BYTES, UndecodableError
from .ocdbt import NodeRef, decode_node, newest_root, open_manifest
from .sources import read_range, sizes_of
from .stored_values import ByteRange, refuse_escape

# Manifests list at most a few hundred versions.
_MAX_MANIFEST_BYTES = 64 << 20
Entries = dict[bytes, bytes | ByteRange]


class BTree:
    """The B-tree of the newest version of a database."""

    def __init__(self, path: str, locate: Callable[[str], str] | None = None) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            path: directory of the database.
            locate: returns the full path of a file by its name, if not all are in ``path``.
        """
        self._path = path
        self._locate = locate or (lambda file: os.path.join(path, file))
        self._seen: set[ByteRange] = set()

    def entries(self) -> Entries:
        """Return every key with its value or byte range.

        Raises:
            CorruptCheckpointError: the manifest or a node does not decode, or refers to a file outside the directory.
            UndecodableError: only TensorStore's own driver can read the database.
            OSError, StorageError: the system, or the store, refused.
        """
        found: Entries = {}
        level = self._roots()
        while level:
            below: list[NodeRef] = []
            for node, data in zip(level, self._read(level), strict=True):
                children, entries = self._decode(node, data)
                below += children
                found |= entries
            level = below
        for file in {value.file for value in found.values() if isinstance(value, ByteRange)}:
            refuse_escape(file, self._path)
        return found

    def _roots(self) -> list[NodeRef]:
        file = self._locate(MANIFEST)
        data = read_range(file, 0, _MAX_MANIFEST_BYTES) if not paths.is_url(file) else client.read(file)
        try:
            config = open_manifest(data)
            if config.numbered:
                raise UndecodableError("its versions are in files of their own")
            root = newest_root(config)
        except ValueError as error:
            raise self._corrupt(MANIFEST, "", error) from error
        return [] if root is None else [root]

    def _read(self, nodes: list[NodeRef]) -> list[bytes]:
        """Read the nodes of one level, concurrently from a store."""
        for node in nodes:
            refuse_escape(node.extent.file, self._path)
            if node.extent in self._seen:
                # Forty levels of shared nodes would make a tree of 2**40 keys.
                raise self._corrupt_node(node, ValueError("one parent of the B-tree node was expected, found two"))
            self._seen.add(node.extent)
        self._check_lengths(nodes)
        found: dict[str, bytes] = {}

        def read(number: str) -> None:
            found[number] = self._read_one(nodes[int(number)])

        numbers = [str(number) for number in range(len(nodes))]
        if len(nodes) > 1 and paths.is_url(self._path):
            client.in_parallel(read, numbers)
        else:
            for number in numbers:
                read(number)
        return [found[number] for number in numbers]

    def _check_lengths(self, nodes: list[NodeRef]) -> None:
        """Check that local files contain the nodes, before memory is allocated."""
        files = list(dict.fromkeys(node.extent.file for node in nodes))
        local = [file for file in files if not paths.is_url(self._locate(file))]
        sizes = dict(zip(local, sizes_of([self._locate(file) for file in local]), strict=True))
        for node in nodes:
            size, end = sizes.get(node.extent.file), node.extent.offset + node.extent.length
            if node.extent.length > MAX_DECODED_BYTES:
                problem = f"at most {MAX_DECODED_BYTES} bytes were expected, found {node.extent.length}"
                raise self._corrupt_node(node, ValueError(problem))
            if isinstance(size, int) and end > size:
                problem = f"a file of at least {end} bytes was expected, found one of {size}"
                raise self._corrupt_node(node, ValueError(problem))

    def _read_one(self, node: NodeRef) -> bytes:
        extent = node.extent
        file = self._locate(extent.file)
        try:
            data = read_range(file, extent.offset, extent.offset + extent.length)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"{file}: the file is missing, which is a part of the array database; restore it from a copy",
                path=file,
            ) from error
        if len(data) != extent.length:
            raise self._corrupt_node(node, ValueError(f"{extent.length} bytes were expected, found {len(data)}"))
        return data

    def _decode(self, node: NodeRef, data: bytes) -> tuple[list[NodeRef], Entries]:
        try:
            return decode_node(data, node)
        except ValueError as error:
            raise self._corrupt_node(node, error) from error

    def _corrupt_node(self, node: NodeRef, error: ValueError) -> CorruptCheckpointError:
        return self._corrupt(node.extent.file, f" at byte {node.extent.offset}", error)

    def _corrupt(self, file: str, at: str, error: ValueError) -> CorruptCheckpointError:
        full = self._locate(file)
        return CorruptCheckpointError(
            f"{full}: the array database does not decode{at}: {error}; restore the files from a copy", path=full
        )
