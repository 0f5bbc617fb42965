"""What tells two checkpoints with one path apart, for processes that read one together, and how arrays are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._core.grid import shape_of
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._restore import read_shares

MIB = 2**20


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_two_saves_of_one_tree(tmp_path: Path, use_ocdbt: bool) -> None:
    """Real Orbax saves the same names and shapes; the files that describe them may be equal byte for byte."""
    with ocp.PyTreeCheckpointer(use_ocdbt=use_ocdbt) as checkpointer:
        for number in (1, 2):
            checkpointer.save(tmp_path / str(number), {"w": np.full(5, number)})
            # The directory of an item, and releases before 0.6, have none.
            (tmp_path / str(number) / "_CHECKPOINT_METADATA").unlink()
    one, other = (read_shares._identity(str(tmp_path / str(number))) for number in (1, 2))
    assert one != other
    assert read_shares._identity(str(tmp_path / "1")) == one


def test_a_directory_of_nothing_known(tmp_path: Path) -> None:
    """No process takes it for another's."""
    assert read_shares._identity(str(tmp_path)) != read_shares._identity(str(tmp_path))


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((2048, 1024), np.float32, 256),  # a row has 4 KiB, and a block of checksums 1 MiB
        ((2000, 1024), np.float32, 256),
        ((8 * MIB,), np.int8, MIB),
        ((4096, 768), np.float32, 1024),  # 3 KiB: 1,024 rows are the least that are whole blocks
        ((5, 2 * MIB), np.int8, 1),
        ((2047, 1023), np.float32, None),
        ((1, 4 * MIB), np.int8, None),
        ((), np.float32, None),
    ],
)
def test_arrays_are_cut_where_blocks_end(
    tmp_path: Path, shape: tuple[int, ...], dtype: Any, rows: int | None, flag: bool
) -> None:
    """Rows are cut only where no block of checksums is; each row is in one part."""
    path = checkpoints.save_checkpoint(tmp_path, {"w": np.zeros(shape, dtype)}, 1)
    opened = Opened(path, verify=False)
    boxes = list(read_shares._rows(opened.reader("").tree.children["w"], MIB))
    opened.discard()
    if rows is None:
        assert len(boxes) < 2
        return
    assert [box[0].start for box in boxes] == list(range(0, shape[0], rows))
    assert sum(shape_of(box)[0] for box in boxes) == shape[0]
    assert {shape_of(box)[1:] for box in boxes} == {shape[1:]}


@pytest.mark.parametrize("compression", ["crc32c", "zstd"])
def test_compressed_chunks_stay_whole(tmp_path: Path, compression: str) -> None:
    """Only all of one gives any of its values."""
    from flax_ckpt_compat import api

    with config.override(compression=compression):
        api.save(tmp_path / "c", {"w": np.zeros((2048, 1024), np.float32)}, format="orbax")
    opened = Opened(str(tmp_path / "c"), verify=False)
    assert len(list(read_shares._rows(opened.reader("").tree.children["w"], MIB))) == 1
    opened.discard()
