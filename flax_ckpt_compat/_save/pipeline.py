"""What happens in a save, for every format: checks, snapshot, write, atomic commit, clean-up."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import jax
from jax import monitoring

from flax_ckpt_compat import config
from flax_ckpt_compat._core import paths, steps
from flax_ckpt_compat._core.backend import Backend, Format, WriteOptions
from flax_ckpt_compat._core.errors import StepError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.tree import Node
from flax_ckpt_compat._core.write_errors import writing
from flax_ckpt_compat._discovery import listing
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._discovery.listing import CheckpointDir
from flax_ckpt_compat._save import async_saves, checkpointer_adapter, multiprocess, snapshot
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._trees import depth


@depth.limited("saved")
def save(
    ckpt_dir: str,
    target: Any,
    step: Any,
    prefix: str,
    keep: Any,
    overwrite: bool,
    keep_every_n_steps: float | None,
    async_manager: Any,
    orbax_checkpointer: Any,
    *,
    is_multiprocess: bool = False,
    replace_only_checkpoints: bool = False,
    format: Format | None = None,
) -> str:
    """Saves a tree as one step of a directory; see `flax_ckpt_compat.checkpoints.save_checkpoint`.

    Args:
        ckpt_dir: normalised directory.
        by_all: all processes of the job save it, each what it holds.
        careful: replace nothing but checkpoints, and remove none that are newer.
        format: None writes what Flax's flag says.

    Returns:
        The checkpoint's path in the caller's form.
    """
    monitoring.record_event("/jax/flax/checkpoint/save")
    start = time.time()
    text, where = steps.step_text(step), _place(ckpt_dir, prefix)
    name = steps.check_name(where.prefix + text)
    if replace_only_checkpoints and os.path.basename(where.directory) == name:
        parent = os.path.dirname(where.directory)
        message = (
            f"{where.directory} has the name of step {step} itself; leave out step=, or pass its directory {parent}"
        )
        raise StepError(message, path=where.directory)
    kept, every = steps.check_keep(keep), steps.check_every(keep_every_n_steps)
    # Flax sorts the maps of a msgpack file in save_checkpoint_multiprocess only (0.12.8, measured).
    request = SaveRequest(
        where,
        name,
        step,
        bool(overwrite),
        kept,
        every,
        replace_only_checkpoints,
        format or _flags_format(),
        is_multiprocess,
        start,
    )
    carry_out = _carry_out_together if is_multiprocess and jax.process_count() > 1 else _carry_out
    carry_out(request, target, async_manager, orbax_checkpointer)
    return os.path.join(ckpt_dir, f"{prefix}{text}")


@depth.limited("saved")
def save_at(path: str, target: Any, overwrite: bool, async_manager: Any, format: Format) -> str:
    """Saves a tree at exactly this path, and looks at no other checkpoint; see `flax_ckpt_compat.save`.

    Args:
        path: normalised path.

    Returns:
        The path.
    """
    monitoring.record_event("/jax/flax/checkpoint/save")
    start = time.time()
    directory, name = os.path.split(paths.local(path))
    if name in ("", os.curdir, os.pardir) or not paths.is_valid_destination(path):
        raise StepError(f"{path!r} names no file or directory to write a checkpoint to; give it a name, or pass step=")
    where = _place(directory, "")
    _refuse_nul(name)
    request = SaveRequest(where, steps.check_name(name), None, overwrite, 0, None, True, format, False, start)
    _carry_out(request, target, async_manager, None)
    return path


def _flags_format() -> Format:
    return Format.ORBAX if config.use_orbax_format() else Format.MSGPACK


def _place(ckpt_dir: str, prefix: str) -> CheckpointDir:
    _refuse_nul(prefix + ckpt_dir)
    return listing.checkpoint_dir(ckpt_dir, prefix)


def _refuse_nul(text: str) -> None:
    if "\0" in text:
        raise StepError("a directory or prefix cannot contain the NUL character")


def _carry_out(request: SaveRequest, target: Any, async_manager: Any, orbax_checkpointer: Any) -> None:
    if async_manager:
        async_saves.wait(async_manager)
    checkpointer_adapter.wait_for_pending_saves(orbax_checkpointer, request.where.directory)
    async_saves.wait_for_pending_saves(request.where.directory)
    request.check()
    if orbax_checkpointer:
        request.refuse_store("an orbax_checkpointer", "leave it out: the format is the same")
        request.prepare_directory()
        checkpointer_adapter.save(orbax_checkpointer, request.path, target, on_commit=request.committed)
    else:
        _save_alone(request, target, async_manager)
    monitoring.record_event_duration_secs("/jax/checkpoint/write/durations_sec", time.time() - request.start)


def _carry_out_together(request: SaveRequest, target: Any, async_manager: Any, orbax_checkpointer: Any) -> None:
    if orbax_checkpointer:
        multiprocess.save_through(orbax_checkpointer, request, target)
    else:
        multiprocess.save(request, target, async_manager)
    monitoring.record_event_duration_secs("/jax/checkpoint/write/durations_sec", time.time() - request.start)


def _save_alone(request: SaveRequest, target: Any, async_manager: Any) -> None:
    backend = backend_for(request.format)
    tree = snapshot.tree_to_save(target, request, copied=bool(async_manager))
    prepared = backend.prepare(tree)
    options = WriteOptions(compression=config.current().compression)

    def task() -> None:
        _write_and_commit(request, backend, prepared, options, tree)

    if async_manager:
        async_saves.start(async_manager, request.where.directory, task)
    else:
        task()


def _write_and_commit(request: SaveRequest, backend: Backend, prepared: Any, options: WriteOptions, tree: Node) -> None:
    if backend.format is Format.MSGPACK:
        monitoring.record_event("/jax/flax/checkpoint/save_main_ckpt_task")
    request.prepare_directory()
    temporary = paths.temporary_path(request.path)
    try:
        # Saving is an explicit request to move data to the host, also under jax.transfer_guard("disallow").
        with writing(request.path, temporary, tree), jax.transfer_guard_device_to_host("allow"):
            backend.write(temporary, prepared, options)
        request.check_again()
        request.publish(functools.partial(paths.publish, temporary, request.path))
    except BaseException:
        atomic.remove_temporary(temporary)
        raise
    request.committed()
