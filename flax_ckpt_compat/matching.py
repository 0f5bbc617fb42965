"""Checkpoint tree + target tree → where each target leaf comes from; reads no array data."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_leaves, show_path

# How flax before 0.3.6 wrote a namedtuple: three maps instead of one.
_OLD_NAMEDTUPLE = {"name", "fields", "values"}
_MAX_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A target leaf that comes from the checkpoint.

    Attributes:
        node: a leaf handle, None, or a whole branch where the target asks for whatever is there.
        target: the target's leaf, which says how to place and cast.
    """

    node: Node
    target: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A target leaf that keeps the target's value."""

    value: Any


@dataclasses.dataclass(slots=True)
class Match:
    """The outcome.

    Attributes:
        sources: nested dicts with the target's structure; leaves are `Stored` or `Kept`.
        missing: key paths of target leaves that the checkpoint lacks.
        empty: those of them that are containers without children, such as optax.EmptyState.
        unused: key paths of stored leaves that the target does not ask for.
        shapes: (key path, stored shape, target shape) where they differ.
    """

    sources: Any = None
    missing: list[Path] = dataclasses.field(default_factory=list)
    empty: set[Path] = dataclasses.field(default_factory=set)
    unused: list[Path] = dataclasses.field(default_factory=list)
    shapes: list[tuple[Path, tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=list)


def match(stored: Node, target: Node, *, lenient: bool, takes_anything: Callable[[Path], bool]) -> Match:
    """Pairs the leaves of a target with those of a checkpoint.

    Args:
        stored: tree of leaf handles.
        target: tree of the target's own leaves.
        lenient: Orbax's transform semantics: None in the target stays None, a stored None counts as missing.
        takes_anything: true for key paths of target nodes whose type restores foreign structures by its own rules.
    """
    outcome = Match()
    outcome.sources = _Matcher(outcome, lenient, takes_anything).node(stored, target, ())
    return outcome


@dataclasses.dataclass(slots=True)
class _Matcher:
    outcome: Match
    lenient: bool
    takes_anything: Callable[[Path], bool]

    def node(self, stored: Node, target: Node, path: Path) -> Any:
        if not isinstance(target, Branch):
            return self.leaf(stored, target, path)
        if isinstance(stored, Branch):
            return self.branch(stored, target, path)
        if target.children:
            return self.absent(target, path)
        if stored is not None:
            self.outcome.unused.append(path)
        return {}

    def branch(self, stored: Branch, target: Branch, path: Path) -> Any:
        there = _modern(stored) if target.container is Container.NAMEDTUPLE else stored.children
        if self.takes_anything(path) and not _same_names(stored, target):
            return Stored(stored, None)
        for name, child in there.items():
            if name not in target.children:
                self.outcome.unused.extend((*path, name, *rest) for rest, _ in iter_leaves(child))
        return {
            name: self.node(there[name], child, (*path, name)) if name in there else self.absent(child, (*path, name))
            for name, child in target.children.items()
        }

    def leaf(self, stored: Node, target: Any, path: Path) -> Any:
        if self.lenient and target is None:
            return Kept(None)
        if self.lenient and stored is None:
            return self.absent(target, path)
        shape = getattr(target, "shape", None)
        if shape is not None and isinstance(stored, LeafHandle) and _differ(stored, tuple(shape)):
            self.outcome.shapes.append((path, stored.shape, tuple(shape)))
        return Stored(stored, target)

    def absent(self, target: Node, path: Path) -> Any:
        """The target's own values for a node that the checkpoint lacks, each noted as missing."""
        if isinstance(target, Branch) and target.children:
            return {name: self.absent(child, (*path, name)) for name, child in target.children.items()}
        self.outcome.missing.append(path)
        if not isinstance(target, Branch):
            return Kept(target)
        self.outcome.empty.add(path)
        return {}


def _differ(stored: LeafHandle, shape: tuple[int, ...]) -> bool:
    if stored.kind is LeafKind.PRNG_KEY:
        # The stored shape is that of the key data; a typed target shows the shape of the keys.
        return stored.shape[: len(shape)] != shape
    return stored.kind in (LeafKind.ARRAY, LeafKind.NUMPY_SCALAR) and stored.shape != shape


def _modern(stored: Branch) -> dict[str, Node]:
    fields, values = stored.children.get("fields"), stored.children.get("values")
    old = stored.children.keys() == _OLD_NAMEDTUPLE and isinstance(fields, Branch) and isinstance(values, Branch)
    if not old or not isinstance(fields, Branch) or not isinstance(values, Branch):
        return stored.children
    return {fields.children[index].read(): value for index, value in values.children.items()}


def _same_names(stored: Node, target: Node) -> bool:
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return not isinstance(stored, Branch) and not (isinstance(target, Branch) and target.children)
    return stored.children.keys() == target.children.keys() and all(
        _same_names(stored.children[name], child) for name, child in target.children.items()
    )


def explain_missing(match: Match, stored: Node, source: str) -> str:
    """The message for missing leaves: every path, what is stored instead, and the remedy."""
    names = [show_path(path) for path, _ in iter_leaves(stored)]
    lines, any_near = [f"{source} lacks {len(match.missing)} of the leaves that the target asks for:"], False
    for number, path in enumerate(match.missing):
        near = _nearest(show_path(path), names) if number < _MAX_SHOWN else []
        any_near = any_near or bool(near)
        line = f"  {show_path(path)}" + (f"   (stored: {', '.join(near)})" if near else "")
        lines.append(line + ("   (empty: holds no values)" if path in match.empty else ""))
    if not any_near:
        lines.append(_top_level(stored))
    lines.append(
        "To keep the target's own values for them, pass orbax_transforms={} to restore_checkpoint, or set "
        "flax_ckpt_compat.config.update(missing_leaves='keep')."
    )
    return "\n".join(lines)


def _top_level(stored: Node) -> str:
    if not isinstance(stored, Branch):
        return "The checkpoint is a single value, without names."
    if not stored.children:
        return "The checkpoint holds no names at all."
    return f"None of the stored names is similar. At the top level the checkpoint holds: {shorten(stored.children)}"


def explain_shapes(match: Match, source: str, *, refused: bool) -> str:
    """The message for shapes that differ: a line for every leaf up to twenty, and what to do."""
    shown = [f"  {show_path(path)}: stored {was}, target {want}" for path, was, want in match.shapes[:_MAX_SHOWN]]
    if len(match.shapes) > _MAX_SHOWN:
        shown.append(f"  and {len(match.shapes) - _MAX_SHOWN} more")
    remedy = "To get the stored arrays all the same, set flax_ckpt_compat.config.update(shape_mismatch='warn')."
    first = f"{source}: {len(match.shapes)} of the stored arrays have another shape than the target's"
    first += ":" if refused else "; they are returned as stored:"
    last = "Change the model's configuration to the one that was saved." + (f" {remedy}" if refused else "")
    return "\n".join([first, *shown, last])


def _nearest(wanted: str, names: list[str]) -> list[str]:
    """Stored names like this one: the same last part first, then the most similar text."""
    last = wanted.rpartition("/")[2]
    same_last = [name for name in names if name.rpartition("/")[2] == last]
    return difflib.get_close_matches(wanted, (same_last or names)[:2000], n=2, cutoff=0.5)


def shorten(paths: Iterable[str]) -> str:
    """Paths for one line of a log: all of them up to twenty, then how many more."""
    shown = list(paths)
    more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    return ", ".join(shown[:_MAX_SHOWN]) + more
