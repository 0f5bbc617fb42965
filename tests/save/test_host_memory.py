"""Copies for background saves, whose memory is used again, and their files, which do not stay in the page cache."""

import os
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_ckpt_compat.legacy import format
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flax_ckpt_compat as fcc
from flax_ckpt_compat import Progress, checkpoints, config, restore, save, verify
from flax_ckpt_compat._save import snapshot
from flax_ckpt_compat._save.snapshot import Copies
from tests.benchmarks import disk
from tests.support.interpreters import devices
from tests.support.layouts import assert_same
from tests.support.saves import before_publish, run_saving, save_by, use_flag

MIB = 1 << 20
SIZES = (1000, 3 * MIB, 20 * MIB, 70 * MIB)  # bytes of arrays in blocks, and of one with memory of its own


@contextmanager
def counting(array: np.ndarray[Any, Any]) -> Iterator[None]:
    """Let a thread write growing numbers to all of an array."""
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            np.add(array, 1, out=array)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Manager:
    """Any object can be one that keeps memory."""


def copied(value: int, manager: Any) -> list[np.ndarray]:
    """Copies of arrays full of a number."""
    copies = Copies(manager)
    made = [copies.add(np.full(size, value, np.uint8)) for size in SIZES]
    copies.make()
    return made


def addresses(arrays: list[np.ndarray]) -> list[int]:
    """Where arrays lie."""
    return [array.ctypes.data for array in arrays]


def test_the_next_save_gets_the_same_memory() -> None:
    """Once nothing refers to the copies of the one before, and no sooner."""
    manager = Manager()
    first = copied(1, manager)
    assert not set(addresses(copied(2, manager))).intersection(addresses(first))
    assert all(np.all(array == 1) for array in first)
    first = copied(3, manager)
    where = addresses(first)
    del first
    second = copied(4, manager)
    assert addresses(second) == where
    assert all(np.all(array == 4) for array in second)


@pytest.mark.slow
def test_what_something_refers_to_is_never_written_to() -> None:
    """Of each array, any view, also of its bytes, keeps all that is with it in a block."""
    manager = Manager()
    first = copied(1, manager)
    views = [first[0][5:], memoryview(first[2]), first[3].reshape(-1, 2)[::2].view(np.uint16)]
    expected = [bytes(view) if isinstance(view, memoryview) else view.copy() for view in views]
    del first
    for value in (2, 3):
        assert all(np.all(array == value) for array in copied(value, manager))
    for view, before in zip(views, expected, strict=True):
        assert np.array_equal(np.asarray(view), np.frombuffer(before, np.uint8) if type(before) is bytes else before)


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_slow_save_keeps_its_values(flag: bool, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, other saves get other memory; what it used, once it has ended, also with an error."""
    opened = threading.Event()

    def wait(final: str) -> None:
        if "/held/" in final:
            opened.wait(60)
            if ends != "well":
                raise OSError(5, "the disk broke")

    def tree(value: int) -> dict[str, np.ndarray]:
        return {str(size): np.full(size, value, np.uint8) for size in SIZES[:2]}

    before_publish(monkeypatch, wait)
    slow, fast = checkpoints.AsyncManager(), checkpoints.AsyncManager()
    with use_flag(flag):
        checkpoints.save_checkpoint(tmp_path / "held", tree(1), 1, async_manager=slow)
        for step in (2, 3):
            checkpoints.save_checkpoint(tmp_path / "fast", tree(step), step, async_manager=fast)
        fast.wait_previous_save()
        opened.set()
        if ends == "well":
            slow.wait_previous_save()
            found = checkpoints.restore_checkpoint(tmp_path / "held", None)
            assert all(np.all(array == 1) for array in found.values())
        else:
            with pytest.raises(OSError, match="the disk broke"):
                slow.wait_previous_save()
        found = checkpoints.restore_checkpoint(tmp_path / "fast", None)
    assert all(np.all(array == 3) for array in found.values())
    assert fcc.verify(tmp_path / "fast").ok


DTYPES = st.sampled_from([np.int8, np.float32, np.complex128, ml_dtypes.bfloat16, ml_dtypes.int4, "S3", "M8[s]"])
ARRAYS = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9).flatmap(
    lambda shape: DTYPES.map(lambda dtype: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))
)


@given(st.lists(st.tuples(ARRAYS, st.booleans()), max_size=6), st.sampled_from([1, 3]))
def test_copies_have_the_values(found: list[tuple[np.ndarray, bool]], threads: int) -> None:
    """Arrays of any dtype, shape and order are copied into aligned memory of their own in C order."""
    sources = [array.T if turned else array for array, turned in found]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_MIN_PARALLEL_BYTES", 0)
        patch.setattr(snapshot, "_THREADS", threads)
        copies = Copies(None)
        made = [copies.add(source) for source in sources]
        copies.make()
    for source, copy in zip(sources, made, strict=True):
        assert (copy.dtype, copy.tobytes()) == (source.dtype, source.tobytes())
        assert copy.flags.c_contiguous and copy.flags.aligned and not np.shares_memory(copy, source)


@pytest.mark.parametrize(
    ("format", "compression"), [("msgpack", None), ("orbax", None), ("orbax", "crc32c"), ("orbax", "zstd")]
)
def test_it_is_restored_with_values_of_that_time(format: Any, compression: Any, tmp_path: Path) -> None:
    """As real Flax and Orbax do; a checksum of other bytes than those that were written would be an error."""
    array = np.zeros(2**19, np.int64)
    with config.override(compression=compression), counting(array):
        for number in range(6):
            before = array.min()
            save(tmp_path / f"{number}", {"buffer": array}, format=format)
            after = array.max()
            found = restore(tmp_path / f"{number}")["buffer"]
            assert before <= found.min() and found.max() <= after


# On a disk: the same files as of other saves, but not in the page cache, and read by real libraries


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


@pytest.mark.parametrize("large", [2, pytest.param(17, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("flag", "compression"),
    [(False, None), (True, None), (True, "zstd"), pytest.param(True, "crc32c", marks=pytest.mark.slow)],
)
def test_real_libraries_read_it(disk_path: Path, flag: bool, compression: str | None, large: int) -> None:
    """Bit by bit, and so do we, by the checksums that were recorded; little of it is in the page cache.

    The copies of trees whose headers differ begin elsewhere in the same pages."""
    manager, seen = checkpoints.AsyncManager(), list[Progress]()
    with use_flag(flag), config.override(progress=seen.append, compression=compression):
        for number in range(2):
            one = state(number, large)
            tree = {"x" * (1 + 21 * number): one.pop("large"), **one}
            path = save_by(manager, disk_path / str(number), tree, 1)
            share = share_in_cache(path)
            assert_same(checkpoints.restore_checkpoint(disk_path / str(number), None), tree)
            if flag:
                assert_same(ocp.PyTreeCheckpointer().restore(path), tree)
            else:
                assert_same(flax.serialization.msgpack_restore(Path(path).read_bytes()), tree)
            assert verify(path).ok
            assert compression or large == 2 or share is None or share < 0.05
    assert seen


def test_little_is_held_of_what_is_compressed(tmp_path: Path) -> None:
    """It is written while more is compressed: 32 MB of noise, which two threads compress, take less than half."""
    tree = list(np.random.default_rng(0).integers(0, 2**63, (32, 2**17)))
    save(tmp_path / "small", tree[0], format="orbax", compression="zstd")
    tracemalloc.start()
    try:
        save(tmp_path / "large", tree, format="orbax", compression="zstd")
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


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


SHARDS = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
values = np.random.default_rng(0).standard_normal((4 * 1031, 1024), dtype=np.float32)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
manager = checkpoints.AsyncManager()
checkpoints.save_checkpoint(folder, {"a": jax.device_put(values, sharding), "b": values[1:]}, 1, async_manager=manager)
manager.wait_previous_save()
"""


@pytest.mark.slow
def test_shards_too(disk_path: Path, flag: bool) -> None:
    """Each is a value of its own in Orbax's format, and one array in msgpack."""
    run_saving(SHARDS, disk_path, flag, **devices(4))
    values = np.random.default_rng(0).standard_normal((4 * 1031, 1024), dtype=np.float32)
    path, expected = disk_path / "checkpoint_1", {"a": values, "b": values[1:]}
    if flag:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), expected)
        found = ocp.PyTreeCheckpointer().restore(path, restore_args=as_numpy)
    else:
        found = flax.serialization.msgpack_restore(path.read_bytes())
    assert_same(found, expected)
