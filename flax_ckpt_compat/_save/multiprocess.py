"""Run a multi-process save: the steps of `pipeline`, with a barrier before and after writing; process 0 commits."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax import monitoring

from flax_ckpt_compat._core.backend import Backend, ProcessSave, WriteOptions
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.object_store import multiprocess as uploads
from flax_ckpt_compat._core.progress import PART_BEFORE_UPLOAD, nbytes_of
from flax_ckpt_compat._core.storage_errors import writing
from flax_ckpt_compat._core.tree import HostCopy, KeyData, Node, Path, StoredArray, iter_leaves
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._save import async_saves, checkpointer_adapter, interrupted_saves, snapshot, validation
from flax_ckpt_compat._save.coordination import Coordinator
from flax_ckpt_compat._save.request import SaveManager, SaveRequest
from flax_ckpt_compat._save.retention import retain
from flax_ckpt_compat._save.tree_agreement import Replicas, TreeSummary

# Look-ups wait for this process's part of a background save, for so many times ``coordination_timeout``.
_LOOKUP_TIMEOUTS = 4


def save(request: SaveRequest, target: Any) -> None:
    """Save a tree of which each process holds a part; all processes call this, and any failure raises in all."""
    coordinator = Coordinator(request.path, request.coordination_timeout)
    if request.orbax_checkpointer:
        _save_with_checkpointer(request, target, coordinator)
        return
    own, failed, summary = _OwnSave(request, coordinator, backend_for(request.format), request.options), None, None
    replicas = Replicas()
    try:
        async_saves.wait_for_earlier_saves(request)
        tree = snapshot.tree_to_save(target, request, replicas)
        own.prepared = own.backend.prepare(tree, coordinator.process)
        summary = TreeSummary(tree)
    except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
        failed = error
    staging_json = coordinator.join(
        failed=failed, signature=_signature(request, own.backend), summary=summary, proposal=replicas.digest(),
        on_primary=own.begin,
    )  # fmt: skip
    if coordinator.agrees and own.backend.splits_replicas:
        own.options = dataclasses.replace(own.options, writers=replicas.writers())
    if own.options.meter.is_on:
        own.nbytes = _own_nbytes(tree, own.options.writers, coordinator.process.index)
    if request.async_manager:
        own.start(request.async_manager, staging_json)
    else:
        own.write_and_commit(staging_json)


def _signature(request: SaveRequest, backend: Backend) -> str:
    """Return the arguments and settings that have to be the same in all processes, as text."""
    options, found = request.options, f"{request.format.value} with overwrite={request.overwrite}"
    if backend.compresses and options.compression is not None:
        found += f", compression={options.compression!r}"
    return found + ("" if options.checksums else ", checksums='off'")


@dataclasses.dataclass(slots=True)
class Staging:
    """The temporary of one save, as one of its processes sees it; for a save to a store it is local."""

    path: str
    upload: uploads.Upload | None = None  # of a save to a store
    publishing: bool = False  # process 0 has begun to publish

    def to_json(self) -> str:
        """Encode for the other processes' `from_json`."""
        return json.dumps({"path": self.path, "upload": None if self.upload is None else self.upload.fields()})

    def publish(self, location: Location, *, new: bool) -> None:
        """Publish what all processes wrote; called in process 0. See `Storage.publish`."""
        self.publishing = True
        if self.upload is None:
            location.publish(self.path, new=new)
        else:
            self.upload.publish(self.path, new=new)

    def cleanup(self, is_primary: bool, *, late: bool = False) -> None:
        """Remove what this process wrote, and in process 0 what all wrote, after a failed save.

        Keep what a store may already count as a checkpoint. ``late``: process 0 gave up before this process finished
        writing, which may have recreated removed files."""
        if is_primary or late or self.upload is not None:
            atomic.remove_temporary(self.path)
        if is_primary and self.upload is not None and not self.publishing:
            self.upload.abort()

    def remove_local(self) -> None:
        """Remove the local temporary of a process other than 0 after a commit to a store."""
        if self.upload is not None:
            atomic.remove_temporary(self.path)

    @classmethod
    def begin(cls, location: Location, *, in_gda_folder: bool) -> Staging:
        """Choose the temporary; called in process 0."""
        upload = uploads.begin(location, in_gda_folder=in_gda_folder)
        return cls(location.temporary_path(), upload)

    @classmethod
    def from_json(cls, text: str, location: Location, is_primary: bool) -> Staging:
        """Decode the temporary that process 0 chose for a location."""
        found = json.loads(text)
        if found["upload"] is None:
            return cls(found["path"])
        upload = uploads.Upload(**found["upload"])
        return cls(found["path"] if is_primary else location.at(upload.url).temporary_path(), upload)


@dataclasses.dataclass(slots=True)
class _OwnSave:
    """This process's part in a save of several."""

    request: SaveRequest
    coordinator: Coordinator
    backend: Backend
    options: WriteOptions
    prepared: Any = None
    nbytes: int = 0  # of what this process writes, if that is reported

    def begin(self) -> str:
        """Create the staging area that all processes write to, in process 0; return it as JSON."""
        request = self.request
        validation.check(request)
        request.directory.prepare_directory()
        staged = Staging.begin(request.location, in_gda_folder=self.backend.uses_gda_folder)
        try:
            with self._writing(staged), jax.transfer_guard_device_to_host("allow"):
                self.backend.begin_multiprocess(self._part(staged))
        except BaseException:
            staged.cleanup(is_primary=True)
            raise
        return staged.to_json()

    def _part(self, staged: Staging) -> ProcessSave:
        return ProcessSave(staged.path, self.prepared, self.options, self.coordinator.process, staged.upload)

    @contextmanager
    def _writing(self, staged: Staging) -> Iterator[None]:
        with interrupted_saves.explaining_failures(self.request.location), writing(self.request.path, staged.path):
            yield

    def start(self, manager: SaveManager, staging_json: str) -> None:
        """Write and commit in the background."""
        started = threading.Event()

        def task() -> None:
            started.set()
            self.write_and_commit(staging_json)

        lookup_timeout = _LOOKUP_TIMEOUTS * self.coordinator.timeout
        try:
            async_saves.start(manager, self.request.directory, task, lookup_timeout=lookup_timeout)
        except BaseException as error:
            if not started.is_set():  # the others must not wait for this process
                self.write_and_commit(staging_json, failed=error)
            raise

    def write_and_commit(self, staging_json: str, failed: BaseException | None = None) -> None:
        """Write this process's part, unless it has failed; then wait for all, and commit in process 0."""
        request, staged, is_primary = self.request, None, self.coordinator.process.index == 0
        meter = self.options.meter
        with meter.reporting():
            try:
                staged = Staging.from_json(staging_json, request.location, is_primary)
                if meter.is_on:
                    meter.begin(request.path, self.nbytes, until=PART_BEFORE_UPLOAD if staged.upload else 1.0)
                if failed is None:
                    with self._writing(staged), jax.transfer_guard_device_to_host("allow"):
                        self.backend.write_process_part(self._part(staged))
            except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
                failed = error
            self._commit(staged, failed)
        meter.settle(in_background=request.async_manager is not None)

    def _commit(self, staged: Staging | None, failed: BaseException | None) -> None:
        """Wait for all processes, and commit in process 0."""
        request, is_primary = self.request, self.coordinator.process.index == 0

        def commit() -> str:
            assert staged is not None
            if self.backend.write_event:
                monitoring.record_event(self.backend.write_event)
            with self._writing(staged):
                self.backend.finish_multiprocess(self._part(staged))
            validation.publish(request, lambda location, new: staged.publish(location, new=new))
            retain(request)
            return ""

        try:
            self.coordinator.barrier("commit", failed=failed, on_primary=commit)
        except BaseException:
            if staged is not None:
                staged.cleanup(is_primary, late=self.coordinator.is_aborted)
            raise
        if not is_primary and staged is not None:
            staged.remove_local()


def _own_nbytes(tree: Node, writers: Mapping[Path, int], process: int) -> int:
    """Return the bytes of arrays that a process writes: its shards of those that are spread, and others of its own."""
    found = 0
    for path, leaf in iter_leaves(tree):
        array = leaf.data if isinstance(leaf, KeyData) else leaf
        sharding = getattr(array, "sharding", None)
        if sharding is None or isinstance(array, StoredArray) or sharding.is_fully_addressable:
            found += nbytes_of([array]) if writers.get(path, 0) == process else 0
        elif isinstance(array, HostCopy):
            found += sum(shard.data.nbytes for shard in array.shards)
        else:
            found += sum(shard.data.nbytes for shard in array.addressable_shards if shard.replica_id == 0)
    return found


def _save_with_checkpointer(request: SaveRequest, target: Any, coordinator: Coordinator) -> None:
    """Save with a user's Orbax checkpointer, which synchronizes the processes itself; process 0 cleans up."""
    failed = None
    try:
        async_saves.wait_for_earlier_saves(request)
    except BaseException as error:  # noqa: BLE001  (reported to the others)
        failed = error

    def begin() -> str:
        validation.check(request)
        request.directory.prepare_directory()
        return checkpointer_adapter.written_path(request.path)

    written, is_primary = coordinator.join(failed=failed, on_primary=begin), coordinator.process.index == 0
    try:
        checkpointer_adapter.save(request, target, written, is_primary=is_primary)
    except BaseException as error:  # noqa: BLE001  (reported to the others)
        failed = error
    # Only now has process 0 published what replaces something.
    coordinator.barrier("commit", failed=failed)
