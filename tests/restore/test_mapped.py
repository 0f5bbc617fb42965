"""What restores read and map: no more bytes than they need; mapped files give the same values, nobody else's."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, plan_restore, restore, rules, save
from flax_ckpt_compat._core.local import local_file
from flax_ckpt_compat.transforms import Transform
from tests.support.path_kinds import digest
from tests.support.samples import canonical
from tests.support.saves import use_flag

DTYPES = st.sampled_from(
    [np.int8, bool, np.float32, ">i4", np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
)
ARRAYS = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9).flatmap(
    lambda shape: DTYPES.map(lambda dtype: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))
)
TREES = st.dictionaries(st.text("abc", min_size=1, max_size=9), ARRAYS, min_size=1, max_size=5)
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is mapped, or read")


def mapped_files(folder: Path) -> set[str]:
    """Files below a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if str(folder) in line}


def large_tree() -> dict[str, Any]:
    """Two arrays large enough in a file that is not read whole, one small, and a number."""
    return {
        "w": np.arange(3_000_000, dtype=np.float32),
        "sub": {"b": np.arange(40_001, dtype=np.int16)},
        "s": np.ones(3),
        "n": 7,
    }


def assert_same(restored: Any, saved: Any) -> None:
    """All is as it was saved, and arrays are writable ones of numpy."""
    assert canonical(restored) == canonical(saved)
    assert all(leaf.flags.writeable for leaf in jax.tree.leaves(restored) if not isinstance(leaf, int))


@pytest.mark.slow
@pytest.mark.parametrize("flag", [False, True])
@given(tree=TREES)
def test_as_from_memory(tree: dict[str, Any], flag: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever the dtype, shape and offset, a mapped restore gives what a restore into memory gives."""
    folder = tmp_path_factory.mktemp("mapped")
    with use_flag(flag), pytest.MonkeyPatch.context() as patch:
        checkpoints.save_checkpoint(folder, tree, 1)
        patch.setattr(local_file, "MAPPED_FROM", 1)
        for target in (tree, None):
            expected = checkpoints.restore_checkpoint(folder, target)
            with config.override(mapped=True):
                assert_same(checkpoints.restore_checkpoint(folder, target), expected)


def test_files_of_real_flax(tmp_path: Path) -> None:
    """A file that real Flax wrote can be mapped as well, arrays in pieces excepted, which are read."""
    tree = large_tree()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 500_000)
        (tmp_path / "checkpoint_1").write_bytes(flax.serialization.to_bytes(tree))
    with config.override(mapped=True):
        assert_same(checkpoints.restore_checkpoint(tmp_path, tree), tree)


@pytest.mark.slow
@linux
def test_only_where_asked_for(flag: bool, tmp_path: Path) -> None:
    """The default maps nothing; the setting, or the argument of `restore`, maps the files until the arrays are gone."""
    checkpoints.save_checkpoint(tmp_path, large_tree(), 1)
    restored = checkpoints.restore_checkpoint(tmp_path, None)
    assert mapped_files(tmp_path) == set()
    with config.override(mapped=True):
        restored = checkpoints.restore_checkpoint(tmp_path, None)
        assert mapped_files(tmp_path)
    part = restored["sub"]["b"][5:9]
    del restored
    gc.collect()
    assert mapped_files(tmp_path)
    del part
    gc.collect()
    assert mapped_files(tmp_path) == set()
    restored = flax_ckpt_compat.restore(tmp_path, mapped=True)
    assert mapped_files(tmp_path)
    assert_same(restored, large_tree())


def test_writing_stays_private(flag: bool, tmp_path: Path) -> None:
    """What is written to a restored array alters neither the file, nor another leaf, nor another restore.

    Overwriting the step and retention take files away, and never bytes that somebody has mapped."""
    tree = large_tree()
    checkpoints.save_checkpoint(tmp_path, tree, 1)
    before = digest(tmp_path)
    with config.override(mapped=True):
        first, second = (checkpoints.restore_checkpoint(tmp_path, tree) for _ in range(2))
    first["w"][:] = -1
    first["sub"]["b"] += 1
    assert_same(second, tree)
    np.testing.assert_array_equal(first["sub"]["b"], tree["sub"]["b"] + 1)
    assert (first["w"] == -1).all()
    assert digest(tmp_path) == before
    checkpoints.save_checkpoint(tmp_path, jax.tree.map(lambda x: x * 0, tree), 1, overwrite=True)
    assert_same(second, tree)
    checkpoints.save_checkpoint(tmp_path, tree, 2, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_2"]
    assert_same(second, tree)


@linux
def test_devices_get_memory_of_their_own(flag: bool, tmp_path: Path) -> None:
    """Arrays that go to a device, and compressed ones, lie over no file, whatever the setting."""
    arrays = {"w": jnp.arange(300_000.0)}
    checkpoints.save_checkpoint(tmp_path / "a", arrays, 1)
    with config.override(mapped=True, compression="zstd"), use_flag(True):
        restored = checkpoints.restore_checkpoint(tmp_path / "a", arrays)
        checkpoints.save_checkpoint(tmp_path / "z", {"w": np.zeros(300_000)}, 1)
        unpacked = checkpoints.restore_checkpoint(tmp_path / "z", None)
    np.testing.assert_array_equal(restored["w"], np.arange(300_000.0))
    np.testing.assert_array_equal(unpacked["w"], np.zeros(300_000))
    assert mapped_files(tmp_path / "z") == set()
    if flag:
        assert isinstance(restored["w"], jax.Array)
        assert mapped_files(tmp_path / "a") == set()


@linux
def test_slices_are_mapped_where_their_bytes_lie_together(tmp_path: Path, format: Any) -> None:
    """Rows of a plain array are mapped; columns, and what is short, are read."""
    array = np.arange(1 << 22, dtype=np.int32).reshape(2048, 2048)
    flax_ckpt_compat.save(tmp_path, {"a": array}, step=1, format=format)
    with flax_ckpt_compat.open_checkpoint(tmp_path) as opened:
        handle = opened.leaves()["a"]
        for box, is_mapped in (
            (np.s_[64:128, 0:2048], True),
            (np.s_[3:4, 0:2048], False),
            (np.s_[0:2048, 8:16], False),
        ):
            (part,) = handle.reader.read([handle.part(box)], mapped=True)
            np.testing.assert_array_equal(part, array[box])
            assert bool(mapped_files(tmp_path)) == is_mapped
            del part


# How many bytes a restore reads. Counted as the operating system counts what the process asks of files (``rchar``):
# reads of all threads, TensorStore's too, whether or not the page cache has them.
WIDTH = 512
ROWS = 4096  # arrays of 8 MiB
TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
STORED = {
    "params": {"table": TABLE, "layers": {"kernel": (TABLE + 1).reshape(2, -1, WIDTH), "bias": TABLE[:2]}},
    "ema": {"table": TABLE + 2},
    "step": 3,
}
SMALL = {"params": {"layers": {"bias": np.zeros((2, WIDTH), np.float32)}}}


def empty(*shape: int) -> Any:
    """A target's leaf."""
    return np.zeros(shape, np.float32)


# What is asked for: target, transforms, bytes of the stored data that it needs.
LAYER = ROWS // 2 * WIDTH
CASES: dict[str, tuple[Any, Any, int]] = {
    "one leaf": ({"ema": {"table": empty(ROWS, WIDTH)}}, None, TABLE.nbytes),
    "move to the root": (empty(ROWS, WIDTH), [rules.move("params/table", "")], TABLE.nbytes),
    "from_target": (
        {"params": {"table": empty(2, 2), "layers": STORED["params"]["layers"]}, "ema": {"table": empty(ROWS, WIDTH)}},
        [rules.from_target("params")],
        TABLE.nbytes,
    ),
    "cut": ({"params": {"table": empty(1024, WIDTH)}}, [rules.cut("params/table", 1024)], 1024 * WIDTH * 4),
    "unstack": (
        {"params": {"layer_1": {"kernel": empty(ROWS // 2, WIDTH)}}},
        [rules.unstack("layers", "layer_{}")],
        LAYER * 4,
    ),
    "Transform": ({"new": empty(ROWS, WIDTH)}, {"new": Transform("params/table")}, TABLE.nbytes),
    "value_fn": ({"new": empty(ROWS, WIDTH)}, {"new": Transform("params/table", value_fn=np.negative)}, TABLE.nbytes),
    "one source twice": (
        {"a": empty(ROWS, WIDTH), "b": empty(ROWS, WIDTH)},
        {"a|b": Transform("params/table")},
        TABLE.nbytes,
    ),
}


@pytest.fixture(scope="module", params=["msgpack", "orbax", "zstd"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of 24 MiB in three arrays, and small leaves."""
    path = tmp_path_factory.mktemp("bytes") / request.param
    if request.param == "zstd":
        return save(path, STORED, format="orbax", compression="zstd")
    return save(path, STORED, format=request.param)


def count(function: Callable[[], Any]) -> int:
    """Bytes that the process reads from files while the function runs, once it has run before."""
    function()

    def read_until_now() -> int:
        with open("/proc/self/io", encoding="ascii") as file:
            return int(file.readline().split()[1])

    start = read_until_now()
    after = read_until_now()
    function()
    return read_until_now() - after - (after - start)


@linux
@pytest.mark.parametrize("case", CASES)
def test_only_what_is_needed_is_read(case: str, saved: str) -> None:
    """At most 2 % more than the stored bytes that the leaves need; of compressed arrays, the chunks that hold them."""
    target, steps, needed = CASES[case]
    if Path(saved).name == "zstd" and case in ("cut", "unstack"):
        needed = TABLE.nbytes  # the whole array is one chunk
    plan = plan_restore(saved, target, transforms=steps)
    assert plan.nbytes == needed or Path(saved).name == "zstd"
    assert count(lambda: restore(saved, target, transforms=steps, shape_mismatch="ignore")) <= 1.02 * needed


@linux
def test_small_leaves_and_plans_cost_no_large_ones(saved: str) -> None:
    """A plan, and a restore of a leaf of 4 KiB, read less than 1 % of the checkpoint."""
    for target, steps, _ in CASES.values():
        assert count(lambda target=target, steps=steps: plan_restore(saved, target, transforms=steps)) < 2**17
    assert count(lambda: restore(saved, SMALL)) < 2**17
