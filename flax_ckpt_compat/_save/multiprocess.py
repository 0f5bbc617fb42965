"""Run a multi-process save: a barrier before and after writing; process 0 commits."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax import monitoring

from flax_ckpt_compat import config
from flax_ckpt_compat._core import staging
from flax_ckpt_compat._core.backend import Backend, Format, WriteOptions
from flax_ckpt_compat._core.write_errors import writing
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._save import async_saves, checkpointer_adapter, snapshot, tree_summary
from flax_ckpt_compat._save.coordination import Coordinator
from flax_ckpt_compat._save.request import SaveRequest

# Look-ups wait for this process's part of a background save, for so many times ``coordination_timeout``.
_LOOKUP_TIMEOUTS = 4


def save(request: SaveRequest, target: Any, async_manager: Any) -> None:
    """Save a tree of which each process holds a part; all processes call this.

    Raises:
        ProcessTimeoutError, MultiprocessSaveError: other processes are missing or failed; nothing was saved.
        CheckpointError: the failure of this process or of process 0.
    """
    coordinator = Coordinator(request.path, config.current().coordination_timeout)
    options = WriteOptions(compression=config.current().compression)
    backend, prepared, failed, summary = backend_for(request.format), None, None, None
    signature = f"{request.format.value} with overwrite={request.overwrite}"
    try:
        if async_manager:
            async_saves.wait(async_manager)
        async_saves.wait_for_pending_saves(request.checkpoint_dir.directory)
        tree = snapshot.tree_to_save(target, request, copy=bool(async_manager), multiprocess=True)
        prepared = backend.prepare(tree, coordinator.process)
        summary = tree_summary.TreeSummary(tree)
    except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
        failed = error
    begin = functools.partial(_begin, request, backend, prepared, options, coordinator)
    staging_json = coordinator.join(failed=failed, signature=signature, summary=summary, on_primary=begin)

    task = functools.partial(_write_and_commit, request, backend, prepared, options, coordinator, staging_json)
    if async_manager:
        _start(async_manager, request.checkpoint_dir.directory, task, _LOOKUP_TIMEOUTS * coordinator.timeout)
    else:
        task()


def _start(manager: Any, directory: str, task: Callable[..., None], lookup_timeout: float) -> None:
    started = threading.Event()

    def run() -> None:
        started.set()
        task()

    try:
        async_saves.start(manager, directory, run, lookup_timeout=lookup_timeout)
    except BaseException as error:
        if not started.is_set():  # the others must not wait for this process
            task(failed=error)
        raise


def _begin(
    request: SaveRequest, backend: Backend, prepared: Any, options: WriteOptions, coordinator: Coordinator
) -> str:
    """Create the staging area that all processes write to, in process 0; return it as JSON."""
    request.check()
    request.prepare_directory()
    staged = staging.begin(request.path, in_gda_folder=backend.format is Format.MSGPACK)
    try:
        with writing(request.path, staged.path), jax.transfer_guard_device_to_host("allow"):
            backend.begin_multiprocess(staged.path, prepared, options, coordinator.process, staged.upload)
    except BaseException:
        staged.cleanup(is_primary=True)
        raise
    return staged.to_json()


def _write_and_commit(
    request: SaveRequest,
    backend: Backend,
    prepared: Any,
    options: WriteOptions,
    coordinator: Coordinator,
    staging_json: str,
    failed: BaseException | None = None,
) -> None:
    staged, is_primary = None, coordinator.process.index == 0
    try:
        staged = staging.from_json(staging_json, is_primary)
        if failed is None:
            with writing(request.path, staged.path), jax.transfer_guard_device_to_host("allow"):
                backend.write_process_part(staged.path, prepared, options, coordinator.process, staged.upload)
    except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
        failed = error

    def commit() -> str:
        assert staged is not None
        if backend.format is Format.MSGPACK:
            monitoring.record_event("/jax/flax/checkpoint/save_main_ckpt_task")
        with writing(request.path, staged.path):
            backend.finish_multiprocess(staged.path, prepared, options, coordinator.process, staged.upload)
        request.check_again()
        request.publish(functools.partial(staged.publish, request.path))
        request.on_committed()
        return ""

    try:
        coordinator.barrier("commit", failed=failed, on_primary=commit)
    except BaseException:
        if staged is not None:
            staged.cleanup(is_primary, late=coordinator.is_aborted)
        raise
    if not is_primary and staged is not None:
        staged.remove_local()


def save_with_checkpointer(checkpointer: Any, request: SaveRequest, target: Any) -> None:
    """Save with a user's Orbax checkpointer, which synchronizes the processes itself; process 0 cleans up."""
    coordinator = Coordinator(request.path, config.current().coordination_timeout)
    failed = None
    try:
        checkpointer_adapter.wait_for_pending_saves(checkpointer, request.checkpoint_dir.directory)
    except BaseException as error:  # noqa: BLE001  (reported to the others)
        failed = error

    def begin() -> str:
        request.reject_url("an orbax_checkpointer", "leave it out: the format is the same")
        request.check()
        request.prepare_directory()
        return checkpointer_adapter.written_path(request.path)

    written = coordinator.join(failed=failed, on_primary=begin)
    save_it = functools.partial(
        checkpointer_adapter.save,
        checkpointer,
        request.path,
        target,
        request.on_committed,
        written=written,
        coordinator=coordinator,
    )
    if checkpointer_adapter.is_async(checkpointer):
        save_it()
        return
    try:
        save_it()
    except BaseException as error:  # noqa: BLE001  (reported to the others)
        failed = error
    # Only now has process 0 published.
    coordinator.barrier("commit", failed=failed)
