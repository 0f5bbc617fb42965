"""Define the options of a restore, and its plan: a flat list of leaves, each with its source, placement and cast."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._core import arguments
from flax_ckpt_compat._core.backend import LeafHandle, Reader
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Node, Path
from flax_ckpt_compat._restore.call_arguments import item_name
from flax_ckpt_compat._restore.leaf_kinds import KindDifference
from flax_ckpt_compat._restore.transform_spec import TransformSpec
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, FunctionInput, Own

# Key path, stored shape, the target's shape.
ShapeDifference = tuple[Path, tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Options of one restore, read once by the public functions and passed down."""

    settings: config.Settings  # the policies, ``dtype``, ``structure`` and ``mapped`` in force
    transforms: TransformSpec = dataclasses.field(default_factory=TransformSpec)  # the caller's rules or transforms
    item: str | None = None  # the item to restore, as one tree; None for all

    @classmethod
    def strict(
        cls, transforms: Any, default_to_original: bool, *, item: str | None = None, **policies: Any
    ) -> RestoreOptions:
        """Return the options of `flax_ckpt_compat.restore`: a policy of None takes the setting or its default."""
        given = {name: value for name, value in policies.items() if value is not None}
        with config.defaults(config.STRICT), config.override(**given) as settings:
            by_default = arguments.flag(default_to_original, "transforms_default_to_original")
            spec = TransformSpec(transforms, default_to_original=by_default, strict=True)
            return cls(settings, spec, item_name(item))

    @property
    def casts(self) -> bool:
        """Return whether arrays and numbers are cast to the dtype of the target's leaf."""
        return self.settings.dtype == "target"


@dataclasses.dataclass(slots=True, eq=False)  # frozen=True would triple the time to create one
class LeafPlan:
    """One leaf of the result."""

    path: Path  # key path in the target, or, without one and below what is restored as stored, in the checkpoint
    # Stored, derived, or `Own.KEEP_TARGET`; None for a stored None.
    source: LeafHandle | Derived | Own | None
    target: Any  # the target's leaf, or None
    is_plain: bool = False  # read whole: final, or, of an array, to be put on ``sharding``
    sharding: Any = None  # sharding to place an array with; None for host memory
    cast: Any = None  # dtype to cast an array or number to, or None
    slices: list[LeafHandle] | None = None  # to read, one per distinct shard of this process; None for all
    why: str = ""  # why the target's value is kept, or how a subtree is read, in a few words


@dataclasses.dataclass(slots=True, eq=False)
class TreePlan:
    """Plan of a restore of one tree."""

    location: Location  # file or directory, for messages
    reader: Reader
    options: RestoreOptions
    target: state_dict.TargetTree | None  # the user's tree, or None
    tree: Node  # the checkpoint's tree after the rules
    # Of a checkpoint of several items: the name of this one; and the tree of all of them, after the rules, with all
    # their targets, in which rules name leaves.
    item: str = ""
    all_items: tuple[Node, Node] | None = None
    leaves: list[LeafPlan] = dataclasses.field(default_factory=list)  # every leaf of the result, in its order
    # Key paths in the target whose nodes are restored as stored → what is stored there. Without a target, the whole
    # tree at the root.
    stored_subtrees: dict[Path, Node] = dataclasses.field(default_factory=dict)
    inputs: dict[FunctionInput, LeafPlan] = dataclasses.field(default_factory=dict)  # of users' functions
    # Key paths of target leaves that the checkpoint lacks and no transform gives or keeps.
    missing: list[Path] = dataclasses.field(default_factory=list)
    # The missing key paths that are containers without children, such as optax.EmptyState.
    empty: set[Path] = dataclasses.field(default_factory=set)
    unused: list[Path] = dataclasses.field(default_factory=list)  # stored leaves that are not in the target
    cuts_layers: bool | None = None  # the unused leaves are layers of which the target has fewer; None: not looked yet
    shapes: list[ShapeDifference] = dataclasses.field(default_factory=list)  # those that differ
    kinds: list[KindDifference] = dataclasses.field(default_factory=list)
    problems: list[CheckpointError] = dataclasses.field(default_factory=list)  # allowed by no policy
    # Leaves whose dtype jax cannot hold, which stay in host memory without the target's sharding.
    unsharded: list[str] = dataclasses.field(default_factory=list)

    @property
    def path(self) -> str:
        """Return the path, for messages."""
        return self.location.path


@dataclasses.dataclass(frozen=True, slots=True)
class RestorePlan:
    """Plan of a restore of a checkpoint."""

    items: Mapping[str, TreePlan]  # item name → its plan; '' for a checkpoint, or a target, that is one tree
    is_mapping: bool  # the result is a mapping of item name → tree
    fits: str = ""  # how each of several trees fits the target, of which the structure chose one
