"""Arrays that another thread of the program writes to while they are saved, as a replay buffer's."""

from __future__ import annotations

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
