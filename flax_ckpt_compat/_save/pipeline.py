"""Run a save, for every format: validate, snapshot, write, publish, retain.

Of several processes each writes its part, with a barrier before and after it, and process 0 commits. Before, digests of
the trees are compared: arrays that are spread over processes must agree; of others process 0's are saved.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax import monitoring

from flax_ckpt_compat._core.backend import Backend, Format, ProcessSave
from flax_ckpt_compat._core.errors import translated
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.local.presence import occupy_standard_streams
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.numbered_names import ARRAYS_POSTFIX
from flax_ckpt_compat._core.object_store import commit as uploads
from flax_ckpt_compat._core.storage import Listing
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import HostCopy, KeyData, Node, Path, iter_leaves, show_path
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._discovery.saved_steps import log_once
from flax_ckpt_compat._save import async_saves, checkpointer_adapter, interrupted_saves, snapshot, validation
from flax_ckpt_compat._save.coordination import BEGIN, COMMIT, Coordinator, Reports
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._save.retention import retain
from flax_ckpt_compat._trees import depth

_GROUPS = 64  # of leaves, by a checksum of their names: so reports of large trees stay small
_LOOKUP_TIMEOUTS = 4  # how many times ``coordination_timeout`` look-ups wait for this process's background save


def save(request: SaveRequest, target: Any) -> str:
    """Save a tree; return the checkpoint's path in the caller's form."""
    meter = request.options.meter
    occupy_standard_streams()
    monitoring.record_event("/jax/flax/checkpoint/save")
    with depth.limited("saved"):
        if request.multiprocess and jax.process_count() > 1:
            _save_together(request, target)
        else:
            async_saves.wait_for_earlier_saves(request)
            meter.lap("wait for earlier saves")
            listing = validation.check(request)
            if request.orbax_checkpointer:
                request.directory.prepare_directory()
                checkpointer_adapter.save(request, target)
            else:
                backend = backend_for(request.format)
                tree = snapshot.tree_to_save(target, request)
                write = functools.partial(_write, request, backend, backend.prepare(tree), tree)
                meter.lap("prepare")
                if request.async_manager:
                    async_saves.start(request.async_manager, request.directory, write)
                else:
                    write(listing)
    monitoring.record_event_duration_secs("/jax/checkpoint/write/durations_sec", time.time() - request.start)
    return request.shown_path


def _write(request: SaveRequest, backend: Backend, prepared: Any, tree: Node, listing: Listing | None = None) -> None:
    """Write to a temporary, publish it, and retain; ``listing`` is a new one of the directory, or None."""
    location, meter, nbytes = request.location, request.options.meter, functools.partial(_own_nbytes, tree)
    if request.async_manager:
        meter.lap("queue")
    _record_task(backend)
    with meter.reporting():
        request.directory.with_listing(listing).prepare_directory()
        meter.begin(request.path, nbytes, rounds=2 if location.is_remote else 1)  # written, and sent
        with interrupted_saves.explaining_failures(location), location.temporary() as temporary:
            # Saving is an explicit request to move data to the host, also under jax.transfer_guard("disallow").
            with translated(request.path, "saved", temporary=temporary), jax.transfer_guard_device_to_host("allow"):
                backend.write(temporary, prepared, request.options)
            meter.lap("write")
            validation.publish(request, lambda place, new: place.publish(temporary, new=new, meter=meter))
        meter.lap("publish")
        retain(request)
        meter.lap("retain")
    meter.log()


def _record_task(backend: Backend) -> None:
    """Record Flax's event of the task that saves a msgpack file, in the process that commits it."""
    if backend.format is Format.MSGPACK:
        monitoring.record_event("/jax/flax/checkpoint/save_main_ckpt_task")


def _save_together(request: SaveRequest, target: Any) -> None:
    """Save a tree of which each process holds a part; all processes call this, and any failure raises in all."""
    coordinator = Coordinator(request.path, request.coordination_timeout)
    if request.orbax_checkpointer:
        _save_with_checkpointer(request, target, coordinator)
        return
    own = _OwnSave(request, coordinator, backend_for(request.format))
    own.join(coordinator.barrier(BEGIN, functools.partial(own.prepare, target), on_primary=own.begin))
    if request.async_manager:
        own.start()
    else:
        own.write_and_commit()


@dataclasses.dataclass(slots=True)
class _OwnSave:
    """This process's part in a save of several."""

    request: SaveRequest
    coordinator: Coordinator
    backend: Backend
    # What it writes to a temporary, which is process 0's, or for a store a local one of this process.
    part: ProcessSave = dataclasses.field(init=False)
    tree: Node = None
    replicas: snapshot.Replicas = dataclasses.field(default_factory=dict)
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_begun: bool = False  # this process writes, or did
    publishing: bool = False  # process 0 has begun to publish

    def prepare(self, target: Any) -> dict[str, Any]:
        """Plan what this process saves of a tree; return what process 0 compares."""
        request, process = self.request, self.coordinator.process
        async_saves.wait_for_earlier_saves(request)
        self.tree = snapshot.tree_to_save(target, request, self.replicas)
        prepared = self.backend.prepare(self.tree, process)
        self.part = ProcessSave(request.location.temporary_path(), prepared, request.options, process)
        self.report = _report(request, self.backend, self.tree, self.replicas)
        return self.report

    def begin(self, reports: Reports) -> dict[str, Any]:
        """Create the staging area that all processes write to, in process 0; return what `join` needs to know."""
        request, own = self.request, self.report
        for index, other in sorted(reports.items()):
            differing = _differing(self.tree, own["spread"], other["spread"])
            if differing or other["signature"] != own["signature"]:
                raise self.coordinator.mismatch(index, other["signature"], own["signature"], differing)
        _warn_of_more_leaves(request.path, own["leaves"], reports)
        validation.check(request)
        request.directory.prepare_directory()
        upload = None
        if request.location.is_remote:
            upload = uploads.Upload(request.path, request.path + ARRAYS_POSTFIX if self.backend.uses_gda_folder else "")
            upload.begin()
        self.part = dataclasses.replace(self.part, upload=upload)
        try:
            with self._writing():
                self.backend.begin_multiprocess(self.part)
        except BaseException:
            self._clean_up()
            raise
        same = all(other["replicas"] == own["replicas"] for other in reports.values())
        return {"agrees": same, "path": self.part.path, "upload": upload and (upload.url, upload.folder, upload.marker)}

    def join(self, begun: Mapping[str, Any]) -> None:
        """Take over what process 0 has begun, and which process writes which replicated array."""
        shared = self.replicas if begun["agrees"] and not self.backend.uses_gda_folder else {}  # by a hash of the name
        writers = {path: who[_checksum(path) % len(who)] for path, (who, _, _) in shared.items()}
        options = dataclasses.replace(self.part.options, writers=writers)
        upload = begun["upload"] and uploads.Upload(*begun["upload"])
        path = self.part.path if upload else begun["path"]
        self.part = dataclasses.replace(self.part, path=path, upload=upload, options=options)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        explaining = interrupted_saves.explaining_failures(self.request.location)
        naming = translated(self.request.path, "saved", temporary=self.part.path)
        with explaining, naming, jax.transfer_guard_device_to_host("allow"):
            yield

    def start(self) -> None:
        """Write and commit in the background."""
        request, timeout = self.request, _LOOKUP_TIMEOUTS * self.coordinator.timeout
        try:
            async_saves.start(request.async_manager, request.directory, self.write_and_commit, lookup_timeout=timeout)
        except BaseException as error:
            if not self.has_begun:  # the others must not wait for this process
                self.write_and_commit(failed=error)
            raise

    def write_and_commit(self, failed: BaseException | None = None) -> None:
        """Write this process's part, unless it has failed; then wait for all, and commit in process 0."""
        request, part, meter, self.has_begun = self.request, self.part, self.part.options.meter, True

        def write() -> None:
            if failed is not None:
                raise failed
            with self._writing():
                self.backend.write_process_part(part)
                if part.upload is not None:
                    part.upload.check_active()

        with meter.reporting():
            nbytes = functools.partial(_own_nbytes, self.tree, part.options.writers, part.process.index)
            # Without a callback nobody asks for the bytes: a save by several processes has no line in the log.
            meter.begin(request.path, nbytes if meter.is_on else lambda: 0, rounds=2 if part.upload else 1)
            try:
                self.coordinator.barrier(COMMIT, write, on_primary=self._commit)
            finally:
                self._clean_up()

    def _commit(self, _: Reports) -> None:
        """Commit what all processes have written, in process 0."""
        request, path, upload = self.request, self.part.path, self.part.upload

        def publish(location: Location, new: bool) -> None:
            self.publishing = True
            (location if upload is None else upload).publish(path, new=new)

        _record_task(self.backend)
        with self._writing():
            self.backend.finish_multiprocess(self.part)
        validation.publish(request, publish)
        retain(request)

    def _clean_up(self) -> None:
        """Remove what is left of the temporary, and in process 0 of an upload that it has not begun to publish."""
        # Another process removes what all write to once process 0 has given up, which may have met it writing there.
        coordinator, upload = self.coordinator, self.part.upload
        if coordinator.is_primary or coordinator.is_aborted or upload is not None:
            atomic.remove_temporary(self.part.path)
        if coordinator.is_primary and upload is not None and not self.publishing:
            upload.abort()


def _own_nbytes(tree: Node, writers: Mapping[Path, int] = {}, process: int = 0) -> int:
    """Return the bytes of arrays that a process writes: its shards of those that are spread, and others of its own."""
    found = 0
    for path, array in _values_of(tree):
        if _spans_processes(array):
            shards = array.shards if isinstance(array, HostCopy) else array.addressable_shards
            found += sum(shard.data.nbytes for shard in shards if getattr(shard, "replica_id", 0) == 0)
        elif writers.get(path, 0) == process:
            found += getattr(array, "nbytes", 0)
    return found


def _save_with_checkpointer(request: SaveRequest, target: Any, coordinator: Coordinator) -> None:
    """Save with a user's Orbax checkpointer, which synchronizes the processes itself; process 0 cleans up."""

    def begin(_: Reports) -> str:
        validation.check(request)
        request.directory.prepare_directory()
        return checkpointer_adapter.written_path(request.path)

    written = coordinator.barrier(BEGIN, lambda: async_saves.wait_for_earlier_saves(request), on_primary=begin)
    write = functools.partial(checkpointer_adapter.save, is_primary=coordinator.is_primary)
    # Only after it has process 0 published what replaces something.
    coordinator.barrier(COMMIT, lambda: write(request, target, written))


def _report(request: SaveRequest, backend: Backend, tree: Node, replicas: snapshot.Replicas) -> dict[str, Any]:
    """Return what process 0 compares; JSON-serializable."""
    options, signature = request.options, f"{request.format.value} with overwrite={request.overwrite}"
    if not backend.uses_gda_folder and options.compression is not None:
        signature += f", compression={options.compression!r}"
    spread, count, names = Counter[str](), 0, 0
    for path, leaf in iter_leaves(tree):
        kind, array = (leaf.impl, leaf.data) if isinstance(leaf, KeyData) else ("", leaf)
        checksum = _checksum(path)
        count, names = count + 1, names + checksum
        if _spans_processes(array):
            layout = _layout(array.sharding, array.shape, f"{array.dtype} {kind}")
            spread[str(checksum % _GROUPS)] += zlib.crc32(layout, checksum)
    return {
        "signature": signature + ("" if options.checksums else ", checksums='off'"),
        "spread": {group: f"{total % 2**32:x}" for group, total in spread.items()},
        "leaves": [count, names % 2**32],  # their number, and a sum of their names
        "replicas": hashlib.sha256(repr(sorted(replicas.items())).encode()).hexdigest(),
    }


def _differing(tree: Node, mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Tell which arrays another process spreads differently, for an error; '' for none."""
    if mine == theirs:
        return ""
    groups = {group for group in mine.keys() | theirs.keys() if mine.get(group) != theirs.get(group)}
    spread = [path for path, array in _values_of(tree) if _spans_processes(array)]
    names = one_line(sorted(show_path(path) for path in spread if str(_checksum(path) % _GROUPS) in groups))
    what = "; names, shapes, dtypes or shardings of the arrays that are spread over processes differ"
    return f"{what}; look at {names}" if names else what


def _warn_of_more_leaves(path: str, mine: list[int], reports: Reports) -> None:
    """Warn once of leaves that only another process holds, by the number of leaves and the sum of their names."""
    folder = path.rpartition("/")[0]
    for index, other in sorted(reports.items()):
        number = other["leaves"][0]
        if other["leaves"] != mine and number >= mine[0]:  # one with fewer holds a part of ours
            what = f"{folder}: process {index} holds leaves that process 0 does not hold, and these are not saved"
            remedy = "Give the tree the same keys in all processes. This warning is shown once."
            log_once((folder, "more leaves"), f"{what} ({number} leaves, and {mine[0]} in process 0). {remedy}")
            return


def _values_of(tree: Node) -> Iterator[tuple[Path, Any]]:
    """Yield all leaves, of a key its data."""
    for path, leaf in iter_leaves(tree):
        yield path, leaf.data if isinstance(leaf, KeyData) else leaf


def _checksum(path: Path) -> int:
    return zlib.crc32(show_path(path).encode("utf-8", "surrogateescape"))


def _spans_processes(array: Any) -> bool:
    """Return whether each process writes its own shards of an array."""
    sharding = getattr(array, "sharding", None) if isinstance(array, (jax.Array, HostCopy)) else None
    return sharding is not None and not sharding.is_fully_addressable


@functools.lru_cache(maxsize=256)  # leaves share few shardings and shapes, and saves have the same
def _layout(sharding: Any, shape: tuple[int, ...], kind: str) -> bytes:
    """Return what has to be the same in all processes whose shards fit together."""
    parts = [(device.id, index) for device, index in sharding.devices_indices_map(shape).items()]
    return f"{kind} {shape} {parts}".encode()
