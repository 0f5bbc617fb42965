"""Build a restore's result: dicts and branches in the target's structure, filled after one read."""

from __future__ import annotations

from typing import Any

import jax

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.tree import Branch, Path, iter_branches, map_leaves
from flax_ckpt_compat._restore import placement
from flax_ckpt_compat._restore.evaluate import LeafReader, Placing
from flax_ckpt_compat._restore.matching import ShapeDifference
from flax_ckpt_compat._restore.problems import Problems
from flax_ckpt_compat._trees.leaf_sources import Derived, FromCheckpoint, FromTarget


class Execution:
    """A planned restore of one tree, ready to be read.

    Attributes:
        problems: reasons why it is impossible; check them before `finish`.
    """

    def __init__(self, sources: Any, reader: Any, *, cast: bool, mapped: bool = False):
        """Plan the reads and build the empty result.

        Args:
            sources: nested dicts or branches of `FromCheckpoint` and `FromTarget`.
            reader: the reader of the leaf handles' checkpoint.
            cast: cast arrays and scalars to their target's dtype.
            mapped: arrays that go neither to a device nor into a computation may be memory-mapped.
        """
        self._leaves = LeafReader(reader, cast, mapped)
        self._builder = ResultBuilder(self._leaves)
        self._root: dict[str, Any] = {}
        with memory.pause_gc():
            self._builder.reserve(sources, self._root, "", ())
        self.problems: Problems = self._leaves.problems

    def finish(self, *, lists: bool) -> tuple[Any, list[ShapeDifference]]:
        """Read and compute all values. Call once.

        Args:
            lists: stored lists without a target stay lists.

        Returns:
            Dicts or branches like those of the sources, and the shapes that differ from the target's and were known
            only once functions had computed them.
        """
        self._leaves.read()
        self._builder.assign(lists)
        self._leaves.log_warnings()
        return self._root[""], self._leaves.shapes


class ResultBuilder:
    """Containers of the result, and the leaves still to be assigned, in the order of the sources."""

    def __init__(self, leaves: LeafReader):
        self._leaves = leaves
        # Parent container, name in it, key path in the target (exact for derived leaves only), leaf, placing.
        self._open: list[tuple[dict[str, Any], str, Path, LeafHandle | Derived, Placing]] = []
        self._whole: list[tuple[dict[str, Any], str]] = []

    def reserve(self, sources: Any, into: dict[str, Any], name: str, path: Path) -> None:
        """Reserve places in the result for a tree of sources, and plan their reads."""
        if isinstance(sources, FromCheckpoint):
            self._reserve_stored(sources, into, name, path)
        elif isinstance(sources, FromTarget):
            into[name] = sources.value
        elif isinstance(sources, Branch):
            children: dict[str, Any] = {}
            into[name] = Branch(children, sources.container, sources.int_keys)
            self._reserve_children(sources.children, children, path)
        else:
            into[name] = {}
            self._reserve_children(sources, into[name], path)

    def _reserve_children(self, sources: dict[str, Any], into: dict[str, Any], path: Path) -> None:
        plan, add = self._leaves.plan, self._open.append
        for name, source in sources.items():
            if type(source) is FromCheckpoint and type(source.node) is LeafHandle:  # as almost all are
                into[name] = None
                add((into, name, path, source.node, plan(source.node, source)))
            else:
                self.reserve(source, into, name, (*path, name))

    def _reserve_stored(self, source: FromCheckpoint, into: dict[str, Any], name: str, path: Path) -> None:
        """Reserve one leaf, or a whole stored branch."""
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
            self._open.append((into, name, path, leaf, self._leaves.plan(leaf, source, path)))

    def assign(self, lists: bool) -> None:
        """Assign all values that were read."""
        direct = []
        leaves, values = self._leaves, self._leaves.values
        for into, name, path, leaf, placing in self._open:
            if placing is None or isinstance(placing, jax.sharding.Sharding):
                # Popped, so that nothing but the result holds the bytes any longer.
                into[name] = values.pop()
                if placing is not None:
                    direct.append((into, name, placing))
            else:
                into[name] = leaves.value(path, leaf, placing)
        with placement.transfers_allowed(), memory.pause_gc():
            for into, name, sharding in direct:
                into[name] = placement.on_devices(into[name], sharding)
        for into, name in self._whole:
            into[name] = placement.as_state(into[name], lists=lists)
