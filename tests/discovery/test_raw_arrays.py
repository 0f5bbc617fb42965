"""Files of plain arrays, safetensors and .npz: all arrays of one version, in whole and in part, or a named error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import flax_ckpt_compat
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.backend import ArraySlice
from tests.support.layouts import assert_same

SHAPES = [(), (0, 3), (1,), (7,), (300, 5), (2, 3, 4), (40_000,)]
PARTS: list[tuple[str, tuple[slice, ...]]] = [
    ("int8_0", ()),
    ("int8_1", (slice(0, 0), slice(1, 3))),
    ("float64_3", (slice(2, 5),)),
    ("float32_4", (slice(1, 2), slice(0, 5))),
    ("float32_4", (slice(0, 300), slice(1, 3))),
    ("float64_5", (slice(1, 2), slice(0, 3), slice(1, 2))),
    ("float64_6", (slice(39_990, 40_000),)),
]
Write = Callable[[dict[str, Any], Path], object]
WRITERS: dict[str, Write] = {
    "a.safetensors": save_file,
    "a.npz": lambda tree, path: np.savez(path, **tree),
    "packed.npz": lambda tree, path: np.savez_compressed(path, **tree),
}


def _tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        f"{np.dtype(dtype).name}_{number}": rng.integers(0, 100, shape).astype(dtype)
        for number, shape in enumerate(SHAPES)
        for dtype in (np.float32, np.int8, np.float64)
    }


@pytest.fixture(params=WRITERS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Write]:
    """Where a file of each kind will be, and what writes it."""
    return tmp_path / request.param, WRITERS[request.param]


def test_arrays_and_parts_of_them(file: tuple[Path, Write]) -> None:
    """As numpy has them: small and large, empty ones, rows, columns, and single elements."""
    path, write = file
    tree = _tree(0)
    write(tree, path)
    assert_same(flax_ckpt_compat.restore(path), tree)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        leaves = view.leaves()
        parts = [ArraySlice(leaves[name], index) for name, index in PARTS]
        for (name, index), found in zip(PARTS, leaves["int8_0"].reader.read(parts), strict=True):
            np.testing.assert_array_equal(found, tree[name][index])


def test_what_replaces_a_file_is_not_mixed_in(file: tuple[Path, Write]) -> None:
    """A reader that was opened gives the arrays of the file as it was."""
    path, write = file
    write(_tree(1), path)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        write(_tree(2), path.with_name(f"new-{path.name}"))
        os.replace(path.with_name(f"new-{path.name}"), path)
        assert_same(view.read(), _tree(1))
    assert_same(flax_ckpt_compat.restore(path), _tree(2))


def test_a_file_that_is_cut_off_while_it_is_open(file: tuple[Path, Write]) -> None:
    """The error names it; nothing that is not there is returned."""
    path, write = file
    write(_tree(3), path)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises((errors.CorruptCheckpointError, errors.StorageError), match=str(path)):
            view.read()
