"""A directory that may not be listed, or a look that fails, is told: no older step, no word of damage, no loss."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from flax_ckpt_compat import checkpoints, restore, save
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat.cli import main
from flax_ckpt_compat.errors import InvalidCheckpointError, StorageError
from tests.support.saves import refuse, set_aside, use_flag

_NOBODY = 65534


def run(*arguments: object) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture(autouse=True)
def no_wait_for_a_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set aside here is nobody's."""
    monkeypatch.setattr(atomic, "_SWAP_SECONDS", 0.05)


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


# Command → its exit code, and what it prints of all that could be looked at, and of what could not.
COMMANDS: dict[tuple[str, ...], tuple[int, list[str]]] = {
    ("ls", "{runs}", "--recursive"): (
        2,
        ["complete  ", "{runs}/lost+found could not be listed: Permission denied; check the permissions"],
    ),
    ("show", "{runs}/lost+fuond/x"): (2, ["did you mean {runs}/lost+found?"]),
    ("ls", "{runs}/a"): (0, ["incomplete: permission to list it is denied"]),
    ("verify", "{runs}"): (1, ["3 checkpoints: 1 ok, 2 unreadable."]),
    ("clean", "{runs}"): (0, ["stays, because the system refused to list it"]),
    ("convert", "{runs}/a", "{runs}/../b", "--to", "msgpack"): (1, ["1 converted, 1 failed: 24 B"]),
}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands(words: tuple[str, ...], runs: Path) -> None:
    """They do their work with all others, and say which they could not look at, and that more may be there."""
    code, texts = COMMANDS[words]
    result = run(*(word.format(runs=runs) for word in words))
    assert result.exit_code == code, result.output
    for text in texts:
        assert result.output.count(text.format(runs=runs)) == (2 if words[0] == "clean" else 1), result.output
    assert words[0] != "convert" or (runs.parent / "b" / "checkpoint_2").is_file()


def test_saves(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step that may not be listed counts by its name, as in Flax, and is neither evicted nor in the way of saves."""
    run_dir, tree = runs / "a", {"w": np.ones(3)}
    assert checkpoints.available_steps(run_dir) == [1, 2]
    (run_dir / "checkpoint_2").chmod(0)
    assert checkpoints.latest_checkpoint(run_dir) == str(run_dir / "checkpoint_2")
    with pytest.raises(PermissionError, match="checkpoint_2 could not be listed"):
        checkpoints.restore_checkpoint(run_dir, tree)
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


def test_what_cannot_be_put_back(runs: Path) -> None:
    """A checkpoint that a dead writer set aside is told: a program must not begin anew."""
    (runs / "b").mkdir()
    save(runs / "b" / "checkpoint_7", _TARGET)
    set_aside(runs / "b" / "checkpoint_7")
    (runs / "b").chmod(0o555)
    for restores in (checkpoints.restore_checkpoint, restore):
        with pytest.raises(StorageError, match="Permission denied"):
            restores(runs / "b" / "checkpoint_7", _TARGET)


_CALLS = ("stat", "lstat", "listdir", "open")
_TARGET = {"a": np.zeros(3)}


class _Failing:
    """Counts the calls of `os` below a directory, and lets the n-th fail."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, at: int = 0, number: int = errno.EIO):
        self._folder, self._at, self._number, self.calls = str(folder), at, number, 0
        for name in _CALLS:
            patch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            if str(path).startswith(self._folder):
                self.calls += 1
                if self.calls == self._at:
                    raise OSError(self._number, os.strerror(self._number), str(path))
            return real(path, *rest, **options)

        return call


def _restore(folder: Path) -> float:
    return float(checkpoints.restore_checkpoint(folder, _TARGET)["a"][0])


def _latest(folder: Path) -> float:
    return float(str(checkpoints.latest_checkpoint(folder)).rpartition("_")[2])


@pytest.mark.parametrize("look", [_restore, _latest])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN], ids=errno.errorcode.get)
def test_each_look_fails_once(flag, number, look, tmp_path):
    """The latest step, or a StorageError: a stale name is looked up again, and a dead mount is no empty directory."""
    with use_flag(flag):
        for step in (1, 2, 3):
            checkpoints.save_checkpoint(tmp_path, {"a": np.full(3, float(step))}, step, keep=3)
        with pytest.MonkeyPatch.context() as patch:
            calls = _Failing(tmp_path, patch)
            assert look(tmp_path) == 3
        assert calls.calls > 2
        for at in range(1, calls.calls + 1):
            with pytest.MonkeyPatch.context() as patch:
                _Failing(tmp_path, patch, at, number)
                try:
                    assert look(tmp_path) == 3, at
                except StorageError as error:
                    assert error.errno == number, (at, error)


def _values(folder: Path) -> dict[float, float]:
    """Return step → value of all that is there."""
    return {
        float(step): float(checkpoints.restore_checkpoint(folder, _TARGET, step)["a"][0])
        for step in checkpoints.available_steps(folder)
    }


@pytest.mark.parametrize(
    ("number", "flag"),
    [
        (errno.ENOTCONN, False),
        pytest.param(errno.EIO, True, marks=pytest.mark.slow),
        pytest.param(errno.EIO, False, marks=pytest.mark.slow),
        pytest.param(errno.ENOTCONN, True, marks=pytest.mark.slow),
    ],
)
def test_each_look_of_a_save_fails_once(flag, number, tmp_path):
    """The save succeeds, or raises StorageError; then each step has its old value or the new one."""

    def save(at: int) -> tuple[int, StorageError | None, dict[float, float]]:
        folder = tmp_path / str(at)
        for step in (1, 2, 3):
            checkpoints.save_checkpoint(folder, {"a": np.full(3, float(step))}, step, keep=3)
        with pytest.MonkeyPatch.context() as patch:
            calls, failure = _Failing(folder, patch, at, number), None
            try:
                checkpoints.save_checkpoint(folder, {"a": np.full(3, 20.0)}, 2, keep=1, overwrite=True)
            except StorageError as error:
                failure = error
        return calls.calls, failure, _values(folder)

    with use_flag(flag):
        count, failure, values = save(0)
        assert failure is None and values == {2: 20} and count > 5
        for at in range(1, count + 1):
            _, failure, values = save(at)
            if failure is None:
                assert values == {2: 20}, at
            elif 20 not in values.values():
                assert values == {1: 1, 2: 2, 3: 3}, (at, failure)
            else:  # it failed to remove others
                assert values.items() <= {1: 1, 2: 20, 3: 3}.items(), (at, failure)


@pytest.mark.parametrize("named", ["step", "path"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN], ids=errno.errorcode.get)
def test_a_search_for_what_was_set_aside_fails(named, number, tmp_path):
    """A named checkpoint that a dead writer set aside is put back: no target where its directory is not listed."""
    with use_flag(False):
        path = Path(checkpoints.save_checkpoint(tmp_path, {"a": np.full(3, 1.0)}, 1))
    set_aside(path)

    where, step = (path, None) if named == "path" else (tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "listdir", str(tmp_path), number)
        with pytest.raises(StorageError) as raised:
            checkpoints.restore_checkpoint(where, _TARGET, step)
        assert raised.value.errno == number
    assert checkpoints.restore_checkpoint(where, _TARGET, step)["a"][0] == 1
