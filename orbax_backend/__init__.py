"""Orbax's on-disk format, written and read straight through TensorStore; nothing here imports orbax."""

from __future__ import annotations

from flax_ckpt_compat._core.backend import Backend, Format, Reader, WriteOptions
from flax_ckpt_compat._core.memory import collection_paused
from flax_ckpt_compat._core.tree import Node

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

    def prepare(self, tree: Node) -> Plan:
        """Decides how every leaf is stored; see `flax_ckpt_compat._core.backend.Backend.prepare`.

        Raises:
            UnsupportedLeafError, NameCollisionError: with the key path in the message.
        """
        with collection_paused():
            return make_plan(tree)

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

    def open(self, path: str) -> Reader:
        """Opens a directory of any release of Orbax without reading array data.

        Raises:
            IncompleteCheckpointError, UnrecognizedFormatError: nothing in it holds the structure of a tree.
            CorruptCheckpointError: it does not decode.
        """
        with collection_paused():
            return open_checkpoint(path, self._open_msgpack)


BACKEND: Backend = OrbaxBackend()
