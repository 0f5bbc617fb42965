"""The demo: it tells the truth, says no when a bit is wrong, and trains by a script that knows nothing of us."""

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.cli import demo
from tests.support.saves import use_flag

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "flax_ckpt_compat/cli/demo_train.py"


@pytest.fixture
def checks() -> Any:
    """The demo's checks; they import scikit-learn, which takes seconds."""
    from flax_ckpt_compat.cli import _demo_checks

    return _demo_checks


def run(*arguments: str, flag: str = "false") -> subprocess.CompletedProcess[str]:
    """Runs python with these arguments, as from a shell with its output piped away."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLAX_USE_ORBAX_CHECKPOINTING": flag}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_the_demo_passes_and_is_readable(tmp_path: Path) -> None:
    """It ends well, fits 80 columns, uses no colour when piped, and leaves its files where it was told to."""
    done = run("-m", "flax_ckpt_compat", "demo", "--workdir", str(tmp_path / "new"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every value is bit-identical." in done.stdout
    assert "resumed at step 200, trained to step 600" in done.stdout
    assert "rules.rename('Dense_2', 'head')" in done.stdout and "MissingLeavesError" in done.stdout
    assert "flax-ckpt run train.py" in done.stdout
    assert "batch_stats, which the file lacks, kept from the target" in done.stdout
    assert "\x1b" not in done.stdout
    report, _, _ = done.stdout.partition("The files are in")
    assert max(map(len, report.splitlines())) <= 80
    assert all(line == line.rstrip() for line in report.splitlines())
    assert {"checkpoint_550", "checkpoint_600"} < set(os.listdir(tmp_path / "new/run"))


def test_the_training_script_knows_nothing_of_us() -> None:
    """Its only import of checkpointing is Flax's own."""
    text = SCRIPT.read_text(encoding="utf-8")
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
    assert not any("flax_ckpt_compat" in ast.unparse(node) for node in imported)
    assert "from flax.training import checkpoints, train_state" in text


@pytest.mark.slow
def test_training_is_the_same_with_flax_itself(tmp_path: Path) -> None:
    """A run begun by plain python and ended under the shim is the run of plain python, number by number."""
    arguments = [str(SCRIPT), "--save-every", "10", "--steps"]
    whole = run(*arguments, "40", "--workdir", str(tmp_path / "whole"))
    begun = run(*arguments, "20", "--workdir", str(tmp_path / "parts"))
    ended = run("-m", "flax_ckpt_compat", "run", *arguments, "40", "--workdir", str(tmp_path / "parts"), flag="true")
    assert begun.returncode == ended.returncode == 0, begun.stderr + ended.stderr
    expected = [json.loads(line) for line in whole.stdout.splitlines()]
    found = [json.loads(line) for line in begun.stdout.splitlines()[:-1] + ended.stdout.splitlines()]
    expected[-1]["resumed_at"] = 20
    assert found == expected
    assert expected[-1]["accuracy"] > 0.5  # of ten digits


def test_a_wrong_bit_is_seen(checks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that changes one bit, a dtype, a shape, or loses a leaf is called different."""
    tree = {"a": np.zeros(3, np.float32), "b": {"0": np.int32(1)}}
    path = tmp_path / "checkpoint_1"
    from flax import serialization

    path.write_bytes(serialization.to_bytes(tree))
    assert [entry.identical for entry in checks.inspect_directory(str(tmp_path))] == [True]
    wrongs: list[Any] = [
        {**tree, "a": np.array([0, 0, -0.0], np.float32)},
        {**tree, "a": np.zeros(3, np.int32)},
        {**tree, "a": np.zeros((3, 1), np.float32)},
        {"a": tree["a"]},
        {**tree, "c": 1},
    ]
    for wrong in wrongs:
        monkeypatch.setattr(checkpoints, "restore_checkpoint", lambda *_, wrong=wrong: wrong)
        assert [entry.identical for entry in checks.inspect_directory(str(tmp_path))] == [False]


def test_a_failed_stage_is_a_failed_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1 as soon as one stage did not find everything identical."""
    for stage in ("killed", "changed", "timed"):
        monkeypatch.setattr(demo, f"_stage_{stage}", lambda *_: True)
    monkeypatch.setattr(demo, "_stage_resumed", lambda *_: False)
    result = CliRunner().invoke(demo.command)
    assert result.exit_code == 1
    assert "NOT IDENTICAL" in result.output


def test_a_changed_state_is_restored_with_what_the_plan_proposes(checks: Any, tmp_path: Path) -> None:
    """The stage is bad as soon as no rule is proposed, or the result is not what Flax's reader says under new names."""
    state = checks.demo_train.create_state(seed=3)
    with use_flag(False):
        path = checkpoints.save_checkpoint(tmp_path, state, 5)
    plan, entry, kept = checks.restore_into_changed_state(path)
    assert (len(plan.missing), plan.raises, entry.identical, kept) == (7, "MissingLeavesError", True, True)
    out = io.StringIO()
    demo._show_plan(Console(file=out, soft_wrap=True), plan)
    assert "rules.rename('Dense_2', 'head')," in out.getvalue()
    assert "7 missing" in out.getvalue() and max(map(len, out.getvalue().splitlines())) <= 80


def test_without_flaxs_own_module_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Flax that has no checkpoints leaves nothing to compare with; the demo says so and goes on."""
    monkeypatch.setitem(sys.modules, "flax.training.checkpoints", None)
    out = io.StringIO()
    demo._stage_timed(Console(file=out, soft_wrap=True), str(tmp_path))
    assert "left out: import of flax.training.checkpoints halted" in out.getvalue()


def test_missing_extras_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn the demo says how to get it, in one line to copy."""
    monkeypatch.setitem(demo._NEEDS, "no_such_module.at_all", "scikit-learn")
    result = CliRunner().invoke(demo.command)
    assert result.exit_code == 2
    assert "needs scikit-learn. Install it with" in result.output
    assert "    python -m pip install scikit-learn\n" in result.output


def test_an_interrupted_demo_does_not_say_that_bits_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends it with 130, as every command, and ends the training script, which may not have got the signal."""
    script = tmp_path / "train.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n")
    monkeypatch.setattr(demo, "_SCRIPT", str(script))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.append(int(line))
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_parse_report", interrupt)
    result = CliRunner().invoke(demo.command)
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    """A folder that holds anything is left alone."""
    (tmp_path / "mine").touch()
    result = CliRunner().invoke(demo.command, ["--workdir", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.output
    assert os.listdir(tmp_path) == ["mine"]


def test_a_narrow_terminal_cuts_no_name(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table fits sixty columns with every word in full, and no line ends in a blank."""
    monkeypatch.setenv("COLUMNS", "60")
    out = io.StringIO()
    entry = checks.Entry("checkpoint_600", "msgpack", 3_692_110, 20, identical=True)
    demo._show_entries(Console(file=out), [entry, entry._replace(name="checkpoint_5", identical=False)])
    header, same, wrong = out.getvalue().splitlines()
    assert header.split() == ["checkpoint", "format", "bytes", "leaves", "values"]
    assert same.split() == ["checkpoint_600", "msgpack", "3,692,110", "20", "bit-identical"]
    assert wrong.split() == ["checkpoint_5", "msgpack", "3,692,110", "20", "DIFFERENT"]
    assert all(line == line.rstrip() and len(line) <= 60 for line in (header, same, wrong))


@pytest.mark.parametrize("ours", [1.0, 3.0])
def test_a_slower_save_is_explained(checks: Any, ours: float) -> None:
    """That ours waits for the disk is always said, and given as the reason only where ours took longer."""
    out = io.StringIO()
    demo._show_timings(Console(file=out), [checks.Timing("msgpack save", ours, 2.0)])
    assert "fsync" in out.getvalue()
    assert ("took longer" in out.getvalue()) == (ours > 2)


@pytest.mark.parametrize(
    "program", ["print('oops')\nraise ValueError('why')", "print(3)", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_failed_training_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """What the script printed is shown, and the demo ends with a plain message and exit code 2."""
    script = tmp_path / "train.py"
    script.write_text(program)
    monkeypatch.setattr(demo, "_SCRIPT", str(script))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = CliRunner().invoke(demo.command)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit), result.output
    assert "the training script did not run as planned" in result.output
    if "why" in program:
        assert "oops" in result.output
        assert "ValueError: why" in result.output


def test_a_folder_that_cannot_be_made_is_a_plain_message(tmp_path: Path) -> None:
    """Below a file no folder can be made; the exit code is that of wrong usage."""
    (tmp_path / "file").touch()
    result = CliRunner().invoke(demo.command, ["--workdir", str(tmp_path / "file/new")])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "cannot be used" in result.output


def test_options_of_the_training_script_are_not_the_demos() -> None:
    """An option that only the training script has is refused with what can be chosen."""
    result = CliRunner().invoke(demo.command, ["--steps", "3"])
    assert result.exit_code == 2
    assert "only --workdir can be chosen" in result.output
