"""Read and write Orbax's on-disk format through TensorStore, without importing orbax."""

from __future__ import annotations

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import Backend, Format, ProcessInfo, Reader, WriteOptions
from flax_ckpt_compat._core.memory import pause_gc
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload
from flax_ckpt_compat._core.tree import Node

from . import multiprocess
from .aggregate import OpenMsgpack
from .plan import Plan, make_plan
from .reader import open_checkpoint
from .writer import write_plan

__all__ = ["BACKEND", "OrbaxBackend"]


class OrbaxBackend:
    """Flat Orbax PyTree directories: what `orbax.checkpoint.PyTreeCheckpointer` writes."""

    format = Format.ORBAX

    def __init__(self, open_msgpack: OpenMsgpack | None = None) -> None:
        """Store the opener for the msgpack file of old releases; without one, their directories are refused."""
        self._open_msgpack = open_msgpack

    def prepare(self, tree: Node, process: ProcessInfo | None = None) -> Plan:
        """Plan how each leaf is stored; see `flax_ckpt_compat._core.backend.Backend.prepare`.

        Raises:
            UnsupportedLeafError, NameCollisionError: with the key path in the message.
        """
        return make_plan(tree, multiprocess=process is not None and process.count > 1)

    def write(self, path: str, prepared: Plan, options: WriteOptions) -> None:
        """Write the whole checkpoint as a new directory and syncs it to disk.

        Args:
            path: absolute path of the directory to create; its parent exists.
            prepared: the result of `prepare`.
            options: ``compression`` is None, ``zstd``, ``gzip``, ``zlib`` or ``blosc``.

        Raises:
            SettingError: before anything is written.
            StorageError: the file system refused.
        """
        write_plan(path, prepared, options)

    def begin_multiprocess(
        self,
        path: str,
        prepared: Plan,
        options: WriteOptions,
        process: ProcessInfo,  # noqa: ARG002
        upload: MultiprocessUpload | None = None,  # noqa: ARG002
    ) -> None:
        """Create the directories of a multiprocess save.

        Raises:
            SettingError: before anything is written.
            StorageError: the file system refused.
        """
        multiprocess.begin(path, prepared, options)

    def write_process_part(
        self,
        path: str,
        prepared: Plan,
        options: WriteOptions,
        process: ProcessInfo,
        upload: MultiprocessUpload | None = None,
    ) -> None:
        """Write this process's shards to its own database and sync it to disk.

        Raises:
            StorageError: the file system refused, or the directory of process 0 is not visible here.
        """
        multiprocess.write(path, prepared, options, process, upload)

    def finish_multiprocess(
        self,
        path: str,
        prepared: Plan,
        options: WriteOptions,  # noqa: ARG002
        process: ProcessInfo,
        upload: MultiprocessUpload | None = None,
    ) -> None:
        """Merge the databases of all processes, check that no chunk is missing and sync to disk.

        Raises:
            MultiprocessSaveError: a process wrote a different tree.
            StorageError: a part is missing, or the file system refused.
        """
        multiprocess.end(path, prepared, process, upload)

    def open(self, path: str) -> Reader:
        """Open a directory of any Orbax release without reading array data.

        Raises:
            IncompleteCheckpointError, UnrecognizedFormatError: it has no tree structure.
            CorruptCheckpointError: it does not decode.
        """
        with paths.listing_cache(path), pause_gc(enabled=not paths.is_url(path)):
            return open_checkpoint(path, self._open_msgpack)


BACKEND: Backend = OrbaxBackend()
