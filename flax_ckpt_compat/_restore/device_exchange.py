"""Exchange bytes between processes over their devices: each gives its arrays, and gets those of the others."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_ckpt_compat._core import checksums, memory
from flax_ckpt_compat._core.errors import MultiprocessRestoreError
from flax_ckpt_compat._restore import placement

# What one step puts on a device, of all processes together; a process gives at least so much at once.
_STEP_BYTES, _LEAST_BYTES = 128 << 20, 1 << 20
_AXIS = "process"

Group = tuple[int, ...]  # indices of the processes that exchange something, sorted
Arrays = Mapping[int, Sequence[np.ndarray[Any, Any]]]  # process → its arrays, C-contiguous


@dataclasses.dataclass
class _Progress:
    """Progress of an exchange in another thread: when its last step ended, and what it raised."""

    moved: float = dataclasses.field(default_factory=time.monotonic)
    error: BaseException | None = None


def exchange(path: str, groups: Mapping[Group, Arrays], timeout: float, name: str) -> None:
    """Fill the arrays of the other processes with their values; all processes of a group call this at once.

    Every member of a group gives the same shapes and dtypes, and sends its own arrays. ``name`` is unique within the
    job: bytes of another exchange are an error. Raise MultiprocessRestoreError if a step fails, or takes more than
    ``timeout`` seconds."""
    progress = _Progress()
    # In a thread: a step waits for processes that may have died, and nothing interrupts it.
    worker = threading.Thread(target=_run, args=(groups, progress, name), name="flax-ckpt-exchange", daemon=True)
    try:
        worker.start()
    except RuntimeError as error:  # none can be started
        progress.error = error
    while worker.is_alive() and (left := progress.moved + timeout - time.monotonic()) > 0:
        worker.join(min(left, 1.0))
    if worker.is_alive() or progress.error is not None:
        what = f"took longer than {timeout:g} s" if progress.error is None else f"failed: {progress.error}"
        raise MultiprocessRestoreError(
            f"{path}: the exchange of arrays between processes {what}. A process may have died: look at its log, and "
            "start the job again. If the devices cannot do it, restore without the setting read_once.",
            path=path,
        ) from progress.error


def _run(groups: Mapping[Group, Arrays], progress: _Progress, name: str) -> None:
    try:
        # Without jit, nothing would be gathered.
        with placement.all_transfers_allowed(), jax.disable_jit(False):
            for group in sorted(groups):  # in one order everywhere, so that overlapping groups do not block each other
                _exchange_in(group, groups[group], progress, name)
    except BaseException as error:  # noqa: BLE001  (raised by the thread that waits)
        progress.error = error


def _exchange_in(group: Group, arrays: Arrays, progress: _Progress, name: str) -> None:
    sizes = {process: sum(array.nbytes for array in arrays[process]) for process in group}
    most, longest = max(_LEAST_BYTES, _STEP_BYTES // len(group)), max(sizes.values())
    for start in range(0, longest, most):
        # Of few distinct sizes, each of which compiles a program.
        size = min(most, 1 << (longest - start - 1).bit_length())
        seed = checksums.crc32(f"{name} {group} {start}".encode())
        own = memory.empty((1, size + checksums.SUM_BYTES), np.dtype(np.uint8))
        for part, at in _parts(arrays[jax.process_index()], start, size):
            own[0, at : at + part.size] = part
        own[0, size:] = _checksum(own[0, :size], seed)
        gathered = _all_gather(group, own)
        # Collectives of one group that run at the same time mix their bytes, and debugging modes of jax gather none.
        if len(gathered) != len(group) or any((_checksum(row[:size], seed) != row[size:]).any() for row in gathered):
            raise RuntimeError("other bytes came than those that were sent")
        for row, process in enumerate(group):
            if process != jax.process_index():
                for part, at in _parts(arrays[process], start, size):
                    part[:] = gathered[row, at : at + part.size]
        progress.moved = time.monotonic()


def _checksum(data: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(checksums.encode(checksums.crc32(data, seed)), np.uint8)


def _parts(
    arrays: Sequence[np.ndarray[Any, Any]], start: int, size: int
) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.uint8]], int]]:
    """Yield the parts of arrays that lie in a range of all their bytes, one after another, and where in it they do."""
    at = -start
    for array in arrays:
        if at >= size:
            return
        if at + array.nbytes > 0:
            flat = array.reshape(-1).view(np.uint8)
            yield flat[max(0, -at) : size - at], max(0, at)
        at += array.nbytes


def _all_gather(group: Group, own: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return one row of bytes of each process, in the order of the group."""
    mesh, gather = _program(group)
    device = mesh.devices[group.index(jax.process_index())]
    rows = jax.make_array_from_single_device_arrays(
        (len(group), own.shape[1]), NamedSharding(mesh, PartitionSpec(_AXIS)), [jax.device_put(own, device)]
    )
    return np.asarray(gather(rows).addressable_data(0))


@functools.lru_cache(maxsize=64)
def _program(group: Group) -> tuple[Mesh, Any]:
    """Return one device of each process, and the program that gathers what lies on them."""
    first = {device.process_index: device for device in sorted(jax.devices(), key=lambda one: -one.id)}
    mesh = Mesh(np.array([first[process] for process in group]), (_AXIS,))
    return mesh, jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
