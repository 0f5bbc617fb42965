"""Checkpoint tree + target tree → where each target leaf comes from; reads no array data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves
from flax_ckpt_compat.leaves import Computed, Kept, Own, Stored, handles_of
from flax_ckpt_compat.old_namedtuples import fields_of

# Key path, stored shape, the target's shape.
ShapeDifference = tuple[Path, tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(slots=True)
class Match:
    """The outcome.

    Attributes:
        sources: nested dicts with the target's structure; leaves are `Stored` or `Kept`.
        missing: key paths of target leaves that the checkpoint lacks, and that nothing says to keep.
        empty: those of them that are containers without children, such as optax.EmptyState.
        unused: key paths of stored leaves that the target does not ask for.
        shapes: (key path, stored shape, target shape) where they differ.
    """

    sources: Any = None
    missing: list[Path] = dataclasses.field(default_factory=list)
    empty: set[Path] = dataclasses.field(default_factory=set)
    unused: list[Path] = dataclasses.field(default_factory=list)
    shapes: list[ShapeDifference] = dataclasses.field(default_factory=list)


# What a target leaf gets; None leaves it to the checkpoint's leaf of the same path.
Choose = Callable[[Path, Any], Stored | Kept | None]


def match(
    stored: Node,
    target: Node,
    *,
    lenient: bool,
    takes_anything: Callable[[Path], bool],
    choose: Choose | None = None,
) -> Match:
    """Pairs the leaves of a target with those of a checkpoint.

    Args:
        stored: tree of leaf handles, or of what rules made of them.
        target: tree of the target's own leaves.
        lenient: Orbax's transform semantics: None in the target stays None, a stored None counts as missing.
        takes_anything: true for key paths of target nodes whose type restores foreign structures by its own rules.
        choose: asked for every leaf of the target but None.
    """
    outcome = Match()
    matcher = _Matcher(outcome, lenient, takes_anything, choose)
    outcome.sources = matcher.node(stored, target, ())
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
    chosen: set[int] = dataclasses.field(default_factory=set)

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
            return Stored(stored, None)
        for name, child in there.items():
            if name not in target.children:
                self.leave(child, (*path, name))
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
                and self.choose is None
            ):
                children[name] = Stored(found, child)
            else:
                children[name] = self.node(found, child, (*path, name))
        return children

    def leaf(self, stored: Node, target: Any, path: Path) -> Any:
        if self.lenient and target is None:
            self.leave(stored, path)
            return Kept(None, "None in the target")
        source = self.choose(path, target) if self.choose is not None else None
        if source is not None:
            self.leave(stored, path)
            if isinstance(source, Stored):
                self.chosen.update(map(id, handles_of(source)))
                self.compare(source.node, target, path)
            return source
        if stored is _Nothing.ABSENT or (self.lenient and (stored is None or isinstance(stored, Branch))):
            self.leave(stored, path)
            return self.absent(target, path)
        self.compare(stored, target, path)
        return Stored(stored, target)

    def compare(self, stored: Node, target: Any, path: Path) -> None:
        """Notes a shape that is not the target's."""
        shape = getattr(target, "shape", None)
        if shape is not None and isinstance(stored, LeafHandle | Computed) and _differ(stored, tuple(shape)):
            assert stored.shape is not None  # it differs
            self.outcome.shapes.append((path, stored.shape, tuple(shape)))

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
            return Kept(target, _Nothing.ABSENT.value)
        self.outcome.empty.add(path)
        return {}


def _kept(target: Node, why: str) -> Any:
    if not isinstance(target, Branch):
        return Kept(target, why)
    return {name: _kept(child, why) for name, child in target.children.items()}


def _differ(stored: LeafHandle | Computed, shape: tuple[int, ...]) -> bool:
    if isinstance(stored, Computed):
        return stored.shape is not None and stored.shape != shape
    if stored.kind is LeafKind.PRNG_KEY:
        # The stored shape is that of the key data; a typed target shows the shape of the keys.
        return stored.shape[: len(shape)] != shape
    return stored.kind in (LeafKind.ARRAY, LeafKind.NUMPY_SCALAR) and stored.shape != shape


def _same_names(stored: Node, target: Node) -> bool:
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return not isinstance(stored, Branch) and not (isinstance(target, Branch) and target.children)
    return stored.children.keys() == target.children.keys() and all(
        _same_names(stored.children[name], child) for name, child in target.children.items()
    )
