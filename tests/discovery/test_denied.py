"""A directory that the system refuses to list is told, and does not hide what is beside it from the commands."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from flax_ckpt_compat import checkpoints, save
from flax_ckpt_compat.cli import main
from flax_ckpt_compat.errors import InvalidCheckpointError, StorageError

_NOBODY = 65534


def run(*arguments: object) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def runs() -> Iterator[Path]:
    """A run with a step that may be read and one that may not, beside such a directory; root is somebody else."""
    top = Path(tempfile.mkdtemp())  # which others may search, as ``tmp_path`` they may not
    root, user = top / "runs", os.geteuid()
    for step in (1, 2):
        save(root / "a" / f"checkpoint_{step}", {"w": np.ones(3)}, format="orbax")
    (root / "lost+found").mkdir()
    for command in ("verify", "clean", "ls"):
        run(command, root / "a")  # loads all modules, where root alone may read them
    run("convert", root / "a", top / "loaded", "--to", "msgpack")
    denied = [root / "a" / "checkpoint_1", root / "lost+found"]
    for path in denied:
        path.chmod(0)
    if user == 0:
        for path in (top, root, *root.glob("a"), *root.glob("a/checkpoint_2"), *root.glob("a/checkpoint_2/**/*")):
            os.chown(path, _NOBODY, -1)
        os.seteuid(_NOBODY)
    try:
        yield root
    finally:
        os.seteuid(user)
        for path in denied:
            path.chmod(0o700)
        shutil.rmtree(top)


def test_ls(runs: Path) -> None:
    """It lists all others, and says which it could not."""
    result = run("ls", runs, "--recursive")
    assert (result.exit_code, result.stdout.count("complete  ")) == (2, 1), result.output
    assert f"{runs}/lost+found could not be listed: Permission denied; check the permissions" in result.stderr
    result = run("ls", runs / "a")
    assert result.exit_code == 0
    assert "incomplete: permission to list it is denied" in result.stdout.splitlines()[1]


def test_verify(runs: Path) -> None:
    """What may be a checkpoint is unreadable, and so not well."""
    result = run("verify", runs)
    assert result.exit_code == 1
    assert "3 checkpoints: 1 ok, 2 unreadable." in result.stdout.splitlines(), result.output


def test_clean(runs: Path) -> None:
    """It says that more may be there."""
    result = run("clean", runs)
    assert result.stdout.count("stays, because the system refused to list it") == 2, result.output


def test_convert(runs: Path) -> None:
    """All others are converted."""
    result = run("convert", runs / "a", runs.parent / "b", "--to", "msgpack")
    assert result.exit_code == 1
    assert "1 converted, 1 failed: 24 B" in result.stdout, result.output
    assert (runs.parent / "b" / "checkpoint_2").is_file()


def test_saves(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step that may not be listed counts by its name, as in Flax, and is neither evicted nor in the way of saves."""
    run_dir, tree = runs / "a", {"w": np.ones(3)}
    assert checkpoints.available_steps(run_dir) == [1, 2]
    (run_dir / "checkpoint_2").chmod(0)
    with pytest.raises(InvalidCheckpointError, match="checkpoint_2 is newer"):
        checkpoints.save_checkpoint(run_dir, tree, 0)
    (run_dir / "checkpoint_2").chmod(0o700)
    checkpoints.save_checkpoint(run_dir, tree, 3, keep=1)
    assert sorted(os.listdir(run_dir)) == ["checkpoint_1", "checkpoint_3"]
    assert "checkpoint_1 (permission to list it is denied)" in caplog.text


def test_a_directory_of_runs(runs: Path, flag: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where a new run has saved nothing yet, its target is returned, as by Flax, whatever else may not be listed."""
    del flag
    target = {"w": np.zeros(3)}
    assert checkpoints.restore_checkpoint(runs, target) is target
    assert "Nothing to restore" in caplog.text
    assert checkpoints.latest_checkpoint(runs) is None
    assert checkpoints.available_steps(runs) == []
    result = run("convert", runs, runs.parent / "b", "--to", "msgpack")
    assert (result.exit_code, "1 converted, 2 failed: 24 B" in result.stdout) == (1, True), result.output
    checkpoints.save_checkpoint(runs, {"w": np.ones(3)}, 1, "new_")
    assert checkpoints.restore_checkpoint(runs, target, prefix="new_")["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("folder", "name"), [("older", "params"), ("7", "weights"), ("run_7", "weights")])
def test_a_checkpoint_without_markers(runs: Path, folder: str, name: str) -> None:
    """An item that may not be listed is told, as there may be something to restore."""
    item = runs / folder / name
    item.mkdir(parents=True)
    item.chmod(0)
    with pytest.raises(StorageError, match=f"{name} could not be listed: Permission denied; check the permissions"):
        checkpoints.restore_checkpoint(runs / folder, {"w": np.zeros(3)})
