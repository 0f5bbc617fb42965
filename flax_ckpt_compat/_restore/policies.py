"""Apply the policies to a restore that was planned: raise, warn, or say nothing. Reads no array data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DtypeMismatchError,
    KindMismatchError,
    MissingLeavesError,
    ShapeMismatchError,
)
from flax_ckpt_compat._core.folding import MAX_SHOWN, one_line
from flax_ckpt_compat._core.tree import iter_leaves, show_path
from flax_ckpt_compat._restore import kind_differences, matching, messages, scalar_kinds, target_shardings
from flax_ckpt_compat._restore.problems import Problems, no_cast
from flax_ckpt_compat._restore.restore_plan import TreePlan
from flax_ckpt_compat._restore.result_builder import Execution

_log = logging.getLogger("flax_ckpt_compat")
# Stored leaves, above which an error does not wait for a suggestion.
_MANY = 1500

# The class of an error, and what makes it: messages with proposals take long, and a plan needs none.
Refusal = tuple[type[CheckpointError], Callable[[], CheckpointError]]


def execution(work: TreePlan) -> Execution:
    """Return a planned restore, laid out."""
    settings = config.current()
    cast = settings.dtype == "target"
    return Execution(work.match.sources, work.reader, cast=cast, mapped=settings.mapped)


def refusals(work: TreePlan, problems: Problems) -> Iterator[Refusal]:
    """Yield why a restore raises, the first one being what it raises."""
    settings, match = config.current(), work.match
    module = None if work.target is None else kind_differences.module_difference(work.target.tree)
    if module is not None and settings.kind_mismatch == "error":
        yield KindMismatchError, lambda: _kinds_error(work, [module])
    if match.missing and not work.adaptation.lenient and settings.missing_leaves == "error":
        yield MissingLeavesError, lambda: _missing_error(work)
    if match.kinds and settings.kind_mismatch == "error":
        yield KindMismatchError, lambda: _kinds_error(work, match.kinds)
    if match.shapes and settings.shape_mismatch == "error":
        yield ShapeMismatchError, lambda: _shapes_error(work, match.shapes)
    yield from _impossible(work, problems)


def _impossible(work: TreePlan, problems: Problems) -> Iterator[Refusal]:
    """Yield what no policy allows."""
    for handle in problems.doubtful:
        yield CorruptCheckpointError, lambda handle=handle: scalar_kinds.doubtful_key(handle)  # type: ignore[misc]
    for leaf, shape, sharding in problems.misfits:
        yield ShapeMismatchError, _later(target_shardings.misfit, leaf, shape, sharding, work.reader.path)
    for leaf, stored, wanted in problems.casts:
        yield DtypeMismatchError, _later(no_cast, leaf, stored, wanted, work.reader.path)


def _later(make: Callable[..., CheckpointError], *arguments: Any) -> Callable[[], CheckpointError]:
    return lambda: make(*arguments)


def judge(work: TreePlan, problems: Problems) -> None:
    """Raise what a policy says, else log what differs.

    Raises:
        CheckpointError: the first of `refusals`.
    """
    match, path, settings = work.match, work.path, config.current()
    missing = tuple(map(show_path, match.missing))
    _warn_of_idle(work, missing)
    for _, error in refusals(work, problems):
        raise error()
    if missing and work.adaptation.lenient:
        _log.info("%s: not in the checkpoint, kept: %s", path, one_line(missing))
    elif missing and settings.missing_leaves == "warn":
        _log.warning("%s\nThe target's own values were kept.", messages.missing_leaves(match, work.tree, path))
    if match.kinds and settings.kind_mismatch == "warn":
        _log.warning(kind_differences.explain(match.kinds, path, refused=False))
    judge_shapes(work, match.shapes)
    if match.unused and work.target is not None:
        _log.info("%s: not in the target, dropped: %s", path, one_line(map(show_path, match.unused)))


def _warn_of_idle(work: TreePlan, missing: tuple[str, ...]) -> None:
    """Name transforms that match nothing, and what is left to the target for it."""
    idle = None if work.target is None else work.adaptation.explain_idle(work.target.node, work.tree)
    if idle:
        kept = f"; these leaves kept the target's own values: {one_line(missing)}" if work.adaptation.lenient else ""
        _log.warning("%s: %s%s", work.path, idle, kept if missing else "")


def judge_shapes(work: TreePlan, shapes: Sequence[matching.ShapeDifference]) -> None:
    """Raise or log what the policy says for shapes that differ."""
    policy = config.current().shape_mismatch
    if not shapes or policy == "ignore":
        return
    if policy == "error":
        raise _shapes_error(work, shapes)
    _log.warning(_explain_shapes(work, shapes, refused=False))


def _missing_error(work: TreePlan) -> MissingLeavesError:
    assert work.target is not None  # whose leaves they are
    message = messages.missing_leaves(work.match, work.tree, work.path)
    remedies = messages.missing_remedies(work.match, work.target.node, _suggestion(work))
    missing = tuple(map(show_path, work.match.missing))
    return MissingLeavesError(f"{message}\n{remedies}", path=work.path, missing=missing)


def _kinds_error(work: TreePlan, differences: Sequence[kind_differences.KindDifference]) -> KindMismatchError:
    message = kind_differences.explain(differences, work.path, refused=True)
    return KindMismatchError(message, path=work.path, leaf=show_path(differences[0].path))


def _shapes_error(work: TreePlan, shapes: Sequence[matching.ShapeDifference]) -> ShapeMismatchError:
    message = _explain_shapes(work, shapes, refused=True)
    return ShapeMismatchError(message, path=work.path, leaf=show_path(shapes[0][0]))


def _explain_shapes(work: TreePlan, shapes: Sequence[matching.ShapeDifference], *, refused: bool) -> str:
    assert work.target is not None  # whose shapes they are not
    suggestion = _suggestion(work) if refused else ""
    return messages.other_shapes(
        shapes, work.path, work.target.node, arrays=work.arrays, refused=refused, suggestion=suggestion
    )


def _suggestion(work: TreePlan) -> str:
    """Return what to add to a message about leaves: rules that map the checkpoint to the target, if that is clear."""
    if sum(1 for _ in iter_leaves(work.tree)) > _MANY:
        return "flax_ckpt_compat.plan_restore looks for rules that map it, which takes seconds for so many leaves."
    suggestion = work.suggest()
    if suggestion is None or not suggestion.confident:
        return ""
    if len(suggestion.steps) > MAX_SHOWN:
        return f"{len(suggestion.steps)} rules would map it: the attribute suggestion of flax_ckpt_compat.plan_restore."
    after = ", after those that were given" if work.adaptation.rules else ""
    return f"These rules would map it to the target{after} (orbax_transforms= in restore_checkpoint):\n{suggestion}"
