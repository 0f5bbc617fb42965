"""Apply the policies to a planned restore: raise, warn or ignore. Reads no array data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from flax_ckpt_compat import config
from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import show_path
from flax_ckpt_compat._restore import messages
from flax_ckpt_compat._restore.plan import ShapeDifference, TreePlan

_log = logging.getLogger("flax_ckpt_compat")

# An error's class and its factory: messages with suggestions take long, and a plan needs none.
Refusal = tuple[type[errors.CheckpointError], Callable[[], errors.CheckpointError]]


def refusals(plan: TreePlan, *, as_flax: bool = False, proposes: bool = True) -> Iterator[Refusal]:
    """Yield the errors of a restore, which raises the first; or ``as_flax`` those of ``restore_checkpoint``.

    Those about kinds propose rules unless a plan does it, which does not list the kinds."""
    transforms, settings = plan.options.transforms, config.current() if as_flax else plan.options.settings
    lenient = transforms.orbax_semantics if as_flax else transforms.lenient
    if plan.missing and not lenient and settings.missing_leaves == "error":
        yield errors.MissingLeavesError, lambda: _missing_error(plan)
    if plan.kinds and settings.kind_mismatch == "error":  # before what is unused: entries of a longer sequence are, too
        yield errors.KindMismatchError, lambda: _kinds_error(plan, proposes)
    if unused_policy(plan, settings, lenient=lenient) == "error":
        yield errors.UnusedLeavesError, lambda: _unused_error(plan)
    if plan.shapes and settings.shape_mismatch == "error":
        yield errors.ShapeMismatchError, lambda: _shapes_error(plan, plan.shapes)
    for problem in plan.problems:
        yield type(problem), lambda problem=problem: problem  # type: ignore[misc]


def enforce(plan: TreePlan) -> None:
    """Apply all policies: raise the first of `refusals`, or log the differences."""
    settings, lenient = plan.options.settings, plan.options.transforms.lenient
    missing = tuple(map(show_path, plan.missing))
    if plan.target is not None and (unmatched := plan.options.transforms.explain_unmatched(plan.target.node)):
        kept = f"; these leaves kept the target's own values: {one_line(missing)}" if missing and lenient else ""
        _log.warning("%s: %s%s", plan.path, unmatched, kept)
    for _, error in refusals(plan):
        raise error()
    if missing and lenient:
        _log.info("%s: not in the checkpoint, kept: %s", plan.path, one_line(missing))
    elif missing and settings.missing_leaves == "warn":
        _log.warning("%s\nThe target's own values were kept.", messages.missing_leaves(plan))
    if plan.kinds and settings.kind_mismatch == "warn":
        _log.warning(messages.other_kinds(plan, refused=False))
    enforce_shapes(plan, plan.shapes)
    if plan.unused and plan.target is not None:
        is_warned = unused_policy(plan, settings, lenient=lenient) == "warn"
        level = logging.WARNING if is_warned else logging.INFO
        _log.log(level, "%s: not in the target, dropped: %s", plan.path, one_line(map(show_path, plan.unused)))
        if settings.unused_leaves in ("auto", "warn") and (counts := messages.counts_of_schedules(plan)):
            _log.warning("%s: %s", plan.path, counts)


def unused_policy(plan: TreePlan, settings: config.Settings, *, lenient: bool) -> str:
    """Return what happens to stored leaves that the target lacks: error, warn or ignore."""
    if plan.target is None or not plan.unused:
        return "ignore"
    if settings.unused_leaves != "auto":
        return settings.unused_leaves if messages.unused_values(plan) else "ignore"
    if plan.cuts_layers is None:
        plan.cuts_layers = any(messages.longer_rows(plan.unused, plan.tree, plan.target.node))
    # Layers that are cut off are no other part of the state, which a program may not want.
    if not plan.cuts_layers:
        return "ignore"
    return "error" if settings.kind_mismatch == "error" and not lenient else "warn"


def enforce_shapes(plan: TreePlan, shapes: Sequence[ShapeDifference]) -> None:
    """Apply the policy for shapes that differ."""
    policy = plan.options.settings.shape_mismatch
    if not shapes or policy == "ignore":
        return
    if policy == "error":
        raise _shapes_error(plan, shapes)
    _log.warning(messages.other_shapes(plan, shapes, refused=False))


def _missing_error(plan: TreePlan) -> errors.MissingLeavesError:
    message = f"{messages.missing_leaves(plan)}\n{messages.missing_remedies(plan)}"
    return errors.MissingLeavesError(message, path=plan.path, missing=tuple(map(show_path, plan.missing)))


def _unused_error(plan: TreePlan) -> errors.UnusedLeavesError:
    unused = messages.unused_values(plan)
    return errors.UnusedLeavesError(messages.unused_leaves(plan), path=plan.path, leaf=show_path(unused[0]))


def _kinds_error(plan: TreePlan, proposes: bool) -> errors.KindMismatchError:
    message = messages.other_kinds(plan, refused=True, proposed=messages.proposal(plan) if proposes else "")
    return errors.KindMismatchError(message, path=plan.path, leaf=show_path(plan.kinds[0].path))


def _shapes_error(plan: TreePlan, shapes: Sequence[ShapeDifference]) -> errors.ShapeMismatchError:
    message = messages.other_shapes(plan, shapes, refused=True, proposed=messages.proposal(plan))
    return errors.ShapeMismatchError(message, path=plan.path, leaf=show_path(shapes[0][0]))
