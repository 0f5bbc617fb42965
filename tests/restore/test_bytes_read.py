"""How many bytes a restore reads: those of what it needs, whatever else the checkpoint holds.

Counted as the operating system counts what the process asks of files (``rchar``): reads of all threads, TensorStore's
too, whether or not the page cache has them. Neither of our readers maps files into memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import plan_restore, restore, rules, save
from flax_ckpt_compat.transforms import Transform

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="only Linux counts the bytes")

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


@pytest.mark.parametrize("case", CASES)
def test_only_what_is_needed_is_read(case: str, saved: str) -> None:
    """At most 2 % more than the stored bytes that the leaves need; of compressed arrays, the chunks that hold them."""
    target, given, needed = CASES[case]
    if Path(saved).name == "zstd" and case in ("cut", "unstack"):
        needed = TABLE.nbytes  # the whole array is one chunk
    plan = plan_restore(saved, target, transforms=given)
    assert plan.nbytes == needed or Path(saved).name == "zstd"
    assert count(lambda: restore(saved, target, transforms=given, shape_mismatch="ignore")) <= 1.02 * needed


def test_a_plan_reads_no_array_data(saved: str) -> None:
    """A plan reads less than 1 % of the checkpoint, whatever it plans."""
    for target, given, _ in CASES.values():
        assert count(lambda target=target, given=given: plan_restore(saved, target, transforms=given)) < 2**17


def test_small_leaves_cost_no_large_ones(saved: str) -> None:
    """A leaf of 4 KiB is restored without reading any of the arrays beside it."""
    assert count(lambda: restore(saved, SMALL)) < 2**17
