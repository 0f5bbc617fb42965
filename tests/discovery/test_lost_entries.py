"""Steps that lost entries, or were copied in part: look-ups, restores and ``keep`` agree on which are whole."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from tests.support import path_kinds
from tests.support.path_kinds import Builder
from tests.support.peers import version

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.skipif(version("orbax-checkpoint") < (0, 12), reason="bases are of what this Orbax wrote"),
]
BASES = [
    *("orbax", "orbax, small", "orbax, loose", "orbax, by us", "manager, items", "v1"),
    pytest.param("orbax, jax arrays", marks=pytest.mark.slow),
]
ITEMS = ["manager, one item", "v1"]


def _subsets(folder: Path) -> list[tuple[str, ...]]:
    names = sorted(os.listdir(folder))
    return [kept for count in range(1, len(names)) for kept in itertools.combinations(names, count)]


def _assert_agreed(run: Path, kept: tuple[str, ...]) -> None:
    """What look-ups name restores whole, or is nothing of ours; what does not restore is not counted by ``keep``."""
    is_latest = checkpoints.latest_checkpoint(run) == str(run / "checkpoint_6")
    try:
        flax_ckpt_compat.restore(run / "checkpoint_6")
    except errors.CheckpointError as error:
        is_foreign = isinstance(error, errors.UnrecognizedFormatError | errors.CheckpointNotFoundError)
        assert not is_latest or is_foreign, (kept, error)
        checkpoints.save_checkpoint(run, path_kinds.OLDER, 7, keep=2)
        assert (run / "checkpoint_5").exists(), kept
    else:
        assert is_latest, kept


def _older(run: Path, builder: Builder) -> Path:
    shutil.rmtree(run, ignore_errors=True)
    (run / "checkpoint_6").mkdir(parents=True)
    shutil.copy(builder.base("msgpack, older") / "it", run / "checkpoint_5")
    return run / "checkpoint_6"


def _copy(source: Path, names: tuple[str, ...], target: Path) -> None:
    for name in names:
        path_kinds._copy(source / name, target / name)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_every_subset_of_entries(base: str, row_builder: Builder, tmp_path: Path) -> None:
    """A step of real Orbax, or ours, that has only some of its files and folders."""
    source = row_builder.base(base) / "it"
    for kept in _subsets(source):
        _copy(source, kept, _older(tmp_path / "run", row_builder))
        _assert_agreed(tmp_path / "run", kept)


@pytest.mark.slow
@pytest.mark.parametrize("base", ITEMS)
@pytest.mark.parametrize("is_recorded", [True, False])
def test_every_subset_of_an_item(base: str, is_recorded: bool, row_builder: Builder, tmp_path: Path) -> None:
    """An item that has only some of its entries, with the record of its handler and without."""
    source = row_builder.base(base) / "it"
    (item,) = (name for name in os.listdir(source) if (source / name).is_dir())
    beside = tuple(set(os.listdir(source)) - {item} - (set() if is_recorded else {"_CHECKPOINT_METADATA"}))
    for kept in _subsets(source / item):
        step = _older(tmp_path / "run", row_builder)
        _copy(source, beside, step)
        (step / item).mkdir()
        _copy(source / item, kept, step / item)
        _assert_agreed(tmp_path / "run", kept)


@pytest.mark.parametrize("base", ["gda", "gda, one array"])
def test_each_file_beside_a_msgpack_file(base: str, row_builder: Builder, tmp_path: Path) -> None:
    """A file of several processes, as real Flax wrote it, that lost one file of its arrays, or all."""
    source = row_builder.base(base)
    arrays = source / "it_gda"
    for lost in [arrays, *(path for path in arrays.rglob("*") if path.is_file())]:
        shutil.rmtree(_older(tmp_path / "run", row_builder))
        shutil.copy(source / "it", tmp_path / "run" / "checkpoint_6")
        shutil.copytree(arrays, tmp_path / "run" / "checkpoint_6_gda")
        path_kinds._remove(tmp_path / "run" / "checkpoint_6_gda" / lost.relative_to(arrays))
        assert checkpoints.latest_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint_5"), lost
        _assert_agreed(tmp_path / "run", (str(lost),))


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
