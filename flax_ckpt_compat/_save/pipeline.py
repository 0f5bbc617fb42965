"""Run a save, for every format: validate, snapshot, write, publish, retain."""

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
    """Save a tree as one step of a directory; see `flax_ckpt_compat.checkpoints.save_checkpoint`.

    ``ckpt_dir`` is normalised, and a ``format`` of None follows Flax's flag. With ``is_multiprocess`` all processes of
    the job save, each what it holds. With ``replace_only_checkpoints`` nothing but checkpoints is replaced, and newer
    ones stay.

    Returns:
        The checkpoint's path in the caller's form.
    """
    monitoring.record_event("/jax/flax/checkpoint/save")
    start = time.time()
    text, checkpoint_dir = steps.step_text(step), _checkpoint_dir(ckpt_dir, prefix)
    name = steps.check_name(checkpoint_dir.prefix + text)
    if replace_only_checkpoints and os.path.basename(checkpoint_dir.directory) == name:
        parent = os.path.dirname(checkpoint_dir.directory)
        message = (
            f"{checkpoint_dir.directory} is named like step {step} itself; leave out step=, or pass its parent {parent}"
        )
        raise StepError(message, path=checkpoint_dir.directory)
    kept, every = steps.check_keep(keep), steps.check_every(keep_every_n_steps)
    # Flax sorts the maps of a msgpack file in save_checkpoint_multiprocess only (0.12.8, measured).
    request = SaveRequest(
        checkpoint_dir,
        name,
        step,
        bool(overwrite),
        kept,
        every,
        replace_only_checkpoints,
        format or _default_format(),
        is_multiprocess,
        start,
    )
    save_request = _save_multiprocess if is_multiprocess and jax.process_count() > 1 else _save_single_process
    save_request(request, target, async_manager, orbax_checkpointer)
    return os.path.join(ckpt_dir, f"{prefix}{text}")


@depth.limited("saved")
def save_at(path: str, target: Any, overwrite: bool, async_manager: Any, format: Format) -> str:
    """Save a tree at exactly this path, without looking at other checkpoints; see `flax_ckpt_compat.save`.

    Returns:
        ``path``, which is normalised.
    """
    monitoring.record_event("/jax/flax/checkpoint/save")
    start = time.time()
    directory, name = os.path.split(paths.local(path))
    if name in ("", os.curdir, os.pardir) or not paths.is_valid_destination(path):
        raise StepError(f"{path!r} names no file or directory to write; add a name, or pass step=")
    checkpoint_dir = _checkpoint_dir(directory, "")
    _check_nul(name)
    request = SaveRequest(checkpoint_dir, steps.check_name(name), None, overwrite, 0, None, True, format, False, start)
    _save_single_process(request, target, async_manager, None)
    return path


def _default_format() -> Format:
    return Format.ORBAX if config.use_orbax_format() else Format.MSGPACK


def _checkpoint_dir(ckpt_dir: str, prefix: str) -> CheckpointDir:
    _check_nul(prefix + ckpt_dir)
    return listing.checkpoint_dir(ckpt_dir, prefix)


def _check_nul(text: str) -> None:
    if "\0" in text:
        raise StepError("a directory or prefix cannot contain the NUL character")


def _save_single_process(request: SaveRequest, target: Any, async_manager: Any, orbax_checkpointer: Any) -> None:
    if async_manager:
        async_saves.wait(async_manager)
    checkpointer_adapter.wait_for_pending_saves(orbax_checkpointer, request.checkpoint_dir.directory)
    async_saves.wait_for_pending_saves(request.checkpoint_dir.directory)
    request.check()
    if orbax_checkpointer:
        request.reject_url("an orbax_checkpointer", "leave it out: the format is the same")
        request.prepare_directory()
        checkpointer_adapter.save(orbax_checkpointer, request.path, target, on_commit=request.on_committed)
    else:
        _write(request, target, async_manager)
    monitoring.record_event_duration_secs("/jax/checkpoint/write/durations_sec", time.time() - request.start)


def _save_multiprocess(request: SaveRequest, target: Any, async_manager: Any, orbax_checkpointer: Any) -> None:
    if orbax_checkpointer:
        multiprocess.save_with_checkpointer(orbax_checkpointer, request, target)
    else:
        multiprocess.save(request, target, async_manager)
    monitoring.record_event_duration_secs("/jax/checkpoint/write/durations_sec", time.time() - request.start)


def _write(request: SaveRequest, target: Any, async_manager: Any) -> None:
    backend = backend_for(request.format)
    tree = snapshot.tree_to_save(target, request, copy=bool(async_manager))
    prepared = backend.prepare(tree)
    options = WriteOptions(compression=config.current().compression)

    def task() -> None:
        _write_and_commit(request, backend, prepared, options, tree)

    if async_manager:
        async_saves.start(async_manager, request.checkpoint_dir.directory, task)
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
    request.on_committed()
