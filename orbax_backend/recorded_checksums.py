"""Read and check the checksum file beside a database: of its chunks and of the JSON files, one file per process.

    bytes     msgpack of {version, algorithm, block_bytes, data_files, chunks, files}, then their CRC-32 (zlib's)
    chunks    key → checksums of the blocks of the stored chunk
    files     path relative to the checkpoint → [size, CRC-32 (zlib's) of its blocks]

Chunks in the nodes of the database have none, nor those with a codec: both hold checksums of their own. Chunks in
other files than ``data_files`` were written later by somebody else, and files of another size were edited: unverified.
So are blocks of a chunk that are not read at once.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Mapping

import msgpack  # type: ignore[import-untyped]

from flax_ckpt_compat._core import array_boxes, checksums
from flax_ckpt_compat._core.array_boxes import Shape
from flax_ckpt_compat._core.byte_reads import Run
from flax_ckpt_compat._core.checksums import BLOCK_BYTES, SUM_BYTES, Crc
from flax_ckpt_compat._core.errors import ChecksumError
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import CHECKSUMS, DATA_DIRECTORY, MANIFEST
from flax_ckpt_compat._core.tree import show_path

from .files import ByteRange, corrupt
from .open_index import StoredValue, process_databases
from .read_plan import ArrayRead

_VERSION = 1


@dataclasses.dataclass(slots=True)
class Record:
    """The content of one file of checksums; see the module."""

    data_files: frozenset[str] = frozenset()
    algorithm: str = checksums.ALGORITHM  # of the chunks
    chunks: dict[str, bytes] = dataclasses.field(default_factory=dict)
    files: dict[str, tuple[int, bytes]] = dataclasses.field(default_factory=dict)

    def add_files(self, path: str, contents: Mapping[str, bytes]) -> None:
        """Add files of the checkpoint at ``path``: full path → content."""
        for file, data in contents.items():
            # Manifests end with their own CRC-32C, so that those of all are the same: they have zlib's CRC-32.
            self.files[os.path.relpath(file, path)] = len(data), checksums.of_blocks(data, zlib.crc32)

    def encode(self) -> bytes:
        """Return the content of the file."""
        content = {
            "version": _VERSION,
            "algorithm": self.algorithm,
            "block_bytes": checksums.BLOCK_BYTES,
            "data_files": sorted(self.data_files),
            "chunks": self.chunks,
            "files": self.files,
        }
        data: bytes = msgpack.packb(content)
        return data + checksums.encode(zlib.crc32(data))


def file_of_database(record: Record, folder: str, path: str) -> dict[str, bytes]:
    """Complete the record of a finished database's chunks with what lies in its folder; return full path → content."""
    data, manifest = os.path.join(folder, DATA_DIRECTORY), os.path.join(folder, MANIFEST)
    record.data_files = frozenset(os.listdir(data) if presence.isdir(data) else ())
    if presence.lexists(manifest):
        with open(manifest, "rb") as file:
            record.add_files(path, {manifest: file.read()})
    return {os.path.join(folder, CHECKSUMS): record.encode()}


def _decode(data: bytes) -> Record | None:
    """Return the content of the file, None of a later version; raise ValueError if it is damaged."""
    body, end = data[: -checksums.SUM_BYTES], data[-checksums.SUM_BYTES :]
    if not body or checksums.encode(zlib.crc32(body)) != end:
        raise ValueError("it does not have its own checksum")
    found = msgpack.unpackb(body)
    algorithm = found["algorithm"]
    if (found["version"], found["block_bytes"]) != (_VERSION, checksums.BLOCK_BYTES) or algorithm not in checksums.CRCS:
        return None
    files = {str(name): (int(size), sums) for name, (size, sums) in found["files"].items()}
    if not all(type(sums) is bytes for sums in [*found["chunks"].values(), *(sums for _, sums in files.values())]):
        raise TypeError("checksums are bytes")
    return Record(frozenset(found["data_files"]), algorithm, dict(found["chunks"]), files)


class Checksums:
    """The recorded checksums of an open checkpoint; each file of them is read on first use."""

    def __init__(self, location: Location) -> None:
        self.location, self.intact = location, set[str]()  # directory of the checkpoint; files that were checked
        self._records: dict[str, Record | None] = {}

    def record(self, folder: str = "") -> Record | None:
        """Return what is recorded beside a database, in a folder with its slash; None for nothing."""
        if folder not in self._records:
            self._records[folder] = self._read(self.location / (folder + CHECKSUMS))
        return self._records[folder]

    def of_chunk(self, key: str, value: StoredValue | None) -> tuple[bytes, Crc] | None:
        """Return the checksums of a chunk, by its key and place, and their function; None if none are recorded."""
        # Stores are not asked for the file of each process if there is none of the whole checkpoint.
        if not isinstance(value, ByteRange) or self.record() is None:
            return None
        folder, slash, name = value.file.rpartition(f"{DATA_DIRECTORY}/")
        record = self.record(folder) if slash else None
        if record is None or name not in record.data_files or key not in record.chunks:
            return None
        return record.chunks[key], checksums.CRCS[record.algorithm]

    def check_files(self) -> bool:
        """Check all files that have checksums; return whether there are any, and all could be checked."""
        found = list[bool]()
        for folder in ["", *(f"{name}/" for name in process_databases(self.location))]:
            for name in getattr(self.record(folder), "files", ()):
                if not presence.stays_inside(name):  # links are followed: the bytes are only summed
                    raise corrupt(self.location, f"its checksums name {name!r:.300}, which lies outside of it")
                found.append((file := self.location / name).isfile() and self.check_file(name, file.read(), folder))
        return bool(found) and all(found)

    def check_file(self, name: str, data: bytes, folder: str = "") -> bool:
        """Check the content of a file, by its path in the checkpoint; return whether that was possible.

        Raise ChecksumError if it has the recorded size and another checksum; of another size, it was edited."""
        record = self.record(folder)
        if record is None or name not in record.files or record.files[name][0] != len(data):
            return False
        found = checksums.of_blocks(data, zlib.crc32)
        _check((self.location / name).path, "the file", record.files[name][1], found)
        self.intact.add(name)
        return True

    def _read(self, file: Location) -> Record | None:
        if not file.isfile():
            return None
        data = file.read()
        try:
            return _decode(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, msgpack.UnpackException) as error:
            raise ChecksumError(
                f"{file}: the checksums of the checkpoint do not decode: {error}; restore the file from a backup. The "
                "checkpoint may be whole: without this file, or in config.override(checksums='off'), it opens",
                path=file.path,
            ) from error


# Place of a chunk → a read that needs it, its key and start in the array, and its checksums and their function.
Expected = dict[ByteRange, tuple[ArrayRead, str, Shape, bytes, Crc]]


def check_blocks(expected: Expected, run: Run, data: memoryview) -> None:
    """Check the blocks of chunks that are in a run, whose bytes are ``data``."""
    for chunk in {read.content.within for read in run.reads} & expected.keys():
        read, key, start, sums, crc = expected[chunk]
        # All places are counted from the start of the chunk; the run may begin before it, and end behind it.
        at, stop = run.start - chunk.offset, min(run.stop - chunk.offset, chunk.length)
        for number in range(-(-max(at, 0) // BLOCK_BYTES), -(-stop // BLOCK_BYTES)):
            begin, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, chunk.length)
            if end > stop != _data_end(read, start):  # a part of the block was not read, and is not only zeros
                break
            found = crc(bytes(max(end - stop, 0)), crc(data[begin - at : min(end, stop) - at]))
            place, leaf = SUM_BYTES * number, show_path(read.path)
            actual = sums[:place] + checksums.encode(found) + sums[place + SUM_BYTES :]
            _check(read.folder, f"the chunk {key!r} of the leaf {leaf!r}", sums, actual, leaf)


def _data_end(read: ArrayRead, start: Shape) -> int:
    """Return how many bytes of a chunk are before the last zeros, with which zarr fills it at the edge of an array."""
    info = read.info
    sides = zip(info.chunks, info.shape, start, strict=True)
    last = [min(chunk, length - at) - 1 for chunk, length, at in sides]
    return (array_boxes.offset(info.chunks, tuple(slice(at, at + 1) for at in last)) + 1) * info.dtype.itemsize


def _check(path: str, what: str, expected: bytes, found: bytes, leaf: str | None = None) -> None:
    """Raise ChecksumError unless the checksums of blocks are equal; ``what`` was summed, such as "the file"."""
    if expected == found:
        return
    starts = range(0, max(len(expected), len(found)), SUM_BYTES)
    block = next(at for at in starts if expected[at : at + SUM_BYTES] != found[at : at + SUM_BYTES])
    old, new = (sums[block : block + SUM_BYTES][::-1].hex() or "none" for sums in (expected, found))
    raise ChecksumError(
        f"{path}: {what} is not what was saved: the checksum of block {block // SUM_BYTES} (of {BLOCK_BYTES} bytes) "
        f"was expected to be {old}, found {new}; restore the files from a backup, or restore an older step. To read it "
        f"as it is, use config.override(checksums='off')",
        path=path,
        leaf=leaf,
    )
