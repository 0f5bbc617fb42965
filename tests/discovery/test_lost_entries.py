"""Steps that lost entries, or were copied in part: look-ups, restores and ``keep`` agree on which are whole."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

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
