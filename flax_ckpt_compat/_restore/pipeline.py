"""What happens in a restore, for every format: find, detect, plan, judge, read, place, rebuild."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from jax import monitoring

from flax_ckpt_compat import config
from flax_ckpt_compat._core import memory, paths
from flax_ckpt_compat._core.errors import CheckpointError, UnrecognizedFormatError
from flax_ckpt_compat._core.tree import Node
from flax_ckpt_compat._discovery import listing, locating, opening
from flax_ckpt_compat._restore import checkpointer_reader, placement, policies, result_builder
from flax_ckpt_compat._restore.restore_plan import TreePlan, main_item, plan_all, plan_tree
from flax_ckpt_compat._restore.transform_spec import TransformSpec
from flax_ckpt_compat._save import async_saves, checkpointer_adapter
from flax_ckpt_compat._trees import depth, state_dict

_log = logging.getLogger("flax_ckpt_compat")


@depth.limited("restored")
def restore(
    ckpt_dir: str,
    target: Any,
    step: Any,
    prefix: str,
    orbax_checkpointer: Any,
    transforms: Any,
    default_to_original: bool = True,
    strict: bool = False,
) -> Any:
    """Restores a tree; see `flax_ckpt_compat.checkpoints.restore_checkpoint`.

    Args:
        ckpt_dir: normalised path.
        transforms: None, rules, or a pytree of transforms.
        default_to_original: what no transform matches comes from the checkpoint; else from the target.
        strict: what the checkpoint lacks is an error also where transforms are given.
    """
    monitoring.record_event("/jax/flax/checkpoint/restore")
    start = time.time()
    adaptation = TransformSpec(transforms, default_to_original=default_to_original, strict=strict)
    if target is None:
        adaptation.warn_without_target()
    wait_for_pending_saves(ckpt_dir, prefix, orbax_checkpointer)

    def read(path: str) -> Any:
        before = locating.identity(path)
        if orbax_checkpointer is not None and paths.isdir(path):
            restored = _through_checkpointer(orbax_checkpointer, path, target, adaptation)
        else:
            restored = _read(path, target, adaptation)
        locating.check_same(path, before)
        monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", time.time() - start)
        return restored

    return locating.read_found(ckpt_dir, step, prefix, read, otherwise=lambda: target)


def _read(path: str, target: Any, adaptation: TransformSpec) -> Any:
    with closing(opening.Opened(path)) as opened, contextlib.ExitStack() as stack:
        stack.enter_context(memory.pause_gc(enabled=not paths.is_url(path)))
        works = plan_all(opened, target, adaptation)
        # Reading many bytes would be no short stretch without the collector.
        if not all(work.is_short for work in works.items.values()):
            stack.close()
        # What raises does so before anything is read.
        planned = {name: _judged(work) for name, work in works.items.items()}
        values = {name: _carry_out(work, planned.pop(name)) for name, work in works.items.items()}
        return values if works.is_mapping else next(iter(values.values()))


def wait_for_pending_saves(ckpt_dir: str, prefix: str, orbax_checkpointer: Any = None) -> None:
    """Wait for background saves to where a restore will look, and raise what ours failed with.

    Of ours only those are waited for in which other processes take part, so that all of them find the same checkpoint.
    """
    where = listing.checkpoint_dir(ckpt_dir, prefix)
    for directory in {where.directory, os.path.dirname(paths.absolute(ckpt_dir))}:
        checkpointer_adapter.wait_for_pending_saves(orbax_checkpointer, directory)
        async_saves.wait_for_joint_saves(directory)
        async_saves.raise_failures(directory)


@depth.limited("read")
def read_state(opened: opening.Opened, chosen: Mapping[str, Node]) -> Any:
    """What a restore without a target gives.

    Args:
        chosen: item name → its tree of leaf handles, or a part of it.
    """
    values = {}
    for name, node in chosen.items():
        path = opened.items[name].path
        values[name] = _carry_out(plan_tree(opened.reader(name), node, None, TransformSpec(None), path))
    return values if opened.is_mapping else next(iter(values.values()))


def _through_checkpointer(checkpointer: Any, path: str, target: Any, adaptation: TransformSpec) -> Any:
    try:
        with closing(opening.Opened(path)) as opened:
            if opened.trees:
                own = opened.reader(main_item(opened))
                reader = checkpointer_reader.Reader(checkpointer, path, own.tree, own)
                return _carry_out(plan_tree(reader, own.tree, target, adaptation, path))
    except UnrecognizedFormatError:
        pass
    tree = state_dict.describe(checkpointer_reader.restore_raw(checkpointer, path))
    return _carry_out(plan_tree(checkpointer_reader.Reader(checkpointer, path, tree), tree, target, adaptation, path))


def _carry_out(work: TreePlan, planned: result_builder.Execution | None = None) -> Any:
    """Reads and rebuilds one tree, as planned.

    Args:
        work: what is restored.
        planned: its execution, if it was laid out and judged before.
    """
    settings = config.current()
    planned = _judged(work) if planned is None else planned
    lists = opening.gives_lists(work.reader)
    if work.target is None:
        filled = _values(work, planned, lists)
        return (
            placement.as_stored(filled) if settings.structure == "stored" else placement.as_state(filled, lists=lists)
        )
    try:
        return work.target.rebuild(_values(work, planned, lists))
    except CheckpointError:
        raise
    except Exception:  # rules of other people's types may fail in any way
        if not work.own_rules:
            raise
    # Those rules do not know this structure: leaf by leaf, so that what is missing is told or kept.
    return _carry_out(work.without_own_rules())


def _judged(work: TreePlan) -> result_builder.Execution:
    """Lays a tree out, and raises, or warns, as the policies say."""
    planned = policies.execution(work)
    policies.judge(work, planned.problems)
    return planned


def _values(work: TreePlan, planned: result_builder.Execution, lists: bool) -> Any:
    """The values of all sources; shapes that only functions know are judged once they are known."""
    values, shapes = planned.finish(lists=lists)
    policies.judge_shapes(work, shapes)
    return values
