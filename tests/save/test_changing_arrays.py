"""Arrays that another thread of the program writes to while they are saved, as a replay buffer's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import config, restore, save
from tests.support.changing_arrays import counting


@pytest.mark.parametrize(
    ("format", "compression"), [("msgpack", None), ("orbax", None), ("orbax", "crc32c"), ("orbax", "zstd")]
)
def test_it_is_restored_with_values_of_that_time(format: Any, compression: Any, tmp_path: Path) -> None:
    """As real Flax and Orbax do; a checksum of other bytes than those that were written would be an error."""
    array = np.zeros(2**19, np.int64)
    with config.override(compression=compression), counting(array):
        for number in range(12):
            before = array.min()
            save(tmp_path / f"{number}", {"buffer": array}, format=format)
            after = array.max()
            found = restore(tmp_path / f"{number}")["buffer"]
            assert before <= found.min() and found.max() <= after


def test_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the checksum is left out; an array beside it that does not change has one."""
    array, still = np.zeros(2**21, np.int64), np.zeros(2**17, np.int64)
    with caplog.at_level(logging.WARNING, "flax_ckpt_compat"), counting(array):
        for _ in range(50):  # in case the thread gets no time
            save(tmp_path / "c", {"buffer": array, "still": still}, overwrite=True, format="orbax")
            if caplog.records:
                break
    (record,) = caplog.records
    assert "buffer/0 changed while it was saved" in record.getMessage() and "still" not in record.getMessage()
