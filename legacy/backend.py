"""The msgpack format behind the calls that every format offers."""

from __future__ import annotations

from flax_ckpt_compat._core.backend import Backend, Format, Reader, WriteOptions
from flax_ckpt_compat._core.tree import Node

from .check import check_tree
from .reader import MsgpackReader
from .writer import write_tree


class MsgpackBackend:
    """Flax's msgpack files; stateless."""

    format = Format.MSGPACK

    def prepare(self, tree: Node) -> Node:
        """Raises `UnsupportedLeafError`, naming the key path, if a msgpack file cannot hold the tree.

        Strings that the reader would take for a reference to an array of a ``_gda`` folder are refused
        here; `write` stores them, so that whoever writes such a folder can check first and then replace.
        """
        check_tree(tree)
        return tree

    def write(self, path: str, prepared: Node, options: WriteOptions) -> None:  # noqa: ARG002 - none in this format
        """Writes and syncs the file ``path``, which must not exist yet; see `Backend.write`."""
        write_tree(path, prepared)

    def open(self, path: str) -> Reader:
        """Opens a msgpack checkpoint; reads its structure and skips over array data."""
        return MsgpackReader(path)


def open_part_of_orbax(path: str) -> Reader:
    """Opens the msgpack file ``checkpoint`` in a directory of Orbax up to 0.5.15, which may hold tuples besides."""
    return MsgpackReader(path, of_orbax=True)


BACKEND: Backend = MsgpackBackend()
