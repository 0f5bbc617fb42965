"""Saves in Orbax's format of arrays that all processes hold: each array is written by one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_ckpt_compat._core.tree import KeyData
from flax_ckpt_compat._trees import prng_keys
from tests.multiprocess import jobs, replica_jobs
from tests.support.peers import needs_arrays_without_shards
from tests.support.team import team_of

MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the bytes in /proc/self/io")


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    ("count", "in_background", "settings"),
    [
        (2, False, {}),
        (2, True, {}),
        pytest.param(4, False, {}, marks=pytest.mark.slow),
        pytest.param(2, False, {"compression": "crc32c"}, marks=pytest.mark.slow),
    ],
)
def test_the_work_is_shared(tmp_path: Path, count: int, in_background: bool, settings: dict[str, Any]) -> None:
    """Of 9 MiB that all hold each array is written by one, and process 0 writes 2 MiB more; real Orbax reads it."""
    team = team_of(count)
    written = team.call(replica_jobs.save, str(tmp_path), "", in_background, settings)
    assert 11 * MIB < sum(written) < 12.2 * MIB
    assert max(written) < 11 * MIB
    team.call(replica_jobs.restore, str(tmp_path))
    team.call(replica_jobs.restore_with_orbax, str(tmp_path))
    team_of(1).call(replica_jobs.restore_with_orbax, str(tmp_path))


@linux
def test_a_process_that_lacks_an_array(tmp_path: Path) -> None:
    """Process 0 writes all where the others hold something else."""
    team = team_of(2)
    first, other = team.call(replica_jobs.save, str(tmp_path), "lacking")
    assert first > 11 * MIB
    assert other < MIB // 4
    team.call(replica_jobs.restore, str(tmp_path))


@linux
@needs_arrays_without_shards
def test_arrays_that_one_process_does_not_hold(tmp_path: Path) -> None:
    """Those that hold them write them, and the third one has none."""
    written = team_of(3).call(replica_jobs.save_on_some, str(tmp_path))
    assert sum(written[:2]) < 10.4 * MIB, written
    assert written[2] < MIB // 4


def test_the_files_say_the_same_whoever_writes(tmp_path: Path) -> None:
    """The structure and the shardings are those of a save by process 0 alone."""
    team = team_of(2)
    for kind in ("shared", "lacking"):
        team.call(replica_jobs.save, str(tmp_path / kind), kind)
    for name in ("_METADATA", "_sharding", "array_metadatas/process_0"):
        shared, alone = (tmp_path / folder / "checkpoint_1" / name for folder in ("shared", "lacking"))
        assert shared.read_bytes() == alone.read_bytes()
    assert jobs.names(str(tmp_path / "shared/checkpoint_1")) == jobs.names(str(tmp_path / "lacking/checkpoint_1"))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_stand_ins_of_other_processes_arrays(shape: tuple[int, ...]) -> None:
    """They have shape and dtype, and those of typed keys the implementation, as jax has them, and no memory."""
    array, keys = jnp.ones(shape, jnp.bfloat16), jax.random.split(jax.random.key(3, impl="rbg"), shape)
    found = prng_keys.placeholder(array)
    assert (found.shape, found.dtype) == (array.shape, array.dtype) and not any(found.strides)
    key = prng_keys.placeholder(keys)
    data = jax.random.key_data(keys)
    assert isinstance(key, KeyData) and key.impl == "rbg"
    assert (key.data.shape, key.data.dtype) == (data.shape, data.dtype) and not any(key.data.strides)
