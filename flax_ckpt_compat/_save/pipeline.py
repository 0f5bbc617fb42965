"""Run a save, for every format: validate, snapshot, write, publish, retain."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
from jax import monitoring

from flax_ckpt_compat._core.backend import Backend
from flax_ckpt_compat._core.local.presence import occupy_standard_streams
from flax_ckpt_compat._core.progress import Stopwatch, nbytes_of
from flax_ckpt_compat._core.storage import Listing
from flax_ckpt_compat._core.storage_errors import writing
from flax_ckpt_compat._core.tree import Node, iter_leaves
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._save import async_saves, checkpointer_adapter, interrupted_saves, multiprocess, validation
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._save.retention import retain
from flax_ckpt_compat._save.snapshot import tree_to_save
from flax_ckpt_compat._trees import depth


def save(request: SaveRequest, target: Any) -> str:
    """Save a tree; return the checkpoint's path in the caller's form."""
    watch = Stopwatch()
    occupy_standard_streams()
    monitoring.record_event("/jax/flax/checkpoint/save")
    with depth.limited("saved"):
        if request.multiprocess and jax.process_count() > 1:
            multiprocess.save(request, target)
        else:
            async_saves.wait_for_earlier_saves(request)
            watch.lap("wait for earlier saves")
            listing = validation.check(request)
            if request.orbax_checkpointer:
                request.directory.prepare_directory()
                checkpointer_adapter.save(request, target)
            else:
                backend = backend_for(request.format)
                tree = tree_to_save(target, request)
                write = functools.partial(_write, request, backend, backend.prepare(tree), tree, watch)
                watch.lap("prepare")
                if request.async_manager:
                    async_saves.start(request.async_manager, request.directory, write)
                else:
                    write(listing)
    monitoring.record_event_duration_secs("/jax/checkpoint/write/durations_sec", time.time() - request.start)
    return request.shown_path


def _write(
    request: SaveRequest, backend: Backend, prepared: Any, tree: Node, watch: Stopwatch, listing: Listing | None = None
) -> None:
    """Write to a temporary, publish it, and retain; ``listing`` is a new one of the directory, or None."""
    location, meter = request.location, request.options.meter

    def nbytes() -> int:
        return nbytes_of(leaf for _, leaf in iter_leaves(tree))

    if request.async_manager:
        watch.lap("queue")
    if backend.write_event:
        monitoring.record_event(backend.write_event)
    with meter.reporting():
        request.directory.with_listing(listing).prepare_directory()
        if meter.is_on:
            meter.begin(request.path, nbytes(), rounds=2 if location.is_remote else 1)  # written, and sent
        with interrupted_saves.explaining_failures(location), location.temporary() as temporary:
            # Saving is an explicit request to move data to the host, also under jax.transfer_guard("disallow").
            with writing(request.path, temporary), jax.transfer_guard_device_to_host("allow"):
                backend.write(temporary, prepared, request.options)
            watch.lap("write")
            validation.publish(request, lambda place, new: place.publish(temporary, new=new, meter=meter))
        watch.lap("publish")
        retain(request)
        watch.lap("retain")
    watch.count(nbytes)
    watch.log("Saved", request.path)
