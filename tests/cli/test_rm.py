"""flax-ckpt rm and clean: what certainly is one checkpoint goes, whole. doctor: versions, flag, settings and paths."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import flax_ckpt_compat
from flax_ckpt_compat import config, save
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat.checkpoints import available_steps
from flax_ckpt_compat.cli import _command_base, main
from tests.support.peers import ocp
from tests.support.saves import refuse, set_aside, use_flag

TREE = {"w": np.ones(3)}


def rm(*words: str, answer: str | None = None) -> Result:
    """The outcome of the command."""
    return CliRunner().invoke(main, ["rm", *words], input=answer)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of both formats, with arrays beside one checkpoint and unfinished steps; the steps of a real manager."""
    for step, format in ((1, "msgpack"), (2, "orbax"), (3, "msgpack")):
        save(str(tmp_path / "run"), TREE, step=step, keep=9, format=format)  # type: ignore[arg-type]
    (tmp_path / "run/checkpoint_3_gda/w").mkdir(parents=True)
    (tmp_path / "run/checkpoint_8").touch()
    (tmp_path / "run/checkpoint_9").mkdir()
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(TREE))
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "data/images/1.png").write_bytes(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (("run/checkpoint_1", "run/checkpoint_2"), {"run/checkpoint_1", "run/checkpoint_2"}),
        (("run", "--step", "3"), {"run/checkpoint_3", "run/checkpoint_3_gda"}),
        (("run/checkpoint_8", "run/checkpoint_9"), {"run/checkpoint_8", "run/checkpoint_9"}),
        (("managed", "--step", "1"), {"managed/1"}),
        (("managed/2",), {"managed/2"}),
    ],
)
def test_checkpoints_go_whole(words: tuple[str, ...], gone: set[str], run: Path) -> None:
    """With the arrays beside them; a dry run and a no leave all."""

    def left() -> set[str]:
        return {str(path.relative_to(run)) for folder in ("run", "managed") for path in (run / folder).iterdir()}

    before = left()
    assert rm(*words, "--dry-run").exit_code == 1
    without_answer = rm(*words)
    assert (without_answer.exit_code, "pass --yes" in without_answer.stderr, left()) == (2, True, before)
    done = rm(*words, "--yes")
    assert (done.exit_code, left()) == (0, before - gone), done.output


def test_everything_else_is_refused(run: Path) -> None:
    """And then nothing goes, of no path."""
    before = sorted(os.walk(run))
    for path, why in (
        ("run", "is a directory of checkpoints"),
        (".", "is a directory of checkpoints"),
        ("managed", "is a directory of checkpoints"),
        ("managed/2/default", "is a part of a checkpoint"),
        ("run/checkpoint_3_gda", "is a part of a checkpoint"),
        ("notes.txt", "a text file"),
        ("data", "no checkpoint of Flax or Orbax"),
        ("nowhere", "does not exist"),
    ):
        refused = rm("run/checkpoint_1", path, "--yes")
        assert (refused.exit_code, why in refused.stderr, sorted(os.walk(run))) == (2, True, before), refused.output


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_older_version_does_not_come_back(is_replaced: bool, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a writer set aside, which died before it removed it or put its own in the place, goes as well."""
    monkeypatch.setattr(atomic, "_SWAP_SECONDS", 0.05)
    set_aside(run / "run/checkpoint_1")
    if is_replaced:
        shutil.copy(run / "run/checkpoint_3", run / "run/checkpoint_1")
    assert rm("run/checkpoint_1", "--yes").exit_code == 0
    assert available_steps(run / "run") == [2, 3]


def test_clean_by_force(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays without their file may be a save's for a day; with --force they go, and no checkpoint does."""
    (run / "run/checkpoint_5_gda/w").mkdir(parents=True)
    before = {path.name for path in (run / "run").iterdir()}
    monkeypatch.setattr(_command_base, "is_terminal", lambda _: True)
    for words, code, gone in (
        (("--yes",), 0, set()),
        (("--force", "--json"), 2, set()),  # which asks nothing
        (("--yes", "--force"), 0, {"checkpoint_5_gda"}),
    ):
        assert CliRunner().invoke(main, ["clean", "run", *words]).exit_code == code
        assert before - {path.name for path in (run / "run").iterdir()} == gone


def test_a_removal_that_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, counted, and no reason to keep the others."""
    refuse(monkeypatch, "rename", "run/checkpoint_2")
    done = rm("run/checkpoint_2", "run/checkpoint_1", "--yes")
    assert (done.exit_code, "Removed 1 of 2" in done.output, "Error: " in done.stderr) == (1, True, True), done.output
    assert available_steps(run / "run") == [2, 3]


NOT_ACTIVE = "Flax's own: the shim is not active here; flax-ckpt run, PYTHONPATH or install() activates it"
DOCTOR = ["-m", "flax_ckpt_compat", "doctor"]


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with more environment variables."""
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def test_report(tmp_path, monkeypatch):
    """What it prints is what is installed and set."""
    (tmp_path / "checkpoint_1").touch()
    missing = str(tmp_path / "chekpoints")
    monkeypatch.setenv("FLAX_USE_ORBAX_CHECKPOINTING", "true")
    with use_flag(True), config.override(dtype="target"):
        found = CliRunner().invoke(main, ["doctor", str(tmp_path), missing, "--json"])
    assert found.exit_code == 1, found.stderr
    assert found.stderr.rstrip().endswith(f"Problem: {missing} does not exist: did you mean {tmp_path}/checkpoint_1?")
    sections = json.loads(found.stdout)
    for name in ("jax", "flax", "tensorstore", "zstandard", "crc32c", "orbax-checkpoint"):
        assert sections["Versions"][name] == metadata.version(name)
    assert sections["Versions"]["python"] == f"{platform.python_version()} ({sys.executable})"
    assert sections["Flax"] == {
        "flax_use_orbax_checkpointing": "True (FLAX_USE_ORBAX_CHECKPOINTING=true)",
        "flax.training.checkpoints": NOT_ACTIVE,
    }
    assert sections["Settings"] == {"dtype": "target"}
    assert sections["Paths"] == {str(tmp_path): "reachable, 1 name", missing: "failed"}


@pytest.mark.slow
def test_a_wrong_setting_is_a_problem():
    """The program itself fails with this error: the report has it with all the rest, and no traceback."""
    found = python(*DOCTOR, "--json", FLAX_CKPT_COMPAT_CHECKSUMS="maybe")
    assert found.returncode == 1 and "Traceback" not in found.stderr
    problem = "Problem: environment variable FLAX_CKPT_COMPAT_CHECKSUMS: setting checksums takes 'verify', "
    assert found.stderr.splitlines()[-1].startswith(problem)
    sections = json.loads(found.stdout)
    assert sections["Settings"] == {"all": "cannot be read"}
    assert sections["Flax"]["flax.training.checkpoints"] == NOT_ACTIVE


def test_a_flax_that_cannot_be_used_is_a_problem(monkeypatch):
    """The rest is reported all the same."""

    def fail():
        raise RuntimeError("it is broken")

    monkeypatch.setattr(config, "use_orbax_format", fail)
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 1 and "RuntimeError: it is broken" in result.stderr
    sections = json.loads(result.stdout)
    assert sections["Flax"]["flax_use_orbax_checkpointing"] == "failed"
    assert sections["Versions"]["flax"] == metadata.version("flax")


@pytest.mark.parametrize("is_run", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_patched_and_unreachable(is_run):
    """Under `flax-ckpt run` it says that Flax's functions are ours; a scheme that cannot be reached is a problem."""
    if is_run:
        found = python("-m", "flax_ckpt_compat", "run", *DOCTOR, "ftp://host/run")
        printed, told, code = found.stdout, found.stderr, found.returncode
    else:
        flax_ckpt_compat.install()
        try:
            result = CliRunner().invoke(main, ["doctor", "ftp://host/run"])
        finally:
            flax_ckpt_compat.uninstall()
        printed, told, code = result.stdout, result.stderr, result.exit_code
    assert code == 1 and "ours: the shim is active" in printed and "Problem: ftp://host/run" in told
