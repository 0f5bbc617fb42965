"""Match a checkpoint's tree with a target: decide where each target leaf comes from. Reads no array data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves
from flax_ckpt_compat._restore import kind_differences
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, FromCheckpoint, FromTarget, Own, handles_of
from flax_ckpt_compat._trees.old_namedtuples import fields_of

# Key path, stored shape, the target's shape.
ShapeDifference = tuple[Path, tuple[int, ...], tuple[int, ...]]
# The dtype of the data of typed PRNG keys; as almost everywhere, an object of its own.
_KEY_DATA = np.dtype(np.uint32)


@dataclasses.dataclass(slots=True)
class Match:
    """Result of matching a checkpoint with a target.

    Attributes:
        sources: nested dicts with the target's structure; leaves are `FromCheckpoint` or `FromTarget`.
        missing: key paths of target leaves that the checkpoint lacks and no transform gives or keeps.
        empty: the missing key paths that are containers without children, such as optax.EmptyState.
        unused: key paths of stored leaves that are not in the target.
        shapes: (key path, stored shape, target shape) where they differ.
        kinds: nodes that differ in kind.
    """

    sources: Any = None
    missing: list[Path] = dataclasses.field(default_factory=list)
    empty: set[Path] = dataclasses.field(default_factory=set)
    unused: list[Path] = dataclasses.field(default_factory=list)
    shapes: list[ShapeDifference] = dataclasses.field(default_factory=list)
    kinds: list[kind_differences.KindDifference] = dataclasses.field(default_factory=list)


# Key path and leaf of the target → its source; None for the checkpoint's leaf of the same path.
Choose = Callable[[Path, Any], FromCheckpoint | FromTarget | None]


def match(
    stored: Node,
    target: Node,
    *,
    lenient: bool,
    is_custom: Callable[[Path], bool],
    choose: Choose | None = None,
    cast: bool = False,
) -> Match:
    """Pair the leaves of a target with those of a checkpoint.

    Args:
        stored: tree of leaf handles, or of the leaves that rules made of them.
        target: the target's neutral tree.
        lenient: Orbax's transform semantics: None in the target stays None, a stored None counts as missing.
        is_custom: true for key paths of target nodes whose type has its own serialization and reads any structure.
        choose: called for every leaf of the target but None.
        cast: the setting ``dtype="target"``, which turns numbers into arrays where the target has arrays.
    """
    outcome = Match()
    matcher = _Matcher(outcome, lenient, is_custom, choose, cast)
    outcome.sources = matcher.node(stored, target, ())
    outcome.kinds += matcher.longer_sequences()
    if matcher.chosen:
        used = {path for path, leaf in iter_leaves(stored) if matcher.is_chosen(leaf)}
        outcome.unused = [path for path in outcome.unused if path not in used]
    return outcome


class _Absent(enum.Enum):
    ABSENT = "not in the checkpoint"


@dataclasses.dataclass(slots=True)
class _Matcher:
    outcome: Match
    lenient: bool
    is_custom: Callable[[Path], bool]
    choose: Choose | None
    cast: bool
    chosen: set[LeafHandle] = dataclasses.field(default_factory=set)
    longer: list[tuple[Path, Mapping[str, Node], Branch]] = dataclasses.field(default_factory=list)

    def node(self, stored: Node, target: Node, path: Path) -> Any:
        if stored is Own.TARGET:
            return _keep_target(target, "from_target")
        if not isinstance(target, Branch):
            return self.leaf(stored, target, path)
        if isinstance(stored, Branch):
            return self.branch(stored, target, path)
        self.note_unused(stored, path)
        return self.absent(target, path) if target.children or stored is _Absent.ABSENT else {}

    def branch(self, stored: Branch, target: Branch, path: Path) -> Any:
        fields = fields_of(stored, target)
        if self.choose is None and self.is_custom(path) and not _same_names(stored, target):
            return FromCheckpoint(stored, None)
        for name, child in fields.items():
            if name not in target.children:
                self.note_unused(child, (*path, name))
        if len(fields) > len(target.children) and target.container.is_sequence:
            self.longer.append((path, fields, target))
        # A loop that calls node itself, because Flax's own functions nest no fewer than three calls for a level, and
        # what Flax restores within the recursion limit is restored here.
        children = {}
        for name, child in target.children.items():
            found = fields.get(name, _Absent.ABSENT)
            # As almost all leaves are: an array where the target has one of the same shape.
            if (
                type(found) is LeafHandle
                and found.kind is LeafKind.ARRAY
                and getattr(child, "shape", None) == found.shape
                and found.dtype is not _KEY_DATA
                and self.choose is None
            ):
                children[name] = FromCheckpoint(found, child)
            else:
                children[name] = self.node(found, child, (*path, name))
        return children

    def leaf(self, stored: Node, target: Any, path: Path) -> Any:
        if self.lenient and target is None:
            self.note_unused(stored, path)
            return FromTarget(None, "None in the target")
        source = self.choose(path, target) if self.choose is not None else None
        if source is not None:
            self.note_unused(stored, path)
            if isinstance(source, FromCheckpoint):
                self.chosen.update(handles_of(source))
                source.target = self.compare(source.node, source.target, path)
            return source
        if stored is _Absent.ABSENT or (self.lenient and (stored is None or isinstance(stored, Branch))):
            self.note_unused(stored, path)
            return self.absent(target, path)
        return FromCheckpoint(stored, self.compare(stored, target, path))

    def compare(self, stored: Node, target: Any, path: Path) -> Any:
        """Record a shape, or else a kind, that is not the target's. Return the target, or None if it is not a leaf."""
        shape = getattr(target, "shape", None)
        is_leaf = isinstance(stored, LeafHandle | Derived)
        if is_leaf and isinstance(shape, tuple) and self.differ(stored, target, shape):
            self.outcome.shapes.append((path, self.shape_of(stored, target), shape))
            return target
        difference = kind_differences.find(path, stored, target, self.cast)
        if difference is None:
            return target
        self.outcome.kinds.append(difference)
        return target if is_leaf and difference.is_leaf else None

    def differ(self, stored: LeafHandle | Derived, target: Any, shape: tuple[int, ...]) -> bool:
        if isinstance(stored, Derived):
            return stored.shape is not None and stored.shape != shape
        if stored.kind is LeafKind.PRNG_KEY:
            return bool(self.shape_of(stored, target) != shape)
        if stored.kind in kind_differences.PYTHON_NUMBERS:
            is_array = isinstance(target, np.ndarray | jax.Array | jax.ShapeDtypeStruct)
            return is_array and kind_differences.becomes_array(target, self.cast) and shape != ()
        return stored.kind in (LeafKind.ARRAY, LeafKind.NUMPY_SCALAR) and stored.shape != shape

    def shape_of(self, stored: LeafHandle | Derived, target: Any) -> Any:
        """Return the stored shape; of PRNG keys that of their data, unless the target has typed keys too."""
        is_key = isinstance(stored, LeafHandle) and stored.kind is LeafKind.PRNG_KEY and state_dict.is_prng_key(target)
        return stored.shape[:-1] if is_key and stored.shape is not None else stored.shape

    def longer_sequences(self) -> list[kind_differences.KindDifference]:
        """Return the stored sequences that are longer than the target's, unless transforms use the extra entries."""
        found = []
        for path, fields, target in self.longer:
            left = [child for name, child in fields.items() if name not in target.children and name.isdecimal()]
            leaves = [leaf for child in left for _, leaf in iter_leaves(child)]
            if left and not (leaves and all(map(self.is_chosen, leaves))):
                found.append(kind_differences.longer_sequence(path, len(fields), len(target.children)))
        return found

    def is_chosen(self, leaf: Any) -> bool:
        """Return whether transforms take a stored leaf for some leaf of the target."""
        return isinstance(leaf, LeafHandle) and leaf in self.chosen

    def note_unused(self, stored: Node, path: Path) -> None:
        """Record the stored leaves below a node as unused."""
        if stored is not None and stored is not _Absent.ABSENT:
            self.outcome.unused.extend((*path, *rest) for rest, _ in iter_leaves(stored))

    def absent(self, target: Node, path: Path) -> Any:
        """Return the target's values for a node that the checkpoint lacks, and record each as missing."""
        if isinstance(target, Branch) and target.children:
            return {name: self.node(_Absent.ABSENT, child, (*path, name)) for name, child in target.children.items()}
        self.outcome.missing.append(path)
        if not isinstance(target, Branch):
            return FromTarget(target, _Absent.ABSENT.value)
        self.outcome.empty.add(path)
        return {}


def _keep_target(target: Node, why: str) -> Any:
    if not isinstance(target, Branch):
        return FromTarget(target, why)
    return {name: _keep_target(child, why) for name, child in target.children.items()}


def _same_names(stored: Node, target: Node) -> bool:
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return not isinstance(stored, Branch) and not (isinstance(target, Branch) and target.children)
    return stored.children.keys() == target.children.keys() and all(
        _same_names(stored.children[name], child) for name, child in target.children.items()
    )
