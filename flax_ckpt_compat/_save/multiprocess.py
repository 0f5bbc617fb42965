"""What happens in a save by several processes: they meet before writing and after; process 0 commits."""

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
from flax_ckpt_compat._save import agreement, async_saves, checkpointer_adapter, snapshot
from flax_ckpt_compat._save.coordination import Coordinator
from flax_ckpt_compat._save.request import SaveRequest

# How often a look-up waits for ``coordination_timeout`` until it stops waiting for this process's part of a save.
_PATIENCE = 4


def save(request: SaveRequest, target: Any, async_manager: Any) -> None:
    """Saves a tree of which each process holds a part; called by all of them.

    Raises:
        ProcessTimeoutError, MultiprocessSaveError: others did not come, or failed; nothing was saved.
        CheckpointError: what this process, or process 0, failed with.
    """
    team = Coordinator(request.path, config.current().coordination_timeout)
    options = WriteOptions(compression=config.current().compression)
    backend, prepared, failed, summary = backend_for(request.format), None, None, None
    agree = f"{request.format.value} with overwrite={request.overwrite}"
    try:
        if async_manager:
            async_saves.wait(async_manager)
        async_saves.wait_for_pending_saves(request.where.directory)
        tree = snapshot.tree_to_save(target, request, copied=bool(async_manager), together=True)
        prepared = backend.prepare(tree, team.share)
        summary = agreement.Summary(tree)
    except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
        failed = error
    begin = functools.partial(_begin, request, backend, prepared, options, team)
    to_json = team.gather(failed=failed, agree=agree, tree=summary, lead=begin)

    task = functools.partial(_write_and_commit, request, backend, prepared, options, team, to_json)
    if async_manager:
        _start(async_manager, request.where.directory, task, _PATIENCE * team.timeout)
    else:
        task()


def _start(manager: Any, directory: str, task: Callable[..., None], patience: float) -> None:
    begun = threading.Event()

    def run() -> None:
        begun.set()
        task()

    try:
        async_saves.start(manager, directory, run, joint=patience)
    except BaseException as error:
        if not begun.is_set():  # the others must not wait for this process
            task(failed=error)
        raise


def _begin(request: SaveRequest, backend: Backend, prepared: Any, options: WriteOptions, team: Coordinator) -> str:
    """Process 0 chooses the temporary, and makes what the others write into."""
    request.check()
    request.prepare_directory()
    site = staging.begin(request.path, in_gda_folder=backend.format is Format.MSGPACK)
    try:
        with writing(request.path, site.path), jax.transfer_guard_device_to_host("allow"):
            backend.begin_multiprocess(site.path, prepared, options, team.share, site.upload)
    except BaseException:
        site.cleanup(is_primary=True)
        raise
    return site.to_json()


def _write_and_commit(
    request: SaveRequest,
    backend: Backend,
    prepared: Any,
    options: WriteOptions,
    team: Coordinator,
    to_json: str,
    failed: BaseException | None = None,
) -> None:
    site, leads = None, team.share.index == 0
    try:
        site = staging.from_json(to_json, leads)
        if failed is None:
            with writing(request.path, site.path), jax.transfer_guard_device_to_host("allow"):
                backend.write_process_part(site.path, prepared, options, team.share, site.upload)
    except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
        failed = error

    def commit() -> str:
        assert site is not None
        if backend.format is Format.MSGPACK:
            monitoring.record_event("/jax/flax/checkpoint/save_main_ckpt_task")
        with writing(request.path, site.path):
            backend.finish_multiprocess(site.path, prepared, options, team.share, site.upload)
        request.check_again()
        request.publish(functools.partial(site.publish, request.path))
        request.committed()
        return ""

    try:
        team.meet("commit", failed=failed, lead=commit)
    except BaseException:
        if site is not None:
            site.cleanup(leads, late=team.is_over)
        raise
    if not leads and site is not None:
        site.remove_local()


def save_through(checkpointer: Any, request: SaveRequest, target: Any) -> None:
    """Lets a checkpointer of real Orbax, which meets the other processes itself, write; process 0 cleans up."""
    team = Coordinator(request.path, config.current().coordination_timeout)
    failed = None
    try:
        checkpointer_adapter.wait_for_pending_saves(checkpointer, request.where.directory)
    except BaseException as error:  # noqa: BLE001  (told to the others)
        failed = error

    def begin() -> str:
        request.refuse_store("an orbax_checkpointer", "leave it out: the format is the same")
        request.check()
        request.prepare_directory()
        return checkpointer_adapter.written_path(request.path)

    written = team.gather(failed=failed, lead=begin)
    save_it = functools.partial(
        checkpointer_adapter.save, checkpointer, request.path, target, request.committed, written=written, team=team
    )
    if checkpointer_adapter.is_async(checkpointer):
        save_it()
        return
    try:
        save_it()
    except BaseException as error:  # noqa: BLE001  (told to the others)
        failed = error
    # Process 0 has published only now.
    team.meet("commit", failed=failed)
