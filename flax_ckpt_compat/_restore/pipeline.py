"""Restore in any format: locate, open, plan, read, place, rebuild."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from jax import monitoring

from flax_ckpt_compat import config
from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import CheckpointError, CheckpointNotFoundError, add_sentence
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.tree import Branch, Node
from flax_ckpt_compat._discovery import locating, opening
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir
from flax_ckpt_compat._restore import checkpointer_reader, execute, policies
from flax_ckpt_compat._restore.items import plan_all
from flax_ckpt_compat._restore.match import plan_tree
from flax_ckpt_compat._restore.plan import RestoreOptions, RestorePlan, ShapeDifference, TreePlan
from flax_ckpt_compat._restore.process_agreement import Agreement
from flax_ckpt_compat._save import async_saves
from flax_ckpt_compat._trees import depth, state_dict
from flax_ckpt_compat.errors import MultiprocessRestoreError


def restore(
    checkpoint_dir: CheckpointDir, target: Any, step: Any, options: RestoreOptions, orbax_checkpointer: Any = None
) -> Any:
    """Restore a tree; see `flax_ckpt_compat.checkpoints.restore_checkpoint`."""
    monitoring.record_event("/jax/flax/checkpoint/restore")
    if target is None:
        options.transforms.warn_without_target()
    one = _Restore(target, options, orbax_checkpointer)
    async_saves.wait_for_pending_saves(checkpoint_dir, orbax_checkpointer)
    options.transforms.wait_for_pending_saves()
    one.agreement = Agreement(checkpoint_dir, step)
    with one.meter.reporting(), depth.limited("restored"):
        otherwise = None if options.settings.must_exist else one.unrestored
        try:
            return locating.read_found(checkpoint_dir, step, one.at, otherwise)
        except CheckpointNotFoundError as missing:
            if not one.agreement.has_reported:
                try:
                    one.agreement.report(None)
                except MultiprocessRestoreError as others:  # this process stops in any case
                    add_sentence(missing, str(others))
            raise


class _Restore:
    """One restore, and each attempt of it: again where the checkpoint is replaced while it is read."""

    agreement: Agreement  # set once earlier saves have ended

    def __init__(self, target: Any, options: RestoreOptions, checkpointer: Any):
        self._target, self._options, self._checkpointer = target, options, checkpointer
        self._start = time.time()
        self.meter = Meter(options.settings.progress, "restore")

    def at(self, location: Location) -> Any:
        """Restore the checkpoint at a location."""
        self.agreement.report(location)
        self.meter.lap("look up")
        with locating.unchanged(location), self._options.transforms.opening():
            values = self._values(location)
        self.meter.log()
        monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", time.time() - self._start)
        return values

    def _values(self, location: Location) -> Any:
        """Open, plan, read, place and rebuild."""
        values: dict[str, Any] = {}
        with ExitStack() as files:
            with memory.pause_gc(enabled=not location.is_remote):
                opened = self._open(location)
                files.callback(opened.discard)
                if len(opened.items) == 1:
                    opened.reader(*opened.items)
                self.meter.lap("open")
                plans = self._plan(opened)
                self.meter.lap("plan")
            runs = {name: execute.Execution(plan) for name, plan in plans.items.items()}
            self.meter.begin(location.path, lambda: sum([run.nbytes for run in runs.values()]))
            for name, plan in plans.items.items():
                run = runs.pop(name).read(self.meter)
                self.meter.lap("read")
                values[name] = rebuild(plan, *run.place())
                self.meter.lap("place and rebuild")
        return values if plans.is_mapping else next(iter(values.values()))

    def unrestored(self) -> Any:
        """Return the target, as there is no checkpoint."""
        self.agreement.report(None)
        return self._target

    def _open(self, location: Location) -> opening.Opened:
        """Open a checkpoint; a checkpointer of the caller's, if there is one, reads its trees."""
        is_theirs = self._checkpointer is not None and location.isdir()
        read_by = functools.partial(checkpointer_reader.CheckpointerReader, self._checkpointer) if is_theirs else None
        verify = self._options.settings.checksums == "verify"
        return opening.Opened(location, verify=verify, item=self._options.item, read_by=read_by)

    def _plan(self, opened: opening.Opened) -> RestorePlan:
        """Plan the restore of all leaves.

        Policies raise before any leaf is read. `rebuild` enforces them for what only the values show: shapes that a
        user's function computes, and structures that custom serialization refuses."""
        if self._target is None and not self._options.transforms.rules:
            for name, item in opened.trees.items():
                if item.format is Format.MSGPACK:  # others have no numbers, and may not be opened in vain
                    reader = opened.reader(name)
                    reader.tree = _with_numbers(reader.tree)
        plans = plan_all(opened, self._target, self._options)
        try:
            for plan in plans.items.values():
                policies.enforce(plan)
        except CheckpointError as error:
            if plans.fits:
                add_sentence(error, plans.fits)
            raise
        return plans


def _with_numbers(node: Node) -> Node:
    """Return a tree with dicts and lists in place of `Numbers`, which need no leaf for each."""
    if not isinstance(node, Branch):
        return node
    if (values := getattr(node, "values", None)) is not None:
        return values.copy()
    children = dict[str, Node]()
    for name, child in node.children.items():  # no comprehension, which would take a second call for each level
        children[name] = _with_numbers(child)
    return Branch(children, node.container, node.int_keys, node.type_name)


def read_state(opened: opening.Opened, chosen: Mapping[str, Node]) -> Any:
    """Restore chosen items, by name, or parts of their trees of leaf handles, without a target."""
    values, options = {}, RestoreOptions(config.current())
    with depth.limited("read"):
        for name, node in chosen.items():
            plan = plan_tree(opened.reader(name), node, None, options, opened.items[name].location)
            policies.enforce(plan)
            values[name] = rebuild(plan, *execute.Execution(plan).read().place())
    return values if opened.is_mapping else next(iter(values.values()))


def rebuild(plan: TreePlan, values: list[Any], shapes: list[ShapeDifference]) -> Any:
    """Rebuild the user's tree, or without a target the stored one, with the results of `Execution.place`."""
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
    return rebuild(again, *execute.Execution(again).read().place())
