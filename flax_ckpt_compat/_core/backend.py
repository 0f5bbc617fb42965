"""Define the Backend and Reader protocols of a format, and the leaf handle through which every format is read.

A backend only reads and writes its format. Names, overwrite, retention, atomic publishing, policies and errors
about trees live above it."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flax_ckpt_compat._core import array_boxes, progress
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Node, Path, iter_leaves

if TYPE_CHECKING:  # listings of checkpoints do without it
    import numpy as np

    from flax_ckpt_compat._core.object_store.commit import Upload
BATCH_BYTES = 32 * 2**20
_MAX_BATCH = 10_000


class Format(enum.Enum):
    """On-disk format."""

    MSGPACK = "msgpack"
    ORBAX = "orbax"


class LeafKind(enum.Enum):
    """Python type of a restored leaf."""

    ARRAY = "array"
    NUMPY_SCALAR = "numpy scalar"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    COMPLEX = "complex"
    STR = "str"
    BYTES = "bytes"
    PRNG_KEY = "prng key"
    UNSUPPORTED = "unsupported"  # of a type or codec that is not read: asking for its value raises


KIND_OF_NUMBER = {bool: LeafKind.BOOL, int: LeafKind.INT, float: LeafKind.FLOAT, complex: LeafKind.COMPLEX}
# Of Python values that both formats and JSON files hold as themselves.
KIND_OF_TYPE = {**KIND_OF_NUMBER, str: LeafKind.STR}


@dataclasses.dataclass(slots=True, eq=False)
class LeafHandle:
    """One stored leaf, not read yet."""

    path: Path  # key path from the root of the checkpoint
    kind: LeafKind
    shape: tuple[int, ...]  # of the array, or of the key data for a PRNG key; () for everything else
    dtype: np.dtype[Any] | None  # None for Python values
    nbytes: int  # size of the value in memory; 0 if the format does not store it
    stored_name: str | None  # `name`, or None for the key path joined with slashes, which takes more memory
    reader: Reader = dataclasses.field(repr=False)  # open checkpoint that reads `locator`
    locator: Any = dataclasses.field(repr=False)  # private to the backend
    in_gda_folder: bool = False  # in the folder beside the msgpack file (Flax's ``_gda``)
    # Other kinds that the writer's release stored in the same way; the target's leaf decides.
    possible_kinds: frozenset[LeafKind] = frozenset()
    # Of a slice of an array, which is read without the rest of it: start and stop on every axis, within the array and
    # without steps, and the handle of the array.
    index: array_boxes.Box | None = None
    whole: LeafHandle | None = dataclasses.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Return the stored name, in the format's own terms."""
        return "/".join(self.path) if self.stored_name is None else self.stored_name

    @property
    def sharding(self) -> str | None:
        """Return the saved sharding as Orbax's JSON text, or None; read on each access."""
        return self.reader.sharding_of(self)

    def read(self) -> Any:
        """Read the value into writable host memory that the caller owns."""
        return self.reader.read([self])[0]

    def part(self, index: array_boxes.Box | None) -> LeafHandle:
        """Return the handle of a slice within the array, see `index`; this one for None. Slices have no parts."""
        if index is None:
            return self
        assert self.whole is None
        shape, dtype = array_boxes.shape_of(index), self.dtype
        nbytes = 0 if dtype is None else math.prod(shape) * dtype.itemsize
        about = self.stored_name, self.reader, self.locator, self.in_gda_folder, self.possible_kinds
        return LeafHandle(self.path, self.kind, shape, dtype, nbytes, *about, index, self)

    def parts(self, limit: int | None = None) -> Iterator[LeafHandle]:
        """Yield this handle, or of a larger array slices of ``limit`` bytes, or of a chunk that decodes as a whole."""
        limit = limit or BATCH_BYTES
        if self.kind is not LeafKind.ARRAY or self.dtype is None or self.nbytes <= limit:
            yield self
            return
        chunks, has_parts = self.reader.chunks_of(self)
        elements = max(1, limit // self.dtype.itemsize)
        yield from map(self.part, array_boxes.readable_boxes(self.shape, chunks, elements, splits_chunks=has_parts))

    def cut(self, value: Any) -> Any:
        """Copy the slice that this is out of the whole array; return the value itself if this is no slice."""
        from flax_ckpt_compat._core import memory

        if self.index is None:
            return value
        result = memory.empty(self.shape, value.dtype)
        result[...] = value[self.index]
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """Result of `Reader.inspect`."""

    unexpected: tuple[str, ...] = ()  # what belongs to no leaf: paths relative to the checkpoint, with notes
    # Key path of a leaf → how files of the checkpoint contradict each other about it.
    contradictions: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    damaged: tuple[str, ...] = ()  # other damage, such as a file that does not decode


class Reader(Protocol):
    """An open checkpoint. Opening may read small arrays together with the structure; `read` reads the others."""

    format: Format
    location: Location
    tree: Node
    # Arrays go to the devices of the target's; else only those of ``_gda`` folders do, as in Flax.
    places_on_device: bool
    keeps_lists: bool  # stored lists are the caller's own, and stay lists
    meter: progress.Meter = progress.OFF  # counts the bytes that `read` reads

    @property
    def path(self) -> str:
        """Return the path, for errors."""
        return self.location.path

    def read(self, handles: Sequence[LeafHandle], *, mapped: bool = False) -> list[Any]:
        """Read the values of leaves and slices in order; all slices of an array in one call decode its chunks once.

        Arrays are writable, C order and 64-byte aligned; if ``mapped``, large ones may be mappings of a local file."""

    def chunks_of(self, handle: LeafHandle) -> tuple[tuple[int, ...], bool]:
        """Return the shape of the chunks that an array is stored in, and whether parts of one are read without it."""
        return handle.shape, False

    def inspect(self) -> Inspection:
        """Compare the files with each other and with the tree, without reading arrays."""
        return Inspection()

    def sharding_of(self, handle: LeafHandle) -> str | None:  # noqa: ARG002  (readers without shardings inherit it)
        """Return the saved sharding of a leaf as Orbax's JSON text, or None."""
        return None

    def verify_checksums(self, handle: LeafHandle | None = None) -> bool:  # noqa: ARG002  (some readers have none)
        """Check the stored bytes of a leaf, or all that belong to no leaf; return whether checksums are recorded."""
        return False

    def close(self) -> None:
        """Release files. Values that were read stay valid."""
        return


@dataclasses.dataclass(frozen=True, slots=True)
class WriteOptions:
    """Settings of a backend's writer."""

    compression: str | None = None  # a codec of Orbax's format (``zstd``, ``crc32c``)
    checksums: bool = True  # record checksums of what is written
    part_bytes: int | None = None  # of the largest part of an array in a store, which takes several at once
    past_cache: bool = False  # files of arrays are written past the page cache, where their file system can
    meter: progress.Meter = progress.OFF  # counts the bytes that are written, and sent
    # Key path of an array that several processes hold whole → the one that writes it, if that is not process 0.
    writers: Mapping[Path, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One process of a multi-process save."""

    index: int  # from 0; process 0 also writes all that is not distributed
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessSave:
    """The part that one process has in a save of several processes."""

    path: str  # a temporary that all processes see, or, for a save to a store, a local one of its own
    prepared: Any  # of `Backend.prepare`
    options: WriteOptions
    process: ProcessInfo
    upload: Upload | None = None  # of a save to a store


class Backend(Protocol):
    """One format: `prepare`, then `write` to a temporary in the checkpoint's directory, which the caller publishes.

    Several processes take the steps of `begin_multiprocess` and below, with a barrier between them."""

    format: Format
    # Arrays that span processes go into Flax's ``_gda`` folder; process 0 writes all else, sorted maps for lists.
    uses_gda_folder: bool

    def prepare(self, tree: Node, process: ProcessInfo | None = None) -> Any:
        """Validate a tree, plan its storage and return ``prepared`` for the other methods; copy no array data.

        With ``process``, each writes its shards of ``replica_id`` 0 of shared arrays; all else comes from process 0."""

    def write(self, path: str, prepared: Any, options: WriteOptions) -> None:
        """Write the whole checkpoint to a new local file or directory, whose parent exists, and sync it to disk."""

    def begin_multiprocess(self, save: ProcessSave, /) -> None:
        """Create what the others need before they write, such as directories; called in process 0."""

    def write_process_part(self, save: ProcessSave, /) -> None:
        """Write and sync this process's part; for a store, upload it, but what only process 0 holds, at its end."""

    def finish_multiprocess(self, save: ProcessSave, /) -> None:
        """Merge the parts of all processes into one checkpoint and sync it to disk; called in process 0."""

    def open(self, location: Location, *, verify: bool = False) -> Reader:
        """Open a checkpoint and read its structure, by the location's listing, and perhaps small arrays with it.

        With ``verify``, check checksums: of the structure now, of arrays when they are read whole and not mapped."""


def handles_of(reader: Reader) -> list[LeafHandle]:
    """Return all leaves of a tree."""
    return [leaf for _, leaf in iter_leaves(reader.tree) if isinstance(leaf, LeafHandle)]


def batches(handles: Sequence[LeafHandle], limit: int | None = None) -> Iterator[list[LeafHandle]]:
    """Split leaves into batches to be read at once; a large leaf, or all slices of one, are a batch of their own."""
    start = nbytes = 0
    for number, handle in enumerate(handles):
        is_full = nbytes + handle.nbytes > (limit or BATCH_BYTES) or number - start >= _MAX_BATCH
        if number > start and is_full and (handle.whole is None or handle.whole is not handles[number - 1].whole):
            yield list(handles[start:number])
            start, nbytes = number, 0
        nbytes += handle.nbytes
    if handles:
        yield list(handles[start:])


def read_all(wanted: Sequence[LeafHandle], *, mapped: bool = False, meter: progress.Meter = progress.OFF) -> list[Any]:
    """Read leaves and slices in the given order, each with its own reader; the ``meter`` counts what they read."""
    by_reader: dict[Reader, list[int]] = {}
    for number, one in enumerate(wanted):
        by_reader.setdefault(one.reader, []).append(number)
    values: list[Any] = [None] * len(wanted)
    for reader, numbers in by_reader.items():
        if meter.is_on:
            reader.meter = meter
        found = reader.read([wanted[number] for number in numbers], mapped=mapped)
        for number, value in zip(numbers, found, strict=True):
            values[number] = value
    return values
