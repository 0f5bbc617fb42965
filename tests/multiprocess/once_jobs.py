"""What the processes of a team do in the tests of the setting ``read_once``."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import Progress, checkpoints, config
from flax_ckpt_compat._core import progress
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._restore import device_exchange, pipeline, read_once
from flax_ckpt_compat._save import coordination
from tests.multiprocess import jobs
from tests.support.logs import warnings_logged

# Seconds: to wait for processes that do not come, and for others, which the machine may slow down.
WAIT, LONG = 1.0, 20.0
# Name → shape; 16 MiB in all, of which each large array is a quarter.
SHAPES = {f"layer{number}": (256, 4096) for number in range(3)} | {"embed": (1024, 1024), "odd": (7,), "one": ()}


def values(seed: int = 0) -> dict[str, Any]:
    """Arrays that no codec makes smaller."""
    rng = np.random.default_rng(seed)
    return {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}


def target(kind: str) -> dict[str, Any]:
    """What asks for `values`.

    Args:
        kind: ``host``: numpy; ``replicated``: over all devices; ``split``: rows over half of the processes each, so
            that every part is wanted by the other half, too; ``apart``: ``embed`` on one device of process 0, and
            ``layer0`` on one device of each process, the others replicated.
    """
    if kind == "host":
        return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))

    def asked(name: str, shape: tuple[int, ...]) -> Any:
        spec = P("model") if kind == "split" and len(shape) == 2 else P()
        sharding: Any = NamedSharding(mesh, spec)
        if kind == "apart" and name in ("embed", "layer0"):
            sharding = SingleDeviceSharding((jax.devices() if name == "embed" else jax.local_devices())[0])
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    return {name: asked(name, shape) for name, shape in SHAPES.items()}


def save(folder: str, orbax: bool) -> None:
    """Saves `values` as step 1, from process 0."""
    jobs.use(orbax)
    if jax.process_index() == 0:
        checkpoints.save_checkpoint(folder, values(), 1)
    jobs.barrier("saved")


def restore(folder: str, kind: str, *, wait: float = LONG, wanted: Any = None, **settings: Any) -> list[str]:
    """Restores it with ``read_once`` and checks every bit; what was logged as a warning."""
    with warnings_logged() as warnings, config.override(read_once=True, coordination_timeout=wait, **settings):
        got = checkpoints.restore_checkpoint(folder, target(kind), 1)
    for name, stored in (wanted or values()).items():
        if isinstance(got[name], jax.Array):
            if kind != "apart" or jax.process_index() == 0 or name != "embed":
                jobs.check_shards(name, got[name], stored)
        else:
            assert got[name].tobytes() == stored.tobytes(), name
            assert got[name].flags.writeable
    return warnings


def bytes_of_restore(folder: str, kind: str) -> int:
    """How many bytes this process read."""
    restore(folder, kind)  # modules and programs are loaded first
    return jobs.bytes_read(restore, folder, kind)


def restore_unlike(folder: str) -> list[str]:
    """Restores whole arrays in process 0, and halves of them in the others."""
    return restore(folder, "host" if jax.process_index() == 0 else "split")


def restore_own(folder: str) -> list[str]:
    """Each process saves other values to a disk of its own, under one path, and restores them."""
    own = f"{folder}/{jax.process_index()}"
    os.makedirs(own)
    before = os.getcwd()
    os.chdir(own)
    try:
        mine = values(jax.process_index())
        checkpoints.save_checkpoint("/proc/self/cwd/checkpoints", mine, 1)
        jobs.barrier("saved")
        return restore("/proc/self/cwd/checkpoints", "host", wanted=mine)
    finally:
        os.chdir(before)


def restore_failing(folder: str, failing: int) -> list[str]:
    """Restores where one process cannot read large arrays."""
    own, patch = os.preadv, pytest.MonkeyPatch()

    def preadv(fd: int, buffers: Any, offset: int, *flags: Any) -> int:
        if sum(memoryview(buffer).nbytes for buffer in buffers) > 2**16:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return own(fd, buffers, offset, *flags)

    with patch.context() as context:
        if jax.process_index() == failing:
            context.setattr(os, "preadv", preadv)
        return restore(folder, "replicated")


def restore_dying(folder: str, stage: str, how: str) -> list[str]:
    """Restores where process 1 is killed, or hangs, as it reads or exchanges."""

    def stop(*_: Any) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4 * WAIT)

    if jax.process_index() == 1:
        if stage == "read":
            read_once.casting.read = stop  # type: ignore[assignment]
        else:
            device_exchange._all_gather = stop  # type: ignore[assignment]
    return restore(folder, "replicated", wait=WAIT)


def restore_alone(folder: str) -> list[str]:
    """Restores where not all processes do."""
    return restore(folder, "host", wait=WAIT)


def restore_cast(folder: str) -> Any:
    """Restores float32 as bfloat16 and float64, which is cast as it is read; exchanged in steps of 1 MiB."""
    import jax.numpy as jnp

    asked = {name: np.zeros(shape, jnp.bfloat16 if shape else np.float64) for name, shape in SHAPES.items()}
    with (
        pytest.MonkeyPatch.context() as patch,
        config.override(read_once=True, coordination_timeout=LONG, dtype="target"),
    ):
        patch.setattr(device_exchange, "_STEP_BYTES", 2 << 20)
        got = checkpoints.restore_checkpoint(folder, asked, 1)
    for name, stored in values().items():
        assert got[name].dtype == asked[name].dtype
        assert got[name].tobytes() == stored.astype(asked[name].dtype).tobytes(), name


def restore_cast_unlike(folder: str) -> Any:
    """Restores float32 as float16 in process 0, and as float64 in the others."""
    dtype = np.float64 if jax.process_index() else np.float16
    asked = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
    with config.override(read_once=True, coordination_timeout=LONG, dtype="target"):
        got = checkpoints.restore_checkpoint(folder, asked, 1)
    for name, stored in values().items():
        assert got[name].dtype == dtype
        assert got[name].tobytes() == stored.astype(dtype).tobytes(), name


def restore_mixed(folder: str, orbax: bool, kind: str) -> None:
    """As `jobs.restore_mixed`, together."""
    with config.override(read_once=True, coordination_timeout=LONG):
        jobs.restore_mixed(folder, orbax, kind)


def restore_unopened(folder: str, failing: int) -> list[str]:
    """Restores where one process cannot open the checkpoint."""

    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("no opening in this test")

    with pytest.MonkeyPatch().context() as patch:
        if jax.process_index() == failing:
            patch.setattr(pipeline._Restore, "_open", refuse)
        return restore(folder, "host")


def restore_without_jit(folder: str) -> list[str]:
    """Restores while jax compiles nothing, as where somebody looks for an error."""
    jax.config.update("jax_disable_jit", True)
    try:
        return restore(folder, "replicated")
    finally:
        jax.config.update("jax_disable_jit", False)


def restore_with(folder: str, kind: str, settings: dict[str, Any]) -> list[str]:
    """Restores it with other settings, too."""
    return restore(folder, kind, **settings)


def restore_in_threads(folder: str, rounds: int) -> list[str]:
    """Restores two checkpoints at once, which begin in another order in each process."""
    from concurrent.futures import ThreadPoolExecutor

    found: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds):
            order = [0, 1] if (jax.process_index() + number) % 2 else [1, 0]
            futures = [pool.submit(restore, f"{folder}/{seed}", "replicated", wanted=values(seed)) for seed in order]
            found += [warning for future in futures for warning in future.result(60)]
            jobs.barrier("restored")
    return found


def save_two(folder: str, orbax: bool) -> None:
    """Saves two checkpoints of other values, from process 0."""
    jobs.use(orbax)
    if jax.process_index() == 0:
        for seed in (0, 1):
            checkpoints.save_checkpoint(f"{folder}/{seed}", values(seed), 1)
    jobs.barrier("saved")


def restore_late(folder: str, late: int) -> list[str]:
    """Restores where one process reads for longer than the others wait for it."""
    own: Any = read_once.casting.read

    def read(*args: Any) -> Any:
        if jax.process_index() == late and time.monotonic() < end:
            time.sleep(3 * WAIT)
        return own(*args)

    end = time.monotonic() + 2 * WAIT  # once
    read_once.casting.read = read
    try:
        return restore(folder, "replicated", wait=WAIT)
    finally:
        read_once.casting.read = own


def restore_absent(folder: str, failing: int) -> Any:
    """Restores where one process finds no checkpoint, as on a disk of its own; what it gets, or what is logged."""
    grace, coordination._GRACE_SECONDS = coordination._GRACE_SECONDS, 0.5
    try:
        if jax.process_index() != failing:
            return restore(folder, "host")
        os.makedirs(f"{folder}/{failing}")
        with config.override(read_once=True, coordination_timeout=LONG):
            return checkpoints.restore_checkpoint(f"{folder}/{failing}", "untouched")
    finally:
        coordination._GRACE_SECONDS = grace


def reports_of_save(folder: str, orbax: bool) -> tuple[int, list[int]]:
    """Saves an array that is split over all processes, and one of numpy; the bytes in all, and those of each report."""
    jobs.use(orbax)
    split = jobs.put(jobs.large(), NamedSharding(jobs.mesh(), P(("x", "y"))))
    return _reports(lambda: checkpoints.save_checkpoint_multiprocess(folder, {"split": split, "own": np.ones(3)}, 2))


def reports_of_restore(folder: str) -> tuple[int, list[int]]:
    """Restores both whole with ``read_once``."""
    whole = NamedSharding(jobs.mesh(), P())
    target = {"split": jax.ShapeDtypeStruct(jobs.large().shape, np.float32, sharding=whole), "own": np.ones(3)}
    with config.override(read_once=True):
        return _reports(lambda: checkpoints.restore_checkpoint(folder, target, 2))


def _reports(call: Callable[[], Any]) -> tuple[int, list[int]]:
    done: list[Progress] = []
    with pytest.MonkeyPatch().context() as patch, config.override(progress=done.append):
        patch.setattr(progress, "_EVERY_SECONDS", 0.0)
        call()
    assert done[-1].finished
    return done[-1].total, [one.done for one in done]
