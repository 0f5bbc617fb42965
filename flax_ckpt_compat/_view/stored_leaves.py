"""List the leaves of an open checkpoint, over all of its items, and describe their types."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

if TYPE_CHECKING:
    import numpy as np

Count = Callable[[int], None]  # takes numbers of bytes, in any thread
# Takes what returns the bytes that will be read, and returns what takes the numbers of those that are.
Begin = Callable[[Callable[[], int]], Count]


class StoredLeaves:
    """Leaves of a checkpoint by key path, and the key paths of empty nodes with what they are."""

    def __init__(self, opened: Opened):
        """List the leaves of what a restore returns, and of JSON items beside the only tree."""
        self.path, self.format = opened.path, opened.format
        self.leaves: dict[Path, LeafHandle] = {}
        self.empty: dict[Path, str] = {}
        for name in opened.parts:
            self._add(opened.reader(name).tree, (name,) if opened.is_mapping else ())
        for name in [one for one in opened.items if one not in opened.parts]:
            is_taken = any(path[:1] == (name,) for path in (*self.leaves, *self.empty))
            self._add(opened.reader(name).tree, (f"{name} (JSON)" if is_taken else name,))

    def _add(self, tree: Node, at: Path) -> None:
        for path, leaf in iter_leaves(tree, at):
            if isinstance(leaf, LeafHandle):
                self.leaves[path] = leaf
            else:
                self.empty[path] = _empty(leaf)


def _empty(node: Node) -> str:
    return "None" if not isinstance(node, Branch) else "[]" if node.container.is_sequence else "{}"


def describe(node: LeafHandle | str) -> str:
    """Return the type of a leaf: ``float32[3,4]``, ``key uint32[2]``, ``int``; of an empty node, what it is."""
    return node if isinstance(node, str) else _type(node.kind, node.shape, node.dtype)


@functools.lru_cache(maxsize=1024)  # numpy takes microseconds to name a dtype, and thousands of leaves share few
def _type(kind: LeafKind, shape: tuple[int, ...], dtype: np.dtype[Any] | None) -> str:
    if kind in (LeafKind.ARRAY, LeafKind.PRNG_KEY):
        return f"{'' if kind is LeafKind.ARRAY else 'key '}{dtype}[{','.join(map(str, shape))}]"
    return str(dtype) if kind is LeafKind.NUMPY_SCALAR else kind.value


def uncounted(_: Callable[[], int]) -> Count:
    """Show no progress: the default of ``begin``."""
    return lambda _: None


def wait_for_pending_saves(checkpoint_dir: CheckpointDir) -> None:
    """Wait for background saves into a directory, without importing what they need, jax included."""
    if async_saves := sys.modules.get("flax_ckpt_compat._save.async_saves"):
        async_saves.wait_for_pending_saves(checkpoint_dir)
