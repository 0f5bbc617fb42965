"""Every kind of path against everything that decides what lies at one: the table is ``tests/data/path_kinds.toml``.

Steps with any part of their entries, which no row has: look-ups, restores and ``keep`` agree on which are whole."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat.cli import main
from tests.support import path_consumers, path_kinds
from tests.support.path_consumers import Look
from tests.support.path_kinds import Builder, Row
from tests.support.peers import version

# Older releases leave out what rows lose; files that they wrote are in tests/data/corpus.
pytestmark = [
    pytest.mark.skipif(version("orbax-checkpoint") < (0, 12), reason="rows are of what this Orbax wrote"),
    pytest.mark.usefixtures("quiet"),
]


LOCAL = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row["slow"] else [])
    for row in path_kinds.rows()
    if "disk" in row["places"]
]


@pytest.mark.parametrize("row", LOCAL)
def test_on_disk(row: Row, row_builder: Builder, tmp_path: Path) -> None:
    """Everything that decides what lies at a path decides as its row says."""
    wrong = path_consumers.wrong(Look(row_builder, row, tmp_path))
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_base_is_used() -> None:
    """What the table does not name is never built."""
    rows = path_kinds.rows()
    assert len(rows) > 150
    # The two older steps are built for each row.
    assert path_kinds.BASES.keys() - {row.base for row in rows} == {"manager", "msgpack, older"}


def test_names_that_are_no_steps(row_builder: Builder, tmp_path: Path) -> None:
    """Content beats names: a model called pi0 is not step 0, and a date is not step 1, wherever they are listed."""
    for row in path_kinds.rows():
        if row.at in ("pi0", "2024-05-01"):
            row_builder.put(row, tmp_path)
    result = CliRunner().invoke(main, ["ls", str(tmp_path), "--recursive", "--json"])
    listed = {one["name"]: (one["step"], one["complete"]) for one in json.loads(result.stdout)}
    assert listed == {"pi0": (None, True), "2024-05-01": (None, True)}
    for find in (checkpoints.latest_checkpoint, checkpoints.available_steps):
        assert not find(tmp_path)
    assert checkpoints.restore_checkpoint(tmp_path, None) is None


BASES = ["orbax", "orbax, small", "orbax, loose", "orbax, by us", "manager, items", "v1", "orbax, jax arrays"]
ITEMS, RECORD = ["manager, one item", "v1"], "_CHECKPOINT_METADATA"


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
@pytest.mark.parametrize(
    ("base", "inside", "left_out"),
    [*((base, False, "") for base in BASES), *((base, True, record) for base in ITEMS for record in ("", RECORD))],
)
def test_every_subset_of_entries(base: str, inside: bool, left_out: str, row_builder: Builder, tmp_path: Path) -> None:
    """A step, or its item, with or without the record of the handler, that has only some of its files and folders."""
    source = row_builder.base(base) / "it"
    item = next(name for name in os.listdir(source) if (source / name).is_dir()) if inside else ""
    for kept in _subsets(source / item):
        step = _older(tmp_path / "run", row_builder)
        if inside:
            _copy(source, tuple(set(os.listdir(source)) - {item, left_out}), step)
            (step / item).mkdir()
        _copy(source / item, kept, step / item)
        _assert_agreed(tmp_path / "run", kept)
