"""The memory of background saves is used again, never while anything refers to it, and the kernel may take it."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat as fcc
from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._save import host_copies
from flax_ckpt_compat._save.host_copies import Copies
from tests.support.interpreters import run_python
from tests.support.saves import use_flag

MIB = 1 << 20
SIZES = (1000, 3 * MIB, 20 * MIB, 70 * MIB)  # bytes of arrays in blocks, and of one with memory of its own
needs_advice = pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="the system cannot mark pages as free")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Memory of other tests would be used again."""
    gc.collect()
    host_copies.forget()
    yield
    host_copies.forget()


def copied(value: int, **options: Any) -> list[np.ndarray]:
    """Copies of arrays full of a number."""
    copies = Copies(**options)
    made = [copies.add(np.full(size, value, np.uint8)) for size in SIZES]
    copies.make()
    return made


def addresses(arrays: list[np.ndarray]) -> list[int]:
    """Where arrays lie."""
    return [array.ctypes.data for array in arrays]


@needs_advice
def test_the_next_save_gets_the_same_memory() -> None:
    """Once nothing refers to the copies of the one before."""
    first = copied(1)
    where = addresses(first)
    del first
    second = copied(2)
    assert addresses(second) == where
    assert all(np.all(array == 2) for array in second)


def test_a_copy_is_moved_once() -> None:
    """There is room for less than a page behind it, and then the next copy."""
    copies, sources = Copies(), [np.full(2 * MIB, value, np.uint8) for value in (1, 2)]
    first, second = map(copies.add, sources)
    moved = copies.moved(first, memory.PAGE - 1)
    assert moved.ctypes.data == first.ctypes.data + memory.PAGE - 1
    assert copies.moved(moved, memory.PAGE - 1) is moved
    copies.make()
    assert np.array_equal(moved, sources[0])
    assert np.array_equal(second, sources[1])


def test_what_something_refers_to_is_never_written_to() -> None:
    """Of each array, any view, also of its bytes, keeps all that is with it in a block."""
    first = copied(1)
    views = [first[0][5:], memoryview(first[2]), first[3].reshape(-1, 2)[::2].view(np.uint16)]
    expected = [bytes(view) if isinstance(view, memoryview) else view.copy() for view in views]
    del first
    for value in (2, 3):
        assert all(np.all(array == value) for array in copied(value))
    for view, before in zip(views, expected, strict=True):
        assert np.array_equal(np.asarray(view), np.frombuffer(before, np.uint8) if type(before) is bytes else before)


@needs_advice
def test_nothing_is_kept_if_the_setting_says_so() -> None:
    """What was kept before is freed."""
    copied(1)
    gc.collect()
    host_copies._collect()
    assert host_copies._kept
    copied(2, reuse=False)
    host_copies._collect()
    assert not host_copies._kept


@needs_advice
def test_memory_that_two_saves_had_no_use_for_is_freed() -> None:
    """A smaller tree takes none of a large one's for ever."""
    copied(1)
    small = Copies()
    for _ in range(3):
        small.add(np.zeros(1000))
        small.make()
    assert sum(block.nbytes for block in host_copies._kept) <= 4 * MIB + memory.PAGE


@needs_advice
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="Linux counts such pages there")
def test_the_kernel_may_take_what_is_kept() -> None:
    """It counts the pages as free ones that it has not needed yet."""

    def lazily_free() -> int:
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("LazyFree"))

    before, first = lazily_free(), copied(1)
    assert lazily_free() - before < 8 * MIB
    del first
    gc.collect()
    assert lazily_free() - before > 0.9 * sum(SIZES)


LIMITED = """
import resource
import numpy as np
from flax_ckpt_compat._save import host_copies
from flax_ckpt_compat._save.host_copies import Copies
resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY))
copies = Copies()
copies.add(np.zeros(1 << 20))
copies.make()
host_copies._collect()
print(len(host_copies._kept))
"""


def test_a_limit_of_the_address_space_counts_kept_pages(tmp_path: Path) -> None:
    """Nothing is kept under one (``ulimit -v``)."""
    assert run_python(LIMITED, tmp_path)[0] == "0\n"


@needs_advice
@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_slow_save_keeps_its_values(flag: bool, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, other saves get other memory; what it used, once it has ended, also with an error."""
    publish, opened = atomic.publish, threading.Event()

    def wait(temporary: str, final: str, **options: Any) -> None:
        if "/held/" in final:
            opened.wait(60)
            if ends != "well":
                raise OSError(5, "the disk broke")
        publish(temporary, final, **options)

    def tree(value: int) -> dict[str, np.ndarray]:
        return {str(size): np.full(size, value, np.uint8) for size in SIZES[:2]}

    monkeypatch.setattr(atomic, "publish", wait)
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
    gc.collect()
    host_copies._collect()
    assert sum(block.nbytes for block in host_copies._kept) >= 2 * sum(SIZES[:2])


@needs_advice
@pytest.mark.parametrize("reuse", [True, False])
def test_saves_follow_the_setting(flag: bool, reuse: bool, tmp_path: Path) -> None:
    """Background saves do, and others keep nothing."""
    manager, tree = checkpoints.AsyncManager(), {"a": np.zeros(4 * MIB, np.uint8)}
    with use_flag(flag), config.override(reuse_host_memory=reuse):
        checkpoints.save_checkpoint(tmp_path, tree, 1)
        assert not host_copies._returned
        checkpoints.save_checkpoint(tmp_path, tree, 2, async_manager=manager)
        manager.wait_previous_save()
    gc.collect()
    host_copies._collect()
    assert bool(host_copies._kept) == reuse


@needs_advice
def test_a_handler_that_interrupts_a_save_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets other memory if the save that it interrupted is choosing its own."""
    copied(1)
    with host_copies._lock:
        second = copied(2)
        host_copies.forget()
    assert all(np.all(array == 2) for array in second)
