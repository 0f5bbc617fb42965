"""Restore in any format: locate, open, plan, read, place, rebuild."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import jax
from jax import monitoring

from flax_ckpt_compat import config
from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    MultiprocessRestoreError,
    UnrecognizedFormatError,
    add_sentence,
)
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.timing import Stopwatch
from flax_ckpt_compat._core.tree import Branch, Node
from flax_ckpt_compat._discovery import locating, opening
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir
from flax_ckpt_compat._restore import checkpointer_reader, policies, process_agreement
from flax_ckpt_compat._restore.execute import read_and_place
from flax_ckpt_compat._restore.item_choice import choose_item
from flax_ckpt_compat._restore.items import described, plan_all, plan_with_rules
from flax_ckpt_compat._restore.match import plan_tree
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._restore.plan import RestorePlan, ShapeDifference, TreePlan
from flax_ckpt_compat._save import async_saves, key_value_store
from flax_ckpt_compat._trees import depth, state_dict

_log = logging.getLogger("flax_ckpt_compat")


def restore(
    checkpoint_dir: CheckpointDir, target: Any, step: Any, options: RestoreOptions, orbax_checkpointer: Any = None
) -> Any:
    """Restore a tree; see `flax_ckpt_compat.checkpoints.restore_checkpoint`."""
    monitoring.record_event("/jax/flax/checkpoint/restore")
    start = time.time()
    if target is None:
        options.transforms.warn_without_target()
    async_saves.wait_for_pending_saves(checkpoint_dir, orbax_checkpointer)
    options.transforms.wait_for_pending_saves()

    # A second attempt, after the checkpoint was replaced, is one of this process only.
    attempts = iter([options.settings.read_once and orbax_checkpointer is None])

    agreement = process_agreement.begin(checkpoint_dir, step)

    def restore_at(location: Location) -> Any:
        if agreement is not None:
            agreement.report(location)
        # The pause ends when all but the result is gone, so that the garbage collector finds few objects.
        with locating.unchanged(location), options.transforms.opening(), ExitStack() as pause:
            pause.enter_context(memory.pause_gc(enabled=not location.is_remote))
            together = next(attempts, False)
            values = _restore_at(location, target, options, orbax_checkpointer, pause, together=together)
        monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", time.time() - start)
        return values

    def unrestored() -> Any:
        if agreement is not None:
            agreement.report(None)
        return target

    if key_value_store.is_connected():  # processes on several machines have to find the same latest one
        locating.refresh(checkpoint_dir)
    with depth.limited("restored", target):
        otherwise = None if options.settings.must_exist else unrestored
        try:
            return locating.read_found(checkpoint_dir, step, restore_at, otherwise)
        except CheckpointNotFoundError as missing:
            if agreement is not None and not agreement.has_reported:
                try:
                    agreement.report(None)
                except MultiprocessRestoreError as others:  # this process stops in any case
                    add_sentence(missing, str(others))
            raise
        except KeyboardInterrupt:
            attempts = iter(())
            raise
        finally:
            if next(attempts, False):  # nothing was opened
                path = checkpoint_dir.root.path
                error = CheckpointNotFoundError(f"process {jax.process_index()} finds no such checkpoint in {path}")
                _give_up(path, options, error)


def _give_up(path: str, options: RestoreOptions, error: Exception) -> None:
    from flax_ckpt_compat._restore import read_once  # few restores need it

    read_once.give_up(path, options.settings.coordination_timeout, error)


def _restore_at(
    location: Location, target: Any, options: RestoreOptions, checkpointer: Any, pause: ExitStack, *, together: bool
) -> Any:
    watch, path = Stopwatch(), location.path
    with ExitStack() as files:
        plans = None
        try:
            plans = _plan(location, target, options, files, checkpointer)
            # Policies raise before any leaf is read. `rebuild` enforces them for what only the values show: shapes that
            # a user's function computes, and structures that custom serialization refuses.
            for plan in plans.items.values():
                policies.enforce(plan)
        except Exception as error:
            if plans is not None and plans.fits and isinstance(error, CheckpointError):
                add_sentence(error, plans.fits)
            if together:
                pause.close()
                _give_up(path, options, error)
            raise
        watch.lap("open and plan")
        # Long reads do not pause the garbage collector, nor do waits for other processes.
        if together or not all(plan.is_short for plan in plans.items.values()):
            pause.close()
        values, read = {}, functools.partial(read_and_place, together=path if together else "")
        for name, plan in plans.items.items():
            values[name] = rebuild(plan, *watch.timed("read and place", read, plan))
            watch.lap("rebuild")
    watch.log("Restored", path, (leaf.source for plan in plans.items.values() for leaf in plan.leaves))
    return values if plans.is_mapping else next(iter(values.values()))


def _plan(location: Location, target: Any, options: RestoreOptions, files: ExitStack, checkpointer: Any) -> RestorePlan:
    """Open a checkpoint and plan its restore; ``files`` closes it."""
    if checkpointer is None or not location.isdir():
        return plan_all(_opened(location, options, files), target, options)
    own, target_tree = None, None if target is None else described(target)
    try:
        opened = _opened(location, options, files)
        if opened.trees:
            name = choose_item(opened, Branch({}) if target_tree is None else target_tree.node, options)[0]
            own = opened.reader(name or next(iter(opened.trees)))
    except UnrecognizedFormatError:
        pass
    tree = (
        state_dict.describe(checkpointer_reader.restore_with(checkpointer, location.path)) if own is None else own.tree
    )
    reader = checkpointer_reader.CheckpointerReader(checkpointer, location.unlisted(), tree, own)
    return RestorePlan({"": plan_with_rules(reader, tree, target_tree, options, location.unlisted())}, False)


def _opened(location: Location, options: RestoreOptions, files: ExitStack) -> opening.Opened:
    opened = opening.Opened(location, verify=options.verifies, item=options.item)
    files.callback(opened.discard)
    return opened


def read_state(opened: opening.Opened, chosen: Mapping[str, Node]) -> Any:
    """Restore chosen items, by name, or parts of their trees of leaf handles, without a target."""
    values, options = {}, RestoreOptions(config.current())
    with depth.limited("read"):
        for name, node in chosen.items():
            plan = plan_tree(opened.reader(name), node, None, options, opened.items[name].location)
            policies.enforce(plan)
            values[name] = rebuild(plan, *read_and_place(plan))
    return values if opened.is_mapping else next(iter(values.values()))


def rebuild(plan: TreePlan, values: list[Any], shapes: list[ShapeDifference]) -> Any:
    """Rebuild the user's tree, or without a target the stored one, with the results of `read_and_place`."""
    policies.enforce_shapes(plan, shapes)
    lists = "lists" if plan.reader.keeps_lists else "flax"
    if plan.target is None:
        structure = "stored" if plan.options.settings.structure == "stored" else lists
        return state_dict.from_stored(plan.tree, iter(values), structure)
    try:
        return plan.target.rebuild(plan.target.filled(iter(values), plan.stored_subtrees, lists))
    except CheckpointError:
        raise
    except Exception:  # custom serialization may fail in any way
        if not any(path in plan.stored_subtrees for path in plan.target.custom_paths):
            raise
    del values
    # The custom serialization does not read this structure: match leaf by leaf, so that policies see what is missing.
    again = plan_tree(plan.reader, plan.tree, plan.target, plan.options, plan.location, leaf_by_leaf=True)
    policies.enforce(again)
    return rebuild(again, *read_and_place(again))
