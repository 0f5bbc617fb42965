"""Steps that lost some of their entries: look-ups, restores and ``keep`` agree on which of them are whole."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

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
BASES = ["orbax", "orbax, small", "orbax, jax arrays", "orbax, loose", "orbax, by us", "manager, items", "v1"]
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


@pytest.mark.parametrize("base", BASES)
def test_every_subset_of_entries(base: str, row_builder: Builder, tmp_path: Path) -> None:
    """A step of real Orbax, or ours, that has only some of its files and folders."""
    source = row_builder.base(base) / "it"
    for kept in _subsets(source):
        _copy(source, kept, _older(tmp_path / "run", row_builder))
        _assert_agreed(tmp_path / "run", kept)


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
