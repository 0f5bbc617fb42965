"""A restore, told before it happens: what `plan_restore` gives."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from flax_ckpt_compat import config
from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import MissingLeavesError, ShapeMismatchError
from flax_ckpt_compat._core.tree import Branch, Path, iter_leaves, show_path
from flax_ckpt_compat._discovery import locating, opening
from flax_ckpt_compat._restore import pipeline as restore_pipeline
from flax_ckpt_compat._restore import placement, scalar_kinds
from flax_ckpt_compat._restore.policies import execution, refusals
from flax_ckpt_compat._restore.restore_plan import RestorePlan, TreePlan, plan_all
from flax_ckpt_compat._restore.transform_spec import TransformSpec
from flax_ckpt_compat._suggest import Suggestion
from flax_ckpt_compat._trees import depth, state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, FromCheckpoint, FromTarget, handles_of, needs
from flax_ckpt_compat._view import plan_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """One leaf of the result.

    Attributes:
        path: its key path, joined with ``/``.
        origin: ``checkpoint`` (as stored), ``computed`` (from stored leaves), ``target`` (its own value is kept), or
            ``missing`` (the restore is going to raise).
        sources: key paths, in the checkpoint, of the stored leaves that it comes from.
        how: what is computed, or why the target's value is kept; else empty.
        shape: of the result; None where it is no array, or where only a function of the caller's knows.
        dtype: of the result, after casting; None as for ``shape``.
        target_shape, target_dtype: of the target's leaf; None where it is no array.
        nbytes: size in memory of the stored data that it needs, in bytes.
    """

    path: str
    origin: str
    sources: tuple[str, ...]
    how: str
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    target_shape: tuple[int, ...] | None
    target_dtype: np.dtype[Any] | None
    nbytes: int

    @property
    def is_reshaped(self) -> bool:
        """Whether the result has another shape than the target's leaf."""
        return self.shape is not None and self.target_shape is not None and self.shape != self.target_shape

    @property
    def is_retyped(self) -> bool:
        """Whether the result has another dtype than the target's leaf."""
        return self.dtype is not None and self.target_dtype is not None and self.dtype != self.target_dtype


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a restore is going to do; prints as a table.

    Attributes:
        path: absolute path of the checkpoint.
        format: ``msgpack`` or ``orbax``.
        leaves: every leaf of the result, in the target's order.
        unused: key paths of the stored leaves that nothing asks for.
        nbytes: size in memory of all stored data that is going to be read, in bytes.
        raises: name of the error that `flax_ckpt_compat.restore` raises with these arguments, or None. Damaged data,
            functions of the caller's, and types with rules of their own show only in the restore itself.
        why: the error's message, where the leaves do not say it already; else empty.
    """

    path: str
    format: str
    leaves: tuple[PlannedLeaf, ...]
    unused: tuple[str, ...]
    nbytes: int
    raises: str | None
    why: str = ""
    _works: tuple[TreePlan, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """Key paths of the leaves for which the restore is going to raise `MissingLeavesError`."""
        return tuple(leaf.path for leaf in self.leaves if leaf.origin == "missing")

    @functools.cached_property
    def suggestion(self) -> Suggestion | None:
        """Rules that would map the checkpoint to the target, where leaves are missing or shapes differ; else None."""
        found: Iterator[Suggestion] = filter(None, (work.suggest() for work in self._works))
        return next(found, None)

    def __str__(self) -> str:
        return plan_text.plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from plan_text.rich(self, options.max_width)

    def __reduce__(self) -> Any:
        # Only what it says; the trees behind it, and the target's arrays, stay where they are.
        return Plan, (self.path, self.format, self.leaves, self.unused, self.nbytes, self.raises, self.why)


@depth.limited("restored")
def plan_restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    step: int | float | str | None = None,
    prefix: str = "checkpoint_",
    transforms: Any = None,
    transforms_default_to_original: bool = True,
    missing_leaves: Literal["error", "warn", "keep"] | None = None,
    shape_mismatch: Literal["warn", "error", "ignore"] | None = None,
    kind_mismatch: Literal["warn", "error", "ignore"] | None = None,
    dtype: Literal["stored", "target"] | None = None,
    structure: Literal["flax", "stored"] | None = None,
    must_exist: bool | None = None,
    mapped: bool | None = None,
) -> Plan:
    """Say what `flax_ckpt_compat.restore` does with these arguments, without reading array data.

    ``restore_checkpoint`` does the same with ``shape_mismatch="warn", kind_mismatch="warn"``, and with
    ``missing_leaves="keep"`` where it is given ``orbax_transforms`` that are not rules.

    Args:
        path: a directory of checkpoints, or one checkpoint.
        target: tree of the wanted structure, or None.
        step: which checkpoint of the directory; None takes the latest complete one.
        prefix: literal text before the step in the checkpoints' names.
        transforms: rules or transforms, as for ``restore_checkpoint``'s ``orbax_transforms``.
        transforms_default_to_original: what no transform matches comes from the checkpoint; else from the target.
        missing_leaves, shape_mismatch, kind_mismatch, dtype, structure, must_exist, mapped: policies with the defaults
            of `flax_ckpt_compat.restore`; None is what is set, or its default. With ``must_exist=False`` and nothing
            there, every leaf is the target's, and the plan's format is empty.

    Raises:
        CheckpointNotFoundError: there is none.
        SettingError: a policy has no such value.
        TransformError, NameCollisionError: a rule or transform that does not fit.
        IncompleteCheckpointError, UnrecognizedFormatError, CorruptCheckpointError: what is there cannot be opened.
        StorageError: the file system refused.
    """
    ckpt_dir = os.fspath(path)
    adaptation = TransformSpec(transforms, default_to_original=transforms_default_to_original, strict=True)
    given: dict[str, Any] = {
        "missing_leaves": missing_leaves,
        "shape_mismatch": shape_mismatch,
        "kind_mismatch": kind_mismatch,
        "dtype": dtype,
        "structure": structure,
        "must_exist": must_exist,
        "mapped": mapped,
    }
    given = {name: value for name, value in given.items() if value is not None}

    def plan_one(found: str) -> Plan:
        before = locating.identity(found)
        with closing(opening.Opened(found)) as opened:
            plan = _plan(opened, plan_all(opened, target, adaptation))
        locating.check_same(found, before)
        return plan

    with config.defaults(config.STRICT), config.override(**given):
        restore_pipeline.wait_for_pending_saves(ckpt_dir, prefix)
        return locating.read_found(ckpt_dir, step, prefix, plan_one, lambda: _nothing(paths.absolute(ckpt_dir), target))


def _nothing(path: str, target: Any) -> Plan:
    """The plan of a restore that returns its target."""
    leaves = iter_leaves(state_dict.describe(target)) if target is not None else ()
    told = [_kept(show_path(place), leaf, "there is no checkpoint") for place, leaf in leaves]
    return Plan(path, "", tuple(told), (), 0, None)


def _kept(path: str, leaf: Any, why: str) -> PlannedLeaf:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return PlannedLeaf(path, "target", (), why, shape, dtype, shape, dtype, 0)


def _plan(opened: opening.Opened, works: RestorePlan) -> Plan:
    leaves: list[PlannedLeaf] = []
    unused: list[str] = []
    needed: dict[Any, int] = {}
    for name, work in works.items.items():
        item = (name,) if works.is_mapping else ()
        describe = _Describer(work, item)
        node = None if work.target is None else work.target.node
        for path, source, target in _pairs(work.match.sources, node, ()):
            leaves.append(describe(path, source, target))
            needed.update(needs(source))
        leaves.extend(
            describe(path, FromTarget({}, "not in the checkpoint"), None) for path in sorted(work.match.empty)
        )
        there = dict(iter_leaves(work.tree)) if work.match.unused else {}
        # None and empty containers hold no values that anybody could miss.
        idle = [(path, there[path]) for path in work.match.unused if isinstance(there[path], LeafHandle | Derived)]
        unused.extend(show_path((*item, *(leaf.path if isinstance(leaf, LeafHandle) else path))) for path, leaf in idle)
    formats = {work.reader.format.value for work in works.items.values()}
    return Plan(
        opened.path,
        formats.pop() if len(formats) == 1 else "orbax",
        tuple(leaves),
        tuple(unused),
        sum(needed.values()),
        *_refusal(works),
        tuple(works.items.values()),
    )


def _refusal(works: RestorePlan) -> tuple[str | None, str]:
    """The first error of a restore, and what it says beyond what the plan says of its leaves."""
    for work in works.items.values():
        for kind, error in refusals(work, execution(work).problems):
            is_told = kind is MissingLeavesError or (kind is ShapeMismatchError and work.match.shapes)
            return kind.__name__, "" if is_told else str(error())
    return None, ""


def _pairs(sources: Any, target: Any, path: Path) -> Iterator[tuple[Path, Any, Any]]:
    """(key path, source, target's leaf) of every leaf; without a target the sources are a branch."""
    if not isinstance(sources, dict | Branch):
        yield path, sources, target
        return
    children = sources.children if isinstance(sources, Branch) else sources
    for name, child in children.items():
        below = target.children.get(name) if isinstance(target, Branch) else None
        yield from _pairs(child, below, (*path, name))


class _Describer:
    """Describes the leaves of one tree."""

    def __init__(self, work: TreePlan, item: Path):
        settings = config.current()
        self._item, self._cast = item, settings.dtype == "target"
        raises = settings.missing_leaves == "error" and not work.adaptation.lenient
        self._missing = frozenset(work.match.missing) if raises else frozenset()

    def __call__(self, path: Path, source: FromCheckpoint | FromTarget, target: Any) -> PlannedLeaf:
        wanted = getattr(target, "shape", None), getattr(target, "dtype", None)
        shape, dtype = wanted
        sources: tuple[str, ...] = ()
        if isinstance(source, FromTarget):
            origin, how = "missing" if path in self._missing else "target", source.why
        else:
            node = source.node
            origin, how = _origin_of(node)
            sources = tuple(self._name(handle.path) for _, leaf in iter_leaves(node) for handle in handles_of(leaf))
            shape, dtype = getattr(node, "shape", None), getattr(node, "dtype", None)
            if isinstance(node, LeafHandle) and node.kind not in (LeafKind.ARRAY, LeafKind.NUMPY_SCALAR):
                # Of a key, shape and dtype are those of its data; Python values have none.
                wanted = shape, dtype = None, None
                if isinstance(target, jax.ShapeDtypeStruct) and scalar_kinds.is_converted(node, target, self._cast):
                    shape, dtype = (), scalar_kinds.stored_dtype(node)
                    wanted = target.shape, target.dtype
            dtype = None if dtype is None else placement.TargetLeafSpec(target, self._cast, False).dtype(dtype)
        return PlannedLeaf(
            self._name(path),
            origin,
            sources,
            how,
            None if shape is None else tuple(shape),
            dtype,
            None if wanted[0] is None else tuple(wanted[0]),
            wanted[1],
            sum(needs(source).values()),
        )

    def _name(self, path: Path) -> str:
        return show_path((*self._item, *path))


def _origin_of(node: Any) -> tuple[str, str]:
    if isinstance(node, Derived):
        return "computed", node.how
    if isinstance(node, Branch):
        return "checkpoint", "by the rules of the target's own type, or leaf by leaf if they refuse it"
    return "checkpoint", ""
