"""Read Flax models of Hugging Face in several files: an index, and msgpack files that each hold a part of the tree.

``flax_model.msgpack.index.json`` names the file of each parameter, whose key path is joined with slashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, Reader, read_all
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, Node, Path, show_path
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._discovery.layouts.layout import damaged, files_of


class FlaxShardsReader(Reader):
    """Reader of an index; each leaf is read by the reader of its file."""

    format = Format.MSGPACK
    places_on_device, keeps_lists = False, True

    def __init__(self, location: Location):
        """Open all files that the index names, and join their trees."""
        self.location = location.unlisted()
        self.tree: Node = Branch({})
        with ExitStack() as on_failure:
            for file in files_of(self.location, ".msgpack"):
                reader = on_failure.enter_context(closing(backend_for(Format.MSGPACK).open(file)))
                _join(self.tree, reader.tree, file)
            self._files = on_failure.pop_all()

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """See `flax_ckpt_compat._core.backend.Reader.read`."""
        return read_all(handles)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _join(tree: Node, part: Node, file: Location) -> None:
    """Add the leaves of a file to the tree of those before it."""
    pending: list[tuple[Path, Node, Node]] = [((), tree, part)]
    while pending:
        path, into, node = pending.pop()
        if not isinstance(into, Branch) or not isinstance(node, Branch):
            raise damaged(file, f"{show_path(path)} is in another shard, too", show_path(path))
        for name, child in node.children.items():
            if name in into.children:
                pending.append(((*path, name), into.children[name], child))
            else:
                into.children[name] = child
