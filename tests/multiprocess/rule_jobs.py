"""What the processes of a team do in the tests of the rules of saving, and of what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._save import coordination
from tests.multiprocess.jobs import before, large, mesh, names, put, restore_small, small, use


def save_with(folder: str, orbax: bool, changes: list[dict[str, Any]], wait: float = 3) -> str:
    """Saves `small` as step 5, each process with changes of its own to that call.

    Args:
        changes: by process; arguments of the save, and ``orbax`` (the flag), ``compression`` (the setting) or ``more``
            (leaves of the tree).
        wait: the setting ``coordination_timeout``.
    """
    mine = {"step": 5, **changes[jax.process_index()]}
    use(mine.pop("orbax", orbax))
    more = {name: MORE[name]() for name in mine.pop("more", ())}
    folder = folder + mine.pop("below", "")
    settings = {"coordination_timeout": wait, "compression": mine.pop("compression", None)}
    settings |= {"checksums": mine.pop("checksums")} if "checksums" in mine else {}
    with config.override(**settings):
        return checkpoints.save_checkpoint_multiprocess(folder, {**small(5), **more}, **mine)


MORE: dict[str, Callable[[], Any]] = {
    "spread": lambda: put(np.ones((8, 4), np.float32), NamedSharding(mesh(), P("x"))),
    "unknown": object,
    "plain": lambda: np.ones(3),
}


def save_alone(folder: str, orbax: bool, step: int, overwrite: bool = False) -> str:
    """What scripts do that save from process 0 only."""
    use(orbax)
    tree = {"n": step, "v": np.full(3, step), "local": jnp.arange(4)}
    return checkpoints.save_checkpoint(folder, tree, step, overwrite=overwrite)


def save_spread_alone(folder: str, orbax: bool) -> str:
    """The same with an array that this process sees a part of."""
    use(orbax)
    return checkpoints.save_checkpoint(folder, small(1), 1)


def save_without_a_temporary(folder: str, orbax: bool, failing: int) -> str:
    """Saves where one process can make no name for its temporary, as in another user's folder."""
    from unittest import mock

    from flax_ckpt_compat._core.storage import Location

    use(orbax)
    error = OSError("not this user's own") if jax.process_index() == failing else None
    real = Location.temporary_path
    with (
        mock.patch.object(Location, "temporary_path", autospec=True, side_effect=error or real),
        config.override(coordination_timeout=30.0),
    ):
        return checkpoints.save_checkpoint_multiprocess(folder, small(1), 1)


def save_full_disk(folder: str, orbax: bool, full: int, step: int) -> str:
    """Saves 16 MB where one process may not write files above a megabyte, as on a full disk."""
    import resource
    import signal

    use(orbax)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tree = {"large": put(large(), NamedSharding(mesh("plain"), P(("x", "y"))))}
    if jax.process_index() == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with config.override(coordination_timeout=10.0):
            return checkpoints.save_checkpoint_multiprocess(folder, tree, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_in_threads(folder: str, orbax: bool, step: int) -> list[str]:
    """Saves to three prefixes at once, in another order in each process."""
    from concurrent.futures import ThreadPoolExecutor

    use(orbax)
    prefixes = ["a_", "b_", "c_"] if jax.process_index() else ["c_", "b_", "a_"]
    tree = small(step)

    def save(prefix: str) -> str:
        return checkpoints.save_checkpoint_multiprocess(folder, tree, step, prefix)

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(save, prefix) for prefix in prefixes]
        return sorted(future.result(60) for future in futures)


def save_beside_another_job(folder: str, orbax: bool, job: str, jobs: int) -> tuple[str, float]:
    """Saves step 1, and commits only when all jobs have written.

    Returns:
        The name of the error's class, or an empty text; and what a restore then gives.
    """
    use(orbax)

    def wait() -> None:
        Path(folder, f"other_{job}").touch()
        deadline = time.monotonic() + 20
        while sum(name.startswith("other_") for name in names(folder)) < jobs and time.monotonic() < deadline:
            time.sleep(0.005)

    error = ""
    try:
        with before(orbax, "finish_multiprocess", wait):
            checkpoints.save_checkpoint_multiprocess(folder, small(len(job)), 1)
    except Exception as raised:
        error = type(raised).__name__
    return error, restore_small(folder)


def save_while_another_hangs(folder: str, orbax: bool, stage: str, wait: float) -> str:
    """Process 1 fails before a barrier that process 3 does not reach until process 0 has given up.

    Args:
        stage: the barrier: ``begin`` or ``commit``.
        wait: the setting ``coordination_timeout``; once one has failed, the others wait for half a second.
    """
    use(orbax)
    method = "prepare" if stage == "begin" else "write_process_part"
    index, given_up = jax.process_index(), Path(folder, "given_up")

    def fail_or_hang() -> None:
        if index == 1:
            raise OSError("the disk broke")
        deadline = time.monotonic() + 20
        while index == 3 and not given_up.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    try:
        with pytest.MonkeyPatch.context() as patch, config.override(coordination_timeout=wait):
            patch.setattr(coordination, "_GRACE_SECONDS", 0.5)
            with before(orbax, method, fail_or_hang):
                return checkpoints.save_checkpoint_multiprocess(folder, small(1), 1)
    finally:
        if index == 0:
            given_up.touch()
