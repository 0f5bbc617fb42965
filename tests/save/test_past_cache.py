"""Background saves on a disk: the same files as other saves, but not in the page cache, and read by real libraries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_ckpt_compat.legacy import format

from flax_ckpt_compat import Progress, checkpoints, config, verify
from tests.benchmarks import disk
from tests.support.interpreters import devices, run_python
from tests.support.saves import save_by, use_flag

MIB = 1 << 20
FLAGS = [False, True]

# What real Orbax says of arrays that it puts where they were; its old releases in other words.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Sharding info not provided.*"),
    pytest.mark.filterwarnings("ignore:.*Couldn't find sharding info.*"),
]


def state(seed: int = 0, large: int = 2) -> dict[str, Any]:
    """Arrays of odd sizes, which begin anywhere in a page of a msgpack file, and small ones between them.

    One has 4 ``large`` MiB; from 64 MiB on, it gets memory of its own."""
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, dtype=np.float32)

    return {
        "step": 3,
        "params": {
            "wide": array(1000, 1111),
            "bias": array(1111),
            "on_device": jax.numpy.asarray(array(700, 801)),
            "transposed": array(901, 600).T,
            "bytes": rng.integers(0, 255, 3 * MIB + 13, dtype=np.uint8),
            "name" * 30: array(MIB),
            "empty": array(0, 5),
            "rows": array(3, 70_000),
        },
        "large": array(large, MIB),
        "note": "text",
    }


def save(path: Path, tree: Any) -> str:
    """The path of a checkpoint of step 1, saved in the background."""
    return save_by(checkpoints.AsyncManager(), path, tree, 1)


def files(path: str) -> list[str]:
    """A file, or all files of a directory."""
    if os.path.isfile(path):
        return [path]
    return [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]


def share_in_cache(path: str) -> float | None:
    """The share of the bytes of a checkpoint that are in the page cache; None where the kernel does not tell."""
    cached = [disk.cached(file) for file in files(path)]
    if None in cached:
        return None
    return sum(one or 0 for one in cached) / sum(os.path.getsize(file) for file in files(path))


def assert_equal(found: Any, expected: Any) -> None:
    """Compare trees bit by bit."""
    found, expected = (jax.tree.leaves_with_path(flax.serialization.to_state_dict(tree)) for tree in (found, expected))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, one), (_, other) in zip(found, expected, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other)), path


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_real_libraries_read_it(disk_path: Path, flag: bool) -> None:
    """Bit by bit, and so do we, by the checksums that were recorded; little of it is in the page cache."""
    seen: list[Progress] = []
    with use_flag(flag), config.override(progress=seen.append):
        tree = state(large=17)
        path = save(disk_path, tree)
        share = share_in_cache(path)
        assert_equal(checkpoints.restore_checkpoint(disk_path, None), tree)
        if flag:
            assert_equal(ocp.PyTreeCheckpointer().restore(path), tree)
        else:
            assert_equal(flax.serialization.msgpack_restore(Path(path).read_bytes()), tree)
        assert verify(path).ok
    assert seen and (share is None or share < 0.05)


@pytest.mark.slow
def test_a_msgpack_file_has_the_bytes_of_any_other_save(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where arrays are split, as Flax splits those above 1 GiB."""
    for limit in (format.MAX_CHUNK_SIZE, 3 * MIB):
        monkeypatch.setattr(format, "MAX_CHUNK_SIZE", limit)
        with use_flag(False):
            managers = {"background": checkpoints.AsyncManager(), "foreground": None}
            paths = [save_by(one, disk_path / f"{limit}{how}", state(), 1) for how, one in managers.items()]
        background, foreground = (Path(path).read_bytes() for path in paths)
        assert background == foreground


@pytest.mark.parametrize("compression", [pytest.param("crc32c", marks=pytest.mark.slow), "zstd"])
def test_chunks_with_checksums_too(disk_path: Path, compression: str) -> None:
    """Real Orbax checks them."""
    with use_flag(True), config.override(compression=compression):
        tree = state()
        path = save(disk_path, tree)
        assert_equal(checkpoints.restore_checkpoint(disk_path, None), tree)
        assert_equal(ocp.PyTreeCheckpointer().restore(path), tree)


SHARDS = """
import sys
import flax, jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from flax_ckpt_compat import checkpoints
folder, flag = sys.argv[1:]
flax.config.update("flax_use_orbax_checkpointing", flag == "True")
values = np.random.default_rng(0).standard_normal((4 * 1031, 1024), dtype=np.float32)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
manager = checkpoints.AsyncManager()
checkpoints.save_checkpoint(folder, {"a": jax.device_put(values, sharding), "b": values[1:]}, 1, async_manager=manager)
manager.wait_previous_save()
"""


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_shards_too(disk_path: Path, flag: bool) -> None:
    """Each is a value of its own in Orbax's format, and one array in msgpack."""
    run_python(SHARDS, disk_path, flag, **devices(4))
    values = np.random.default_rng(0).standard_normal((4 * 1031, 1024), dtype=np.float32)
    path, expected = disk_path / "checkpoint_1", {"a": values, "b": values[1:]}
    if flag:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), expected)
        found = ocp.PyTreeCheckpointer().restore(path, restore_args=as_numpy)
    else:
        found = flax.serialization.msgpack_restore(path.read_bytes())
    assert_equal(found, expected)


@pytest.mark.parametrize("flag", FLAGS)
def test_saves_that_share_memory_in_turn(disk_path: Path, flag: bool) -> None:
    """The copies of trees whose headers differ begin elsewhere in the same pages."""
    with use_flag(flag):
        for number in range(2):
            one = state(number)
            tree = {"x" * (1 + 21 * number): one["large"], "b": one["params"]}
            save(disk_path / str(number), tree)
            assert_equal(checkpoints.restore_checkpoint(disk_path / str(number), None), tree)
