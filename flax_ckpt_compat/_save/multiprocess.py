"""Run a multi-process save: the steps of `pipeline`, with a barrier before and after writing; process 0 commits.

Before anything is written, small digests of the trees are compared. Arrays spread over processes must agree; of other
leaves process 0's are saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax import monitoring

from flax_ckpt_compat._core.backend import Backend, ProcessSave
from flax_ckpt_compat._core.jax_shards import Memo
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.object_store import multiprocess as uploads
from flax_ckpt_compat._core.progress import PART_BEFORE_UPLOAD, nbytes_of
from flax_ckpt_compat._core.storage_errors import writing
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import HostCopy, KeyData, Node, Path, iter_leaves, show_path
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._discovery.log_once import log_once
from flax_ckpt_compat._save import async_saves, checkpointer_adapter, interrupted_saves, snapshot, validation
from flax_ckpt_compat._save.coordination import BEGIN, COMMIT, Coordinator, Reports
from flax_ckpt_compat._save.request import SaveManager, SaveRequest
from flax_ckpt_compat._save.retention import retain
from flax_ckpt_compat._save.snapshot import Replicas

# Leaves are grouped by a checksum of their names, so that messages of large trees stay small.
_GROUPS = 64
# Look-ups wait for this process's part of a background save, for so many times ``coordination_timeout``.
_LOOKUP_TIMEOUTS = 4


def save(request: SaveRequest, target: Any) -> None:
    """Save a tree of which each process holds a part; all processes call this, and any failure raises in all."""
    coordinator = Coordinator(request.path, request.coordination_timeout)
    if request.orbax_checkpointer:
        _save_with_checkpointer(request, target, coordinator)
        return
    backend, failed, report = backend_for(request.format), None, dict[str, Any]()
    tree, replicas, prepared, signature, summary = None, dict[Path, Any](), None, _signature(request, backend), None
    part = ProcessSave("", prepared, request.options, coordinator.process)
    try:
        async_saves.wait_for_earlier_saves(request)
        tree = snapshot.tree_to_save(target, request, replicas)
        prepared = backend.prepare(tree, coordinator.process)
        summary = _TreeSummary(tree)
        signature += f" and {summary.spread}"
        report = {
            "tree": summary.details,
            "replicas": hashlib.sha256(repr(sorted(replicas.items())).encode()).hexdigest(),
        }
        part = dataclasses.replace(part, path=request.location.temporary_path(), prepared=prepared)
    except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
        failed = error
    own = _OwnSave(request, coordinator, backend, part)

    def begin(reports: Reports) -> dict[str, Any]:
        for index, other in sorted(reports.items()):
            if other["signature"] != signature:
                hint = "" if summary is None else summary.why_spread_differs(other["tree"])
                raise coordinator.mismatch(index, other["signature"], signature, hint)
        if summary is not None:
            summary.warn_of_more_leaves(request.path, {index: other["tree"] for index, other in reports.items()})
        agrees = all(other["replicas"] == report["replicas"] for other in reports.values())
        return {"agrees": agrees, **own.begin()}

    begun = coordinator.barrier(BEGIN, failed=failed, report={"signature": signature, **report}, on_primary=begin)
    own.join(begun, _writers(replicas) if begun["agrees"] and backend.splits_replicas else {}, tree)
    if request.async_manager:
        own.start(request.async_manager)
    else:
        own.write_and_commit()


def _signature(request: SaveRequest, backend: Backend) -> str:
    """Return the arguments and settings that have to be the same in all processes, as text."""
    options, found = request.options, f"{request.format.value} with overwrite={request.overwrite}"
    if backend.compresses and options.compression is not None:
        found += f", compression={options.compression!r}"
    return found + ("" if options.checksums else ", checksums='off'")


@dataclasses.dataclass(slots=True)
class _OwnSave:
    """This process's part in a save of several."""

    request: SaveRequest
    coordinator: Coordinator
    backend: Backend
    part: ProcessSave  # its temporary is process 0's, or for a store a local one of this process
    nbytes: int = 0  # of what this process writes, if that is reported
    publishing: bool = False  # process 0 has begun to publish

    @property
    def is_primary(self) -> bool:
        """Return whether this is process 0, which commits."""
        return self.part.process.index == 0

    def begin(self) -> dict[str, Any]:
        """Create the staging area that all processes write to, in process 0; return what `join` needs to know."""
        request = self.request
        validation.check(request)
        request.directory.prepare_directory()
        upload = uploads.begin(request.location, in_gda_folder=self.backend.uses_gda_folder)
        self.part = dataclasses.replace(self.part, upload=upload)
        try:
            with self._writing():
                self.backend.begin_multiprocess(self.part)
        except BaseException:
            self._clean_up()
            raise
        return {"path": self.part.path, "upload": None if upload is None else upload.fields()}

    def join(self, begun: Mapping[str, Any], writers: Mapping[Path, int], tree: Node) -> None:
        """Take over what process 0 has begun, and which process writes which replicated array."""
        options = dataclasses.replace(self.part.options, writers=writers)
        upload = None if begun["upload"] is None else uploads.Upload(**begun["upload"])
        path = self.part.path if upload else begun["path"]
        self.part = dataclasses.replace(self.part, path=path, upload=upload, options=options)
        if options.meter.is_on:
            self.nbytes = _own_nbytes(tree, writers, self.part.process.index)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        explaining = interrupted_saves.explaining_failures(self.request.location)
        with explaining, writing(self.request.path, self.part.path), jax.transfer_guard_device_to_host("allow"):
            yield

    def start(self, manager: SaveManager) -> None:
        """Write and commit in the background."""
        started = threading.Event()

        def task() -> None:
            started.set()
            self.write_and_commit()

        lookup_timeout = _LOOKUP_TIMEOUTS * self.coordinator.timeout
        try:
            async_saves.start(manager, self.request.directory, task, lookup_timeout=lookup_timeout)
        except BaseException as error:
            if not started.is_set():  # the others must not wait for this process
                self.write_and_commit(failed=error)
            raise

    def write_and_commit(self, failed: BaseException | None = None) -> None:
        """Write this process's part, unless it has failed; then wait for all, and commit in process 0."""
        request, meter = self.request, self.part.options.meter
        with meter.reporting():
            if meter.is_on:
                meter.begin(request.path, self.nbytes, until=PART_BEFORE_UPLOAD if self.part.upload else 1.0)
            try:
                if failed is None:
                    with self._writing():
                        self.backend.write_process_part(self.part)
            except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
                failed = error
            try:
                self.coordinator.barrier(COMMIT, failed=failed, on_primary=self._commit)
            finally:
                self._clean_up()
        meter.settle(in_background=request.async_manager is not None)

    def _commit(self, _: Reports) -> None:
        """Commit what all processes have written, in process 0."""
        request, path, upload = self.request, self.part.path, self.part.upload

        def publish(location: Location, new: bool) -> None:
            self.publishing = True
            (location if upload is None else upload).publish(path, new=new)

        if self.backend.write_event:
            monitoring.record_event(self.backend.write_event)
        with self._writing():
            self.backend.finish_multiprocess(self.part)
        validation.publish(request, publish)
        retain(request)

    def _clean_up(self) -> None:
        """Remove what is left of the temporary, and in process 0 of an upload that no store may count as a checkpoint.

        Another process removes what all write to only once process 0 has given up: it may have made anew what that one
        removed."""
        if self.is_primary or self.coordinator.is_aborted or self.part.upload is not None:
            atomic.remove_temporary(self.part.path)
        if self.is_primary and self.part.upload is not None and not self.publishing:
            self.part.upload.abort()


def _writers(replicas: Replicas) -> dict[Path, int]:
    """Return which process writes each array, by a hash of its name."""
    return {
        path: holders[zlib.crc32(show_path(path).encode("utf-8", "surrogateescape")) % len(holders)]
        for path, (holders, _, _) in replicas.items()
    }


def _own_nbytes(tree: Node, writers: Mapping[Path, int], process: int) -> int:
    """Return the bytes of arrays that a process writes: its shards of those that are spread, and others of its own."""
    found = 0
    for path, leaf in iter_leaves(tree):
        array = leaf.data if isinstance(leaf, KeyData) else leaf
        if not _spans_processes(array):
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

    def begin(_: Reports) -> str:
        validation.check(request)
        request.directory.prepare_directory()
        return checkpointer_adapter.written_path(request.path)

    written, is_primary = coordinator.barrier(BEGIN, failed=failed, on_primary=begin), coordinator.process.index == 0
    try:
        checkpointer_adapter.save(request, target, written, is_primary=is_primary)
    except BaseException as error:  # noqa: BLE001  (reported to the others)
        failed = error
    # Only now has process 0 published what replaces something.
    coordinator.barrier(COMMIT, failed=failed)


class _TreeSummary:
    """Digest of one process's tree, sent to process 0."""

    def __init__(self, tree: Node):
        described = Memo[str](lambda array: f"{array[1]} {array[2]} {_layout(array[0])}")
        self._names = defaultdict[str, list[str]](list)  # of arrays that are spread, by group
        spread, count, names = Counter[str](), 0, 0
        for path, leaf in iter_leaves(tree):
            name = show_path(path)
            checksum = zlib.crc32(name.encode("utf-8", "surrogateescape"))
            count, names = count + 1, names + checksum
            array = leaf.data if isinstance(leaf, KeyData) else leaf
            if _spans_processes(array):
                group = str(checksum % _GROUPS)
                self._names[group].append(name)
                layout = described.of((array.sharding, array.shape, array.dtype))
                spread[group] += zlib.crc32(layout.encode(), checksum)
        whole, number = zlib.crc32(repr(sorted(spread.items())).encode()), sum(map(len, self._names.values()))
        # Number and digest of the arrays that are spread over processes, as text.
        self.spread = f"{number} arrays spread over processes (names, shapes, dtypes and shardings: {whole:08x})"
        # JSON-serializable: digests by group, which have to be the same in all processes; number of leaves, and a sum
        # of their names.
        digests = {group: f"{total % 2**16:x}" for group, total in spread.items()}
        self.details: dict[str, Any] = {"spread": digests, "leaves": [count, names % 2**32]}

    def why_spread_differs(self, theirs: Mapping[str, Any]) -> str:
        """Name arrays that another process, with these `details`, spreads differently, for an error; '' for none."""
        mine, other = self.details["spread"], theirs.get("spread", {})
        groups = [group for group in mine.keys() | other.keys() if mine.get(group) != other.get(group)]
        names = one_line(sorted(name for group in groups for name in self._names.get(group, ())))
        return f"; look at {names}" if names else ""

    def warn_of_more_leaves(self, path: str, others: Mapping[int, Mapping[str, Any]]) -> None:
        """Warn once of leaves that only other processes hold; ``others`` has their `details` by process."""
        mine = self.details["leaves"]
        more = {index: details["leaves"][0] for index, details in others.items() if details["leaves"] != mine}
        more = {index: count for index, count in sorted(more.items()) if count >= mine[0]}  # fewer are a part of ours
        if more:
            processes, counts = (", ".join(map(str, numbers)) for numbers in (more, more.values()))
            folder = path.rpartition("/")[0]
            log_once(
                (folder, "more leaves"),
                f"{folder}: processes hold leaves that process 0 does not hold, and these are not saved (process "
                f"{processes}: {counts} leaves; process 0: {mine[0]}). Give the tree the same keys in all processes. "
                "This warning is shown once.",
            )


def _spans_processes(array: Any) -> bool:
    """Return whether each process writes its own shards of an array."""
    sharding = getattr(array, "sharding", None) if isinstance(array, jax.Array | HostCopy) else None
    return sharding is not None and not sharding.is_fully_addressable


def _layout(sharding: Any) -> str:
    """Return a sharding as text, equal in all processes whose shards fit together."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"{type(sharding).__name__} over {sorted(device.id for device in sharding.device_set)}"
    spec = [tuple(part) if isinstance(part, tuple | list) else part and (part,) for part in sharding.spec]
    while spec and not spec[-1]:
        spec.pop()
    mesh = sharding.mesh
    return f"{dict(mesh.shape)} {[device.id for device in mesh.devices.flat]} {spec}"
