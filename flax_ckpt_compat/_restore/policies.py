"""Apply the policies to a planned restore: raise, warn or ignore. Reads no array data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from flax_ckpt_compat import config
from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core.text_formatting import MAX_SHOWN, one_line
from flax_ckpt_compat._core.tree import iter_leaves, show_path
from flax_ckpt_compat._restore import common_causes, leaf_kinds, messages
from flax_ckpt_compat._restore.plan import ShapeDifference, TreePlan

_log = logging.getLogger("flax_ckpt_compat")
# Number of stored leaves above which errors carry no suggestion.
_MANY = 20_000
# Length of a proposal, in characters, beyond which errors carry none.
_MAX_TEXT = 4000

# An error's class and its factory: messages with suggestions take long, and a plan needs none.
Refusal = tuple[type[errors.CheckpointError], Callable[[], errors.CheckpointError]]


def refusals(plan: TreePlan) -> Iterator[Refusal]:
    """Yield the errors of a restore; it raises the first."""
    settings = plan.options.settings
    if plan.missing and not plan.options.transforms.lenient and settings.missing_leaves == "error":
        yield errors.MissingLeavesError, lambda: _missing_error(plan)
    if plan.kinds and settings.kind_mismatch == "error":  # before what is unused: entries of a longer sequence are, too
        yield errors.KindMismatchError, lambda: _kinds_error(plan, plan.kinds)
    if unused_policy(plan) == "error":
        yield errors.UnusedLeavesError, lambda: _unused_error(plan)
    if plan.shapes and settings.shape_mismatch == "error":
        yield errors.ShapeMismatchError, lambda: _shapes_error(plan, plan.shapes)
    for problem in plan.problems:
        yield type(problem), lambda problem=problem: _with_remedy(plan, problem)  # type: ignore[misc]


def enforce(plan: TreePlan) -> None:
    """Apply all policies: raise the first of `refusals`, or log the differences."""
    settings, lenient = plan.options.settings, plan.options.transforms.lenient
    missing = tuple(map(show_path, plan.missing))
    _warn_of_unmatched(plan, missing)
    for _, error in refusals(plan):
        raise error()
    if missing and lenient:
        _log.info("%s: not in the checkpoint, kept: %s", plan.path, one_line(missing))
    elif missing and settings.missing_leaves == "warn":
        _log.warning("%s\nThe target's own values were kept.", messages.missing_leaves(plan))
    if plan.kinds and settings.kind_mismatch == "warn":
        _log.warning(leaf_kinds.explain(plan.kinds, plan.path, refused=False))
    enforce_shapes(plan, plan.shapes)
    if plan.unused and plan.target is not None:
        level = logging.WARNING if unused_policy(plan) == "warn" else logging.INFO
        _log.log(level, "%s: not in the target, dropped: %s", plan.path, one_line(map(show_path, plan.unused)))
        if settings.unused_leaves in ("auto", "warn") and (counts := messages.counts_of_schedules(plan)):
            _log.warning("%s: %s", plan.path, counts)


def unused_policy(plan: TreePlan) -> str:
    """Return what happens to stored leaves that the target lacks: error, warn or ignore."""
    settings = plan.options.settings
    if plan.target is None or not plan.unused:
        return "ignore"
    if settings.unused_leaves != "auto":
        return settings.unused_leaves if messages.unused_values(plan) else "ignore"
    if plan.cuts_layers is None:
        plan.cuts_layers = bool(common_causes.longer_rows(plan.unused, plan.tree, plan.target.node))
    # Layers that are cut off are no other part of the state, which a program may not want.
    if not plan.cuts_layers:
        return "ignore"
    is_error = settings.kind_mismatch == "error" and not plan.options.transforms.lenient
    return "error" if is_error else "warn"


def refused_by_flax_name(plan: TreePlan) -> bool:
    """Return whether ``restore_checkpoint``, which takes the settings as they are, refuses the plan, too."""
    settings, transforms = config.current(), plan.options.transforms
    unused = messages.unused_values(plan) if settings.unused_leaves == "error" and plan.target is not None else []
    return bool(
        (plan.missing and not transforms.orbax_semantics and settings.missing_leaves == "error")
        or (plan.kinds and settings.kind_mismatch == "error")
        or (plan.shapes and settings.shape_mismatch == "error")
        or unused
        or plan.problems
    )


def _warn_of_unmatched(plan: TreePlan, missing: tuple[str, ...]) -> None:
    """Warn about transforms that match nothing, and name the leaves that kept the target's values."""
    transforms = plan.options.transforms
    unmatched = None if plan.target is None else transforms.explain_unmatched(plan.target.node)
    if unmatched:
        kept = f"; these leaves kept the target's own values: {one_line(missing)}" if transforms.lenient else ""
        _log.warning("%s: %s%s", plan.path, unmatched, kept if missing else "")


def enforce_shapes(plan: TreePlan, shapes: Sequence[ShapeDifference]) -> None:
    """Apply the policy for shapes that differ."""
    policy = plan.options.settings.shape_mismatch
    if not shapes or policy == "ignore":
        return
    if policy == "error":
        raise _shapes_error(plan, shapes)
    _log.warning(_explain_shapes(plan, shapes, refused=False))


def _missing_error(plan: TreePlan) -> errors.MissingLeavesError:
    assert plan.target is not None
    message = messages.missing_leaves(plan)
    likely = messages.taken_away(plan) or common_causes.of_layers(plan) or _suggestion(plan)
    remedies = messages.missing_remedies(plan.missing, plan.target.node, likely)
    missing = tuple(map(show_path, plan.missing))
    return errors.MissingLeavesError(f"{message}\n{remedies}", path=plan.path, missing=missing)


def _unused_error(plan: TreePlan) -> errors.UnusedLeavesError:
    assert plan.target is not None
    unused = messages.unused_values(plan)
    return errors.UnusedLeavesError(messages.unused_leaves(plan), path=plan.path, leaf=show_path(unused[0]))


def _kinds_error(plan: TreePlan, differences: Sequence[leaf_kinds.KindDifference]) -> errors.KindMismatchError:
    message = leaf_kinds.explain(differences, plan.path, refused=True, cause=common_causes.explain(plan))
    return errors.KindMismatchError(message, path=plan.path, leaf=show_path(differences[0].path))


def _shapes_error(plan: TreePlan, shapes: Sequence[ShapeDifference]) -> errors.ShapeMismatchError:
    message = _explain_shapes(plan, shapes, refused=True)
    return errors.ShapeMismatchError(message, path=plan.path, leaf=show_path(shapes[0][0]))


def _with_remedy(plan: TreePlan, problem: errors.CheckpointError) -> errors.CheckpointError:
    """Return the error; one about a single sharding also says how to restore into a replicated state."""
    remedy = (
        common_causes.replicated(plan.shapes, plan.arrays) if isinstance(problem, errors.ShapeMismatchError) else ""
    )
    return errors.ShapeMismatchError(f"{problem}\n{remedy}", path=plan.path, leaf=problem.leaf) if remedy else problem


def _explain_shapes(plan: TreePlan, shapes: Sequence[ShapeDifference], *, refused: bool) -> str:
    assert plan.target is not None
    cause = common_causes.explain(plan)
    suggestion = _suggestion(plan) if refused and not cause else ""
    return messages.other_shapes(
        shapes, plan.path, plan.target.node, arrays=plan.arrays, refused=refused, cause=cause, suggestion=suggestion
    )


def _suggestion(plan: TreePlan) -> str:
    """Return text that proposes rules for mapping the checkpoint to the target, or empty if none are clear."""
    if sum(1 for _ in iter_leaves(plan.tree)) > _MANY:
        return "flax_ckpt_compat.plan_restore looks for rules that map it, which takes seconds for so many leaves."
    suggestion = plan.suggest()
    if suggestion is None or suggestion.keeps_all:
        return ""
    if suggestion.doubts and not suggestion.is_about_layout:
        return messages.changed_optimizer(suggestion)
    if len(suggestion.steps) > MAX_SHOWN or len(str(suggestion)) > _MAX_TEXT:
        return "Rules would map it: print the attribute suggestion of flax_ckpt_compat.plan_restore."
    after = ", after those that were given" if plan.options.transforms.rules else ""
    but = f", but {suggestion.doubts[0]}: check the result" if suggestion.doubts else ""
    where = f"{after} (orbax_transforms= in restore_checkpoint)"
    return f"These rules would map it to the target{where}{but}:\n{suggestion}"
