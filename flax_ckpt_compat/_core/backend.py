"""What a format has to offer, and the leaf handle through which everything above reads both formats.

A backend only probes, reads and writes its format. Names, overwrite, retention, atomic publishing,
policies and errors about trees live above it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload
from flax_ckpt_compat._core.tree import Node, Path


class Format(enum.Enum):
    """The on-disk formats."""

    MSGPACK = "msgpack"
    ORBAX = "orbax"


class LeafKind(enum.Enum):
    """The Python type that a stored leaf comes back as."""

    ARRAY = "array"
    NUMPY_SCALAR = "numpy scalar"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    COMPLEX = "complex"
    STR = "str"
    BYTES = "bytes"
    PRNG_KEY = "prng key"


@dataclasses.dataclass(slots=True, eq=False)
class LeafHandle:
    """One stored leaf, known but not read.

    Attributes:
        path: its key path from the root of the checkpoint.
        kind: the Python type it comes back as.
        shape: of the array; of the key data for a PRNG key; () for everything else.
        dtype: of the array, numpy scalar or key data; None for Python values.
        nbytes: size of the value in memory, in bytes (0 where the format does not tell without reading).
        name: the name it is stored under, in the format's own terms.
        reader: whose `read` understands `locator`.
        locator: private to the backend.
        may_be: other kinds that the writer's release stored in just this way; a target's leaf of one of them decides.
        in_gda_folder: saved from several processes into a folder of its own beside the msgpack file (Flax's ``_gda``).
    """

    path: Path
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    nbytes: int
    name: str
    reader: Reader = dataclasses.field(repr=False)
    locator: Any = dataclasses.field(repr=False)
    in_gda_folder: bool = False
    possible_kinds: frozenset[LeafKind] = frozenset()

    @property
    def sharding(self) -> str | None:
        """The sharding as saved, in Orbax's JSON text, or None; looked up when asked for."""
        return self.reader.sharding_of(self.name)

    def read(self) -> Any:
        """The value, in host memory that the caller owns and may write to."""
        return self.reader.read([self])[0]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ArraySlice:
    """A box of a stored array, to be read without the rest of it.

    Attributes:
        handle: of an array.
        index: start and stop on every axis, within the array and without steps.
    """

    handle: LeafHandle
    index: tuple[slice, ...]

    def cut(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The box of the whole array, in memory of its own."""
        box = value[self.index]
        result = memory.empty(box.shape, box.dtype)
        result[...] = box
        return result


class Reader(Protocol):
    """An open checkpoint. Opening read no array data."""

    format: Format
    path: str
    tree: Node

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:
        """The values of these handles and parts, in their order; large ones are read in parallel.

        Several parts of one array are asked for together, so that no stored chunk is decoded twice.

        Args:
            handles: what is wanted.
            mapped: large arrays that lie in a local file as they are may be private mappings of it, at any address.

        Returns:
            ``np.ndarray`` (writable, C order, own memory, 64-byte aligned unless mapped), numpy or Python scalars, str,
            bytes, or `KeyData` for a PRNG key.

        Raises:
            CorruptCheckpointError: bytes are missing, truncated or do not decode; names the leaf.
            StorageError: the file system refused.
        """
        ...

    def sharding_of(self, name: str) -> str | None:
        """The sharding that the leaf of this name was saved with, in Orbax's JSON text, or None."""
        ...

    def close(self) -> None:
        """Releases files. Values read before stay valid."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class WriteOptions:
    """Settings that reach a backend's writer.

    Attributes:
        compression: None, or the name of a codec that the format knows (``zstd``, ``gzip``, …). The msgpack
            format has no compression and ignores it.
    """

    compression: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One of the processes that save a tree together.

    Attributes:
        index: its number, from 0; process 0 also writes all that is not spread over the processes.
        count: how many they are.
    """

    index: int
    count: int


class Backend(Protocol):
    """One format.

    The calls of a save, in order: 0) the caller chooses a temporary path in the checkpoint's own
    directory, 1) `prepare`, 2) `write`, 3) the caller publishes the temporary under its final name.
    Of a save by several processes: 0) process 0 chooses the temporary path and tells it to the others, 1) all:
    `prepare` with their upload, 2) process 0: `begin_multiprocess`, 3) all, once it has ended: `write_process_part`,
    4) process 0, once all have ended: `finish_multiprocess`, 5) process 0 publishes.
    The calls of a restore: 0) the caller has detected the format, 1) `open`, 2) `Reader.read` any
    number of times, 3) `Reader.close`.
    """

    format: Format

    def prepare(self, tree: Node, process: ProcessInfo | None = None) -> Any:
        """Decides how a tree is stored, or raises, before anything is written; copies no array data.

        Args:
            process: given where several processes save together: then a ``jax.Array`` or `HostCopy` may be spread over
                them, and each writes the shards that it can see and that are the first of their replicas
                (``replica_id`` 0). All else is taken from process 0.
            tree: leaves are ``np.ndarray``, ``jax.Array`` (fully addressable), numpy scalars, int, float,
                bool, complex, str, bytes, None, `HostCopy` (stored as the jax.Array that it was), or `KeyData`,
                whose data is one of the arrays.

        Returns:
            What `write` takes.

        Raises:
            UnsupportedLeafError, NameCollisionError: with the key path in the message.
        """
        ...

    def write(self, path: str, prepared: Any, options: WriteOptions) -> None:
        """Writes the whole checkpoint to ``path``, which does not exist yet, and syncs it to disk.

        Args:
            path: absolute path of the temporary file or directory to create; the parent exists.
            prepared: of this backend's `prepare`.
            options: see `WriteOptions`.
        """
        ...

    def begin_multiprocess(
        self,
        path: str,
        prepared: Any,
        options: WriteOptions,
        process: ProcessInfo,
        upload: MultiprocessUpload | None = None,
    ) -> None:
        """Process 0 makes what the others need to have before they write, such as directories.

        Args:
            path: absolute path of the temporary, which does not exist yet; the parent exists and all processes see it.
                Of a save to a store it is a local one, and each process has its own.
            prepared: of this backend's `prepare`, with this process.
            options: see `WriteOptions`.
            process: this process's.
            upload: of a save to a store, which is where all see what the others write.
        """
        ...

    def write_process_part(
        self,
        path: str,
        prepared: Any,
        options: WriteOptions,
        process: ProcessInfo,
        upload: MultiprocessUpload | None = None,
    ) -> None:
        """Writes the arrays' shards of this process (process 0: and whatever is not spread) and syncs them to disk.

        To a store all is uploaded but what process 0 alone has, which stays at ``path`` until it is published.
        """
        ...

    def finish_multiprocess(
        self,
        path: str,
        prepared: Any,
        options: WriteOptions,
        process: ProcessInfo,
        upload: MultiprocessUpload | None = None,
    ) -> None:
        """Process 0 makes one checkpoint of all upload and syncs it to disk."""
        ...

    def open(self, path: str) -> Reader:
        """Opens a checkpoint of this format without reading array data.

        Raises:
            CorruptCheckpointError: it does not decode.
        """
        ...
