"""Define the plan of a restore: a flat list of leaves, each with its source, placement and cast."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Node, Path
from flax_ckpt_compat._restore.kinds import KindDifference
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, FunctionInput, Own

_log = logging.getLogger("flax_ckpt_compat")
_SHORT_BYTES = 64 * 2**20

# Key path, stored shape, the target's shape.
ShapeDifference = tuple[Path, tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(slots=True, eq=False)  # frozen=True would triple the time to create one
class LeafPlan:
    """One leaf of the result.

    Attributes:
        path: key path in the target, or in the checkpoint without one; of all leaves of a subtree that is restored as
            stored, the key path of that subtree.
        source: a stored or derived leaf, a stored None, or `Own.KEEP_TARGET` for the target's own value.
        target: the target's leaf, or None.
        is_plain: a stored array whose value as read is final, or only has to be put on ``sharding``, a single device.
        sharding: sharding to place an array with; None for host memory.
        cast: dtype to cast an array or number to, or None.
        slices: the slices to read of a stored array, one per distinct shard of this process; None to read it whole.
        why: why the target's value is kept, in a few words.
    """

    path: Path
    source: LeafHandle | Derived | Own | None
    target: Any
    is_plain: bool = False
    sharding: Any = None
    cast: Any = None
    slices: list[ArraySlice] | None = None
    why: str = ""


@dataclasses.dataclass(slots=True, eq=False)
class TreePlan:
    """Plan of a restore of one tree.

    Attributes:
        path: file or directory, for messages.
        reader: reader of the leaf handles.
        options: the restore's.
        target: the user's tree, or None.
        tree: the checkpoint's tree after the rules.
        leaves: every leaf of the result, in its order.
        stored_subtrees: key paths in the target whose nodes are restored as stored → what is stored there. Without a
            target, the whole tree at the root.
        inputs: inputs of users' functions → how they are read.
        missing: key paths of target leaves that the checkpoint lacks and no transform gives or keeps.
        empty: the missing key paths that are containers without children, such as optax.EmptyState.
        unused: key paths of stored leaves that are not in the target.
        shapes: (key path, stored shape, target shape) where they differ.
        kinds: nodes that differ in kind.
        problems: errors that no policy allows: impossible casts and shardings.
        narrowed: leaves and dtypes of an abstract target's casts that may lose values.
        unsharded: leaves whose dtype jax cannot hold, which stay in host memory without the target's sharding.
    """

    path: str
    reader: Reader
    options: RestoreOptions
    target: state_dict.TargetTree | None
    tree: Node
    leaves: list[LeafPlan] = dataclasses.field(default_factory=list)
    stored_subtrees: dict[Path, Node] = dataclasses.field(default_factory=dict)
    inputs: dict[FunctionInput, LeafPlan] = dataclasses.field(default_factory=dict)
    missing: list[Path] = dataclasses.field(default_factory=list)
    empty: set[Path] = dataclasses.field(default_factory=set)
    unused: list[Path] = dataclasses.field(default_factory=list)
    shapes: list[ShapeDifference] = dataclasses.field(default_factory=list)
    kinds: list[KindDifference] = dataclasses.field(default_factory=list)
    problems: list[CheckpointError] = dataclasses.field(default_factory=list)
    narrowed: list[str] = dataclasses.field(default_factory=list)
    unsharded: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_short(self) -> bool:
        """Return whether it takes well under a second: few bytes, on a local disk, without rules or transforms."""
        transforms = self.options.transforms
        is_plain = not transforms.rules and not transforms.orbax_semantics
        return is_plain and not paths.is_url(self.path) and _nbytes(self.tree) < _SHORT_BYTES

    @property
    def arrays(self) -> int:
        """Return the number of target arrays that come from stored ones."""
        return sum(
            isinstance(leaf.source, LeafHandle) and leaf.source.kind is LeafKind.ARRAY and hasattr(leaf.target, "shape")
            for leaf in self.leaves
        )

    def suggest(self) -> Any:
        """Return the `flax_ckpt_compat._suggest.Suggestion` for missing leaves and other shapes, or None."""
        from flax_ckpt_compat import _suggest  # most restores need none of it

        if self.target is None or not (self.missing or self.shapes):
            return None
        try:
            return _suggest.suggest(self.tree, self.target.node)
        except Exception:  # noqa: BLE001  (a guess that fails must not hide what is missing)
            _log.debug("no suggestion for %s", self.path, exc_info=True)
            return None


@dataclasses.dataclass(frozen=True, slots=True)
class RestorePlan:
    """Plan of a restore of a checkpoint.

    Attributes:
        items: item name → its plan; '' for a checkpoint, or a target, that is one tree.
        is_mapping: the result is a mapping of item name → tree.
    """

    items: Mapping[str, TreePlan]
    is_mapping: bool


def _nbytes(node: Node) -> int:
    """Return the size of a tree of leaf handles in bytes."""
    if isinstance(node, Branch):
        # Most children are leaves, and a call for each would take as long as the sum.
        children = node.children.values()
        return sum([child.nbytes if type(child) is LeafHandle else _nbytes(child) for child in children])
    return node.nbytes if isinstance(node, LeafHandle) else 0
