"""Orbax's on-disk format, written and read straight through TensorStore; nothing here imports orbax."""

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
        """Takes what opens the msgpack file in directories of old releases; without it, they are refused."""
        self._open_msgpack = open_msgpack

    def prepare(self, tree: Node, process: ProcessInfo | None = None) -> Plan:
        """Decides how every leaf is stored; see `flax_ckpt_compat._core.backend.Backend.prepare`.

        Raises:
            UnsupportedLeafError, NameCollisionError: with the key path in the message.
        """
        return make_plan(tree, together=process is not None and process.count > 1)

    def write(self, path: str, prepared: Plan, options: WriteOptions) -> None:
        """Writes the whole checkpoint as a new directory and syncs it to disk.

        Args:
            path: absolute path of the directory to create; its parent exists.
            prepared: of `prepare`.
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
        """Makes the directory of a save by several processes, and those in it that all need.

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
        """Writes the shards of this process as a database of its own and syncs it to disk.

        Raises:
            StorageError: the file system refused, or this process does not see the directory that process 0 made.
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
        """Merges the databases of all processes, checks that no chunk is missing and syncs all to disk.

        Raises:
            MultiprocessSaveError: a process wrote something else than this one.
            StorageError: a part is missing, or the file system refused.
        """
        multiprocess.end(path, prepared, process, upload)

    def open(self, path: str) -> Reader:
        """Opens a directory of any release of Orbax without reading array data.

        Raises:
            IncompleteCheckpointError, UnrecognizedFormatError: nothing in it holds the structure of a tree.
            CorruptCheckpointError: it does not decode.
        """
        with paths.listing_cache(path), pause_gc(enabled=not paths.is_url(path)):
            return open_checkpoint(path, self._open_msgpack)


BACKEND: Backend = OrbaxBackend()
