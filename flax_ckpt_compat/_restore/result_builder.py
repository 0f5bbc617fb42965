"""What a match decided → the values, laid out in the target's structure."""

from __future__ import annotations

from typing import Any

import jax

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.tree import Branch, Path, iter_branches, map_leaves
from flax_ckpt_compat._restore import placement
from flax_ckpt_compat._restore.evaluate import How, LeafReader
from flax_ckpt_compat._restore.matching import ShapeDifference
from flax_ckpt_compat._restore.problems import Problems
from flax_ckpt_compat._trees.leaf_sources import Derived, FromCheckpoint, FromTarget


class Execution:
    """A tree of sources, laid out and not yet read.

    Attributes:
        problems: what makes it impossible; to be looked at before `finish`.
    """

    def __init__(self, sources: Any, reader: Any, *, cast: bool, mapped: bool = False):
        """Lays out the result.

        Args:
            sources: nested dicts, or branches, of `FromCheckpoint` and `FromTarget`.
            reader: of the checkpoint that the leaf handles are of.
            cast: cast arrays and scalars to their target's dtype.
            mapped: arrays that neither go to a device nor into a computation may lie over the mapped file.
        """
        self._run = LeafReader(reader, cast, mapped)
        self._layout = ResultBuilder(self._run)
        self._root: dict[str, Any] = {}
        with memory.pause_gc():
            self._layout.put(sources, self._root, "", ())
        self.problems: Problems = self._run.problems

    def finish(self, *, lists: bool) -> tuple[Any, list[ShapeDifference]]:
        """Reads and computes all values; called once.

        Args:
            lists: stored lists that the target asks for as they are stay lists.

        Returns:
            Dicts, or branches, like those of the sources; and the shapes that differ from the target's and that only
            the functions that computed them knew.
        """
        self._run.read()
        self._layout.fill(lists)
        self._run.tell()
        return self._root[""], self._run.shapes


class ResultBuilder:
    """The result's dicts and branches, and what is still to be put where in them, in the order of the sources."""

    def __init__(self, run: LeafReader):
        self._run = run
        # The children that it is one of, its name, where its source goes in the target (of what is computed; for the
        # rest nobody asks), and how it is made.
        self._open: list[tuple[dict[str, Any], str, Path, LeafHandle | Derived, How]] = []
        self._whole: list[tuple[dict[str, Any], str]] = []

    def put(self, sources: Any, into: dict[str, Any], name: str, path: Path) -> None:
        """Lays out what a tree of sources, or a part of one, gives."""
        if isinstance(sources, FromCheckpoint):
            self._put_stored(sources, into, name, path)
        elif isinstance(sources, FromTarget):
            into[name] = sources.value
        elif isinstance(sources, Branch):
            children: dict[str, Any] = {}
            into[name] = Branch(children, sources.container, sources.int_keys)
            self._put_all(sources.children, children, path)
        else:
            into[name] = {}
            self._put_all(sources, into[name], path)

    def _put_all(self, sources: dict[str, Any], into: dict[str, Any], path: Path) -> None:
        plan, add = self._run.plan, self._open.append
        for name, source in sources.items():
            if type(source) is FromCheckpoint and type(source.node) is LeafHandle:  # as almost all are
                into[name] = None
                add((into, name, path, source.node, plan(source.node, source)))
            else:
                self.put(source, into, name, (*path, name))

    def _put_stored(self, source: FromCheckpoint, into: dict[str, Any], name: str, path: Path) -> None:
        """One leaf, or a whole branch where the target takes whatever there is."""
        node = source.node
        into[name] = map_leaves(lambda _, leaf: leaf, node)
        if isinstance(node, Branch):
            self._whole.append((into, name))
            for _, branch in iter_branches(into[name]):
                for child, leaf in branch.children.items():
                    self._note(source, branch.children, child, path, leaf)
        else:
            self._note(source, into, name, path, node)

    def _note(self, source: FromCheckpoint, into: dict[str, Any], name: str, path: Path, leaf: Any) -> None:
        if isinstance(leaf, LeafHandle | Derived):
            self._open.append((into, name, path, leaf, self._run.plan(leaf, source, path)))

    def fill(self, lists: bool) -> None:
        """Puts in all values, once they have been read."""
        direct = []
        run, values = self._run, self._run.values
        for into, name, path, leaf, how in self._open:
            if how is None or isinstance(how, jax.sharding.Sharding):
                # Popped, so that nothing but the result holds the bytes any longer.
                into[name] = values.pop()
                if how is not None:
                    direct.append((into, name, how))
            else:
                into[name] = run.value(path, leaf, how)
        with placement.transfers_allowed(), memory.pause_gc():
            for into, name, sharding in direct:
                into[name] = placement.on_devices(into[name], sharding)
        for into, name in self._whole:
            into[name] = placement.as_state(into[name], lists=lists)
