"""iter_checkpoints: every checkpoint of a directory, finished or not, without opening one."""

import os
import subprocess
import warnings
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat import checkpoints, iter_checkpoints
from tests.support.saves import tree, use_flag


def mixed(directory: Path) -> None:
    """Steps in both formats, a named one, unfinished ones, and what is not a checkpoint."""
    for step, flag in ((2, False), (3, True), (10, True), ("best", False)):
        with use_flag(flag):
            checkpoints.save_checkpoint(directory, tree(), step, keep=9)
    (directory / "checkpoint_4").touch()
    (directory / "checkpoint_5").mkdir()
    (directory / "checkpoint_6.orbax-checkpoint-tmp-1").mkdir()
    (directory / "checkpoint_2_gda").mkdir()
    (directory / "checkpoint_2_gda" / "array").write_bytes(bytes(100))
    (directory / "other_1").write_bytes(b"\x80")


def disk_use(*paths: Path) -> int:
    """Bytes of all files below some paths, as ``find`` tells."""
    found = subprocess.run(
        ["find", *map(str, paths), "-type", "f", "-printf", "%s\n"], capture_output=True, text=True, check=True
    )
    return sum(map(int, found.stdout.split()))


def test_every_checkpoint_in_order(tmp_path: Path) -> None:
    """Both formats in the order of steps, unfinished ones with the reason, named ones last; temporaries not at all."""
    mixed(tmp_path)
    records = list(iter_checkpoints(tmp_path))
    assert [(record.step, os.path.basename(record.path), record.format) for record in records] == [
        (2, "checkpoint_2", "msgpack"),
        (3, "checkpoint_3", "orbax"),
        (4, "checkpoint_4", "msgpack"),
        (5, "checkpoint_5", "orbax"),
        (10, "checkpoint_10", "orbax"),
        (None, "checkpoint_best", "msgpack"),
    ]
    assert [record.step for record in records if not record.complete] == [4, 5]
    assert {record.step: record.why for record in records if record.why} == {
        4: "the file is empty",
        5: "the directory is empty",
    }
    steps = checkpoints.available_steps(tmp_path)
    assert steps == [record.step for record in records if record.complete and record.step is not None]


def test_bytes_on_disk(flag: bool, tmp_path: Path) -> None:
    """The bytes are those of all files, with the arrays of a ``_gda`` folder."""
    path = Path(checkpoints.save_checkpoint(tmp_path, {"w": np.random.default_rng(0).random(1000)}, 1))
    (tmp_path / "checkpoint_1_gda").mkdir()
    (tmp_path / "checkpoint_1_gda" / "0.0").write_bytes(bytes(123))
    (record,) = iter_checkpoints(tmp_path)
    assert record.nbytes == disk_use(path) + 123


def test_paths_are_in_the_callers_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative directories and prefixes with a folder give paths of the same form, which open."""
    monkeypatch.chdir(tmp_path)
    checkpoints.save_checkpoint("runs", tree(), 1, prefix="a/ck_")
    (record,) = iter_checkpoints("runs", "a/ck_")
    assert record.path == "runs/a/ck_1"


def test_no_directory(tmp_path: Path) -> None:
    """A directory that does not exist, or holds nothing, has no checkpoints."""
    assert list(iter_checkpoints(tmp_path / "absent")) == list(iter_checkpoints(tmp_path)) == []
    (tmp_path / "file").touch()
    assert list(iter_checkpoints(tmp_path / "file")) == []


@pytest.mark.parametrize("step_prefix", [None, "run"])
def test_steps_of_a_manager(step_prefix: str | None, tmp_path: Path) -> None:
    """The steps of a real CheckpointManager, also those that it did not finish."""
    options = ocp.CheckpointManagerOptions(step_prefix=step_prefix, step_format_fixed_length=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ocp.CheckpointManager(tmp_path / "root", options=options) as manager:
            for step in (9, 10):
                manager.save(step, args=ocp.args.StandardSave({"a": np.ones(2)}))
    start = f"{step_prefix}_" if step_prefix else ""
    (tmp_path / "root" / f"{start}0011").mkdir()
    (tmp_path / "root" / "pictures_3").mkdir()
    records = [(os.path.basename(r.path), r.step, r.complete) for r in iter_checkpoints(tmp_path / "root")]
    assert records == [(f"{start}0009", 9, True), (f"{start}0010", 10, True), (f"{start}0011", 11, False)]
