"""Checkpoint tree + target tree → where each target leaf comes from; reads no array data."""

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
    """The outcome.

    Attributes:
        sources: nested dicts with the target's structure; leaves are `FromCheckpoint` or `FromTarget`.
        missing: key paths of target leaves that the checkpoint lacks, and that nothing says to keep.
        empty: those of them that are containers without children, such as optax.EmptyState.
        unused: key paths of stored leaves that the target does not ask for.
        shapes: (key path, stored shape, target shape) where they differ.
        kinds: nodes that the checkpoint has as something else than the target.
    """

    sources: Any = None
    missing: list[Path] = dataclasses.field(default_factory=list)
    empty: set[Path] = dataclasses.field(default_factory=set)
    unused: list[Path] = dataclasses.field(default_factory=list)
    shapes: list[ShapeDifference] = dataclasses.field(default_factory=list)
    kinds: list[kind_differences.KindDifference] = dataclasses.field(default_factory=list)


# What a target leaf gets; None leaves it to the checkpoint's leaf of the same path.
Choose = Callable[[Path, Any], FromCheckpoint | FromTarget | None]


def match(
    stored: Node,
    target: Node,
    *,
    lenient: bool,
    takes_anything: Callable[[Path], bool],
    choose: Choose | None = None,
    cast: bool = False,
) -> Match:
    """Pairs the leaves of a target with those of a checkpoint.

    Args:
        stored: tree of leaf handles, or of what rules made of them.
        target: tree of the target's own leaves.
        lenient: Orbax's transform semantics: None in the target stays None, a stored None counts as missing.
        takes_anything: true for key paths of target nodes whose type restores foreign structures by its own rules.
        choose: asked for every leaf of the target but None.
        cast: the setting ``dtype="target"``, which makes arrays of numbers where the target has them.
    """
    outcome = Match()
    matcher = _Matcher(outcome, lenient, takes_anything, choose, cast)
    outcome.sources = matcher.node(stored, target, ())
    outcome.kinds += matcher.longer_sequences()
    if matcher.chosen:
        there = dict(iter_leaves(stored))
        outcome.unused = [path for path in outcome.unused if id(there.get(path)) not in matcher.chosen]
    return outcome


class _Nothing(enum.Enum):
    ABSENT = "not in the checkpoint"


@dataclasses.dataclass(slots=True)
class _Matcher:
    outcome: Match
    lenient: bool
    takes_anything: Callable[[Path], bool]
    choose: Choose | None
    cast: bool
    chosen: set[int] = dataclasses.field(default_factory=set)
    longer: list[tuple[Path, Mapping[str, Node], Branch]] = dataclasses.field(default_factory=list)

    def node(self, stored: Node, target: Node, path: Path) -> Any:
        if stored is Own.TARGET:
            return _kept(target, "from_target")
        if not isinstance(target, Branch):
            return self.leaf(stored, target, path)
        if isinstance(stored, Branch):
            return self.branch(stored, target, path)
        self.leave(stored, path)
        return self.absent(target, path) if target.children or stored is _Nothing.ABSENT else {}

    def branch(self, stored: Branch, target: Branch, path: Path) -> Any:
        there = fields_of(stored, target)
        if self.choose is None and self.takes_anything(path) and not _same_names(stored, target):
            return FromCheckpoint(stored, None)
        for name, child in there.items():
            if name not in target.children:
                self.leave(child, (*path, name))
        if len(there) > len(target.children) and target.container.is_sequence:
            self.longer.append((path, there, target))
        # A loop that calls node itself, because Flax's own functions nest no fewer than three calls for a level, and
        # what Flax restores within the recursion limit is restored here.
        children = {}
        for name, child in target.children.items():
            found = there.get(name, _Nothing.ABSENT)
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
            self.leave(stored, path)
            return FromTarget(None, "None in the target")
        source = self.choose(path, target) if self.choose is not None else None
        if source is not None:
            self.leave(stored, path)
            if isinstance(source, FromCheckpoint):
                self.chosen.update(map(id, handles_of(source)))
                source.target = self.compare(source.node, source.target, path)
            return source
        if stored is _Nothing.ABSENT or (self.lenient and (stored is None or isinstance(stored, Branch))):
            self.leave(stored, path)
            return self.absent(target, path)
        return FromCheckpoint(stored, self.compare(stored, target, path))

    def compare(self, stored: Node, target: Any, path: Path) -> Any:
        """Notes a shape, or else a kind, that is not the target's; returns the target if it can say what it wants."""
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
        """The stored shape, of keys that of their data unless the target has typed keys too."""
        is_key = isinstance(stored, LeafHandle) and stored.kind is LeafKind.PRNG_KEY and state_dict.is_prng_key(target)
        return stored.shape[:-1] if is_key and stored.shape is not None else stored.shape

    def longer_sequences(self) -> list[kind_differences.KindDifference]:
        """The sequences that the target has shorter, unless transforms take the entries for other leaves."""
        found = []
        for path, there, target in self.longer:
            left = [child for name, child in there.items() if name not in target.children and name.isdecimal()]
            leaves = [leaf for child in left for _, leaf in iter_leaves(child)]
            if left and not (leaves and all(id(leaf) in self.chosen for leaf in leaves)):
                found.append(kind_differences.longer_sequence(path, len(there), len(target.children)))
        return found

    def leave(self, stored: Node, path: Path) -> None:
        """Notes what is stored here as unused."""
        if stored is not None and stored is not _Nothing.ABSENT:
            self.outcome.unused.extend((*path, *rest) for rest, _ in iter_leaves(stored))

    def absent(self, target: Node, path: Path) -> Any:
        """The target's own values for a node that the checkpoint lacks, each noted as missing."""
        if isinstance(target, Branch) and target.children:
            return {name: self.node(_Nothing.ABSENT, child, (*path, name)) for name, child in target.children.items()}
        self.outcome.missing.append(path)
        if not isinstance(target, Branch):
            return FromTarget(target, _Nothing.ABSENT.value)
        self.outcome.empty.add(path)
        return {}


def _kept(target: Node, why: str) -> Any:
    if not isinstance(target, Branch):
        return FromTarget(target, why)
    return {name: _kept(child, why) for name, child in target.children.items()}


def _same_names(stored: Node, target: Node) -> bool:
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return not isinstance(stored, Branch) and not (isinstance(target, Branch) and target.children)
    return stored.children.keys() == target.children.keys() and all(
        _same_names(stored.children[name], child) for name, child in target.children.items()
    )
