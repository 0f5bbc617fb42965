"""Checkpoints that were copied in part: in the order of names, or all folders first, as s3fs renames (measured)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints


def save_by_us(path: Path, tree: Any) -> None:
    """Orbax's format."""
    flax_ckpt_compat.save(path, tree, format="orbax")


def save_by_orbax(path: Path, tree: Any) -> None:
    """A flat directory."""
    ocp.PyTreeCheckpointer().save(path, tree)


def save_by_manager(path: Path, tree: Any) -> None:
    """A step of items, under another name."""
    with ocp.CheckpointManager(path.parent / "manager") as manager:
        manager.save(2, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()
    shutil.move(path.parent / "manager" / "2", path)


def parts_of(whole: Path, folders_first: bool) -> list[Path]:
    """All files and folders, relative, in the order in which they are copied."""
    found = sorted(path.relative_to(whole) for path in whole.rglob("*"))
    return sorted(found, key=lambda part: (whole / part).is_file()) if folders_first else found


@pytest.mark.parametrize("folders_first", [True, False])
@pytest.mark.parametrize("save", [save_by_us, save_by_orbax, save_by_manager])
def test_the_last_whole_one_is_restored(save: Any, folders_first: bool, tmp_path: Path) -> None:
    """As long as the manifest of the tree is missing; its arrays are so small that it needs no other process' files."""
    run = tmp_path / "run"
    flax_ckpt_compat.save(run / "checkpoint_1", {"w": np.ones(300), "b": 1}, format="orbax")
    save(tmp_path / "whole", {"w": np.full(300, 2.0), "b": 2})
    parts = parts_of(tmp_path / "whole", folders_first)
    assert len(parts) > 4
    for count in range(len(parts) + 1):
        copy = run / "checkpoint_2"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for part in parts[:count]:
            if (tmp_path / "whole" / part).is_dir():
                (copy / part).mkdir()
            else:
                shutil.copy(tmp_path / "whole" / part, copy / part)
        rest = [str(name) for name in parts[count:]]
        try:
            found = checkpoints.restore_checkpoint(run, None)["b"]
        except Exception as error:
            raise AssertionError(f"{count}: {sorted(os.listdir(copy))}, missing {rest}") from error
        expected = 1 if {"manifest.ocdbt", "state/manifest.ocdbt"}.intersection(rest) else 2
        assert found == expected, (count, rest)


def test_folders_of_arrays_are_not_all_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OCDBT each array has a folder, and a look-up of every step would ask for each of them."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    tree = {f"w{number}": np.ones(1) for number in range(60)}
    ocp.Checkpointer(handler).save(tmp_path / "checkpoint_1", args=ocp.args.PyTreeSave(tree))
    assert not (tmp_path / "checkpoint_1" / "manifest.ocdbt").exists()
    asked, stat = [], os.stat
    monkeypatch.setattr(os, "stat", lambda *where, **options: (asked.append(where), stat(*where, **options))[1])
    assert checkpoints.available_steps(tmp_path) == [1]
    assert len(asked) < 20
