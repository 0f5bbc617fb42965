"""The msgpack format behind the calls that every format offers."""

from __future__ import annotations

from flax_ckpt_compat._core.backend import Backend, Format, ProcessInfo, Reader, WriteOptions
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload
from flax_ckpt_compat._core.tree import Node

from . import gda_write
from .check import check_tree
from .gda_tree import SharedTree, split
from .reader import MsgpackReader
from .write import write_tree


class MsgpackBackend:
    """Flax's msgpack files; stateless."""

    format = Format.MSGPACK

    def prepare(self, tree: Node, process: ProcessInfo | None = None) -> Node | SharedTree:
        """Raises `UnsupportedLeafError`, naming the key path, if a msgpack file cannot hold the tree.

        Strings that the reader would take for a reference to an array of a ``_gda`` folder are refused
        here; `write` stores them, so that whoever writes such a folder can check first and then replace.
        """
        if process is None:
            check_tree(tree)
            return tree
        prepared = split(tree, process)
        check_tree(prepared.tree)
        return prepared

    def write(self, path: str, prepared: Node, options: WriteOptions) -> None:  # noqa: ARG002 - none in this format
        """Writes and syncs the file ``path``, which must not exist yet; see `Backend.write`."""
        write_tree(path, prepared)

    # Arrays of several processes go into a folder beside ``path``, each as a zarr array, as in Flax.

    def begin_multiprocess(
        self,
        path: str,
        prepared: SharedTree,
        options: WriteOptions,  # noqa: ARG002
        process: ProcessInfo,  # noqa: ARG002
        upload: MultiprocessUpload | None = None,
    ) -> None:
        """Makes the folder of arrays; see `Backend.begin_multiprocess`."""
        gda_write.begin(path, prepared, upload)

    def write_process_part(
        self,
        path: str,
        prepared: SharedTree,
        options: WriteOptions,  # noqa: ARG002
        process: ProcessInfo,
        upload: MultiprocessUpload | None = None,
    ) -> None:
        """Writes this process's shards, and in process 0 the file ``path``; see `Backend.write_process_part`."""
        gda_write.write_process_part(path, prepared, process, upload)

    def finish_multiprocess(
        self,
        path: str,
        prepared: SharedTree,
        options: WriteOptions,  # noqa: ARG002
        process: ProcessInfo,  # noqa: ARG002
        upload: MultiprocessUpload | None = None,
    ) -> None:
        """Checks that nothing is missing; see `Backend.finish_multiprocess`."""
        gda_write.end(path, prepared, upload)

    def open(self, path: str) -> Reader:
        """Opens a msgpack checkpoint; reads its structure and skips over array data."""
        return MsgpackReader(path)


def open_part_of_orbax(path: str) -> Reader:
    """Opens the msgpack file ``checkpoint`` in a directory of Orbax up to 0.5.15, which may hold tuples besides."""
    return MsgpackReader(path, of_orbax=True)


BACKEND: Backend = MsgpackBackend()
