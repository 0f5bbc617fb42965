"""Read and write Flax's msgpack checkpoint files: one msgpack document, the tree as nested maps."""

from __future__ import annotations

from flax_ckpt_compat._core.backend import Backend, Format, ProcessInfo, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Node

from . import gda_write
from .encode import check_tree, write_tree
from .reader import MsgpackReader


class MsgpackBackend:
    """Implement the Backend protocol for Flax's msgpack files."""

    format = Format.MSGPACK
    uses_gda_folder = True

    def prepare(self, tree: Node, process: ProcessInfo | None = None) -> Node | gda_write.SharedTree:
        """Validate the tree, in which no text may look like a reference to an array; see `Backend.prepare`."""
        if process is not None:
            return gda_write.split(tree, process)
        check_tree(tree)
        return tree

    write = staticmethod(write_tree)

    # Distributed arrays go into a folder beside ``path``, each as a zarr array, as in Flax.
    begin_multiprocess = staticmethod(gda_write.begin)
    write_process_part = staticmethod(gda_write.write_process_part)
    finish_multiprocess = staticmethod(gda_write.finish)
    open = MsgpackReader


def open_part_of_orbax(location: Location) -> Reader:
    """Open the msgpack file ``checkpoint`` in a directory of Orbax up to 0.5.15, which may also hold tuples."""
    return MsgpackReader(location, of_orbax=True)


def open_stream(location: Location) -> Reader:
    """Open a stream of msgpack objects, each a key path and the bytes of a leaf, as EasyLM writes it."""
    return MsgpackReader(location, is_stream=True)


BACKEND: Backend = MsgpackBackend()
