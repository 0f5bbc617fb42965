"""Copies of a directory of checkpoints by hard links (``cp -al``), which share their files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, config, verify

TREE = {"w": np.arange(20_000.0), "small": np.ones(3), "n": 1}


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mapped", [False, True])
def test_a_linked_copy_stays_as_it_is(flag: bool, mapped: bool, tmp_path: Path) -> None:
    """Saves, overwrites and evictions in one directory change nothing in the other, nor in arrays mapped from it."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    for step in (1, 2):
        checkpoints.save_checkpoint(run, {**TREE, "n": step}, step, keep=2)
    shutil.copytree(run, copy, copy_function=os.link)
    before = _content(copy)
    assert any(os.stat(path).st_nlink == 2 for path in copy.rglob("*") if path.is_file())
    with config.override(mapped=mapped):
        held = [checkpoints.restore_checkpoint(folder, None, 2) for folder in (run, copy)]
        checkpoints.save_checkpoint(run, {**TREE, "w": np.zeros(20_000)}, 2, keep=2, overwrite=True)
        checkpoints.save_checkpoint(run, TREE, 3, keep=1)
        for tree in (*held, checkpoints.restore_checkpoint(copy, None, 2)):
            np.testing.assert_array_equal(tree["w"], TREE["w"])
    assert checkpoints.available_steps(run) == [3]
    assert checkpoints.available_steps(copy) == [1, 2]
    assert _content(copy) == before
    assert all(verify(copy, step=step).ok for step in (1, 2))
