"""Restore in any format: locate, open, plan, apply policies, read, place, rebuild."""

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
    """Restore a tree; see `flax_ckpt_compat.checkpoints.restore_checkpoint`.

    Args:
        ckpt_dir: normalised path of a checkpoint or a directory of them.
        target: the user's tree, or None.
        step: the step, or None for the latest.
        prefix: of the checkpoints' names.
        orbax_checkpointer: an Orbax checkpointer that reads directories, or None.
        transforms: None, rules, or a pytree of transforms.
        default_to_original: leaves that no transform matches come from the checkpoint; else from the target.
        strict: a missing leaf is an error even with transforms.
    """
    monitoring.record_event("/jax/flax/checkpoint/restore")
    start = time.time()
    spec = TransformSpec(transforms, default_to_original=default_to_original, strict=strict)
    if target is None:
        spec.warn_without_target()
    wait_for_pending_saves(ckpt_dir, prefix, orbax_checkpointer)

    def read(path: str) -> Any:
        before = locating.identity(path)
        if orbax_checkpointer is not None and paths.isdir(path):
            restored = _through_checkpointer(orbax_checkpointer, path, target, spec)
        else:
            restored = _read(path, target, spec)
        locating.check_same(path, before)
        monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", time.time() - start)
        return restored

    return locating.read_found(ckpt_dir, step, prefix, read, otherwise=lambda: target)


def _read(path: str, target: Any, transforms: TransformSpec) -> Any:
    with closing(opening.Opened(path)) as opened, contextlib.ExitStack() as stack:
        stack.enter_context(memory.pause_gc(enabled=not paths.is_url(path)))
        plans = plan_all(opened, target, transforms)
        # Long reads do not pause the garbage collector.
        if not all(plan.is_short for plan in plans.items.values()):
            stack.close()
        # All policies raise before anything is read.
        executions = {name: _prepare(plan) for name, plan in plans.items.items()}
        values = {name: _execute(plan, executions.pop(name)) for name, plan in plans.items.items()}
        return values if plans.is_mapping else next(iter(values.values()))


def wait_for_pending_saves(ckpt_dir: str, prefix: str, orbax_checkpointer: Any = None) -> None:
    """Wait for background saves to the restore's directory, and raise the errors of our failed ones.

    Of our saves, only multiprocess ones are waited for, so that all processes find the same checkpoint.
    """
    checkpoint_dir = listing.checkpoint_dir(ckpt_dir, prefix)
    for directory in {checkpoint_dir.directory, os.path.dirname(paths.absolute(ckpt_dir))}:
        checkpointer_adapter.wait_for_pending_saves(orbax_checkpointer, directory)
        async_saves.wait_for_joint_saves(directory)
        async_saves.raise_failures(directory)


@depth.limited("read")
def read_state(opened: opening.Opened, chosen: Mapping[str, Node]) -> Any:
    """Restore chosen items, or parts of them, without a target.

    Args:
        opened: the checkpoint.
        chosen: item name → its tree of leaf handles, or a part of it.
    """
    values = {}
    for name, node in chosen.items():
        path = opened.items[name].path
        values[name] = _execute(plan_tree(opened.reader(name), node, None, TransformSpec(None), path))
    return values if opened.is_mapping else next(iter(values.values()))


def _through_checkpointer(checkpointer: Any, path: str, target: Any, transforms: TransformSpec) -> Any:
    try:
        with closing(opening.Opened(path)) as opened:
            if opened.trees:
                own = opened.reader(main_item(opened))
                reader = checkpointer_reader.Reader(checkpointer, path, own.tree, own)
                return _execute(plan_tree(reader, own.tree, target, transforms, path))
    except UnrecognizedFormatError:
        pass
    tree = state_dict.describe(checkpointer_reader.restore_raw(checkpointer, path))
    return _execute(plan_tree(checkpointer_reader.Reader(checkpointer, path, tree), tree, target, transforms, path))


def _execute(plan: TreePlan, execution: result_builder.Execution | None = None) -> Any:
    """Read and rebuild one tree.

    Args:
        plan: the plan.
        execution: its execution, if already prepared.
    """
    settings = config.current()
    execution = _prepare(plan) if execution is None else execution
    lists = opening.gives_lists(plan.reader)
    if plan.target is None:
        filled = _values(plan, execution, lists)
        return (
            placement.as_stored(filled) if settings.structure == "stored" else placement.as_state(filled, lists=lists)
        )
    try:
        return plan.target.rebuild(_values(plan, execution, lists))
    except CheckpointError:
        raise
    except Exception:  # custom serialization may fail in any way
        if not plan.custom_paths:
            raise
    # The custom serialization does not read this structure: match leaf by leaf, so that policies see what is missing.
    return _execute(plan.without_custom_paths())


def _prepare(plan: TreePlan) -> result_builder.Execution:
    """Prepare an execution and apply the policies."""
    execution = policies.execution(plan)
    policies.enforce(plan, execution.problems)
    return execution


def _values(plan: TreePlan, execution: result_builder.Execution, lists: bool) -> Any:
    """Return the values of all sources; apply the policy to shapes known only after functions ran."""
    values, shapes = execution.finish(lists=lists)
    policies.enforce_shapes(plan, shapes)
    return values
