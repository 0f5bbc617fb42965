"""``flax-ckpt convert``: what it prints, its exit codes, and that each refusal says what to do."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner, Result

import flax_ckpt_compat
from flax_ckpt_compat.cli import main

ROOT = Path(__file__).parents[2]


def convert(*arguments: object) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two steps of one run, each of 4000 bytes in two arrays."""
    for step in (1, 2):
        tree = {"a": np.full(500, step, np.float32), "b": [np.full(250, step)]}
        flax_ckpt_compat.save(tmp_path / "runs", tree, step=step, format="msgpack")
    return tmp_path / "runs"


def test_a_dry_run_lists_what_would_be_done(runs: Path, tmp_path: Path) -> None:
    """Source, result and size of each; nothing is written."""
    result = convert(runs, tmp_path / "out", "--to", "orbax", "--dry-run")
    assert result.exit_code == 0
    *rows, summary, space = result.stdout.splitlines()
    assert rows == [f"planned {runs}/checkpoint_{step} → {tmp_path}/out/checkpoint_{step} (4.00 kB)" for step in (1, 2)]
    assert summary == "2 planned: 8.00 kB. Nothing was written."
    assert re.fullmatch(
        rf"Space: about 8.00 kB, and \d.* are free in {tmp_path}; nothing of the source is removed.", space
    )
    note = f"Note: {runs}/checkpoint_1 (and 1 more): dicts of 0, 1, … are written as lists"
    assert result.stderr.startswith(note)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_that_space_is_short(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its last line, and in JSON the bytes that are free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7_000))
    lines = convert(runs, tmp_path / "out", "--to", "msgpack", "--dry-run").stdout.splitlines()
    assert lines[-1] == (
        f"Space: NOT ENOUGH: about 8.00 kB, and 7.00 kB are free in {tmp_path}; nothing of the source is removed."
    )
    found = json.loads(convert(runs, tmp_path / "out", "--to", "msgpack", "--dry-run", "--json").stdout)
    assert [one["free_bytes"] for one in found] == [7_000, 7_000]


def test_lines_while_it_runs_and_a_summary(runs: Path, tmp_path: Path) -> None:
    """One line for each result as it is done, and their sum; again with --resume they are kept."""
    result = convert(runs, tmp_path / "out", "--to", "msgpack", "--workers", 2)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert sorted(lines[:2]) == [
        f"converted {runs}/checkpoint_{step} → {tmp_path}/out/checkpoint_{step} (4.00 kB)" for step in (1, 2)
    ]
    assert lines[2].startswith("2 converted: 8.00 kB in ")
    assert "\x1b" not in result.output
    again = convert(runs, tmp_path / "out", "--to", "msgpack", "--resume", "--json")
    assert [one["status"] for one in json.loads(again.stdout)] == ["kept", "kept"]
    assert again.exit_code == 0
    assert convert(runs, tmp_path / "out", "--to", "msgpack", "--resume").stdout.splitlines()[-1] == "2 kept."
    refused = convert(runs, tmp_path / "out", "--to", "msgpack")
    assert refused.exit_code == 1
    assert f"{tmp_path}/out/checkpoint_1 exists, and nothing is replaced" in refused.stderr


def test_json_has_everything(runs: Path, tmp_path: Path) -> None:
    """A list in the order of the sources, with bytes, notes and errors."""
    (runs / "checkpoint_3").write_bytes(b"\x81")
    result = convert(runs, tmp_path / "out", "--to", "orbax", "--step", 1, "--step", "3", "--json")
    assert result.exit_code == 1
    first, third = json.loads(result.stdout)
    assert (first["status"], first["bytes"], first["leaves"], first["error"]) == ("converted", 4000, 2, None)
    assert third["status"] == "failed"
    assert "checkpoint_3" in third["error"]


def test_target_and_transforms_are_loaded(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``module:name`` names a function for the target, and rules, in a module of the working directory."""
    (tmp_path / "my_project_for_convert.py").write_text(
        "import numpy as np\n"
        "from flax_ckpt_compat import rules\n"
        "calls = []\n"
        "def state():\n"
        "    calls.append(1)\n"
        "    return {'c': np.zeros(500, np.float32), 'b': (np.zeros(250),)}\n"
        "how = [rules.rename('a', 'c')]\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ("--target", "my_project_for_convert:state", "--transforms", "my_project_for_convert:how")
    assert convert("runs", "out", "--to", "orbax", *options).exit_code == 0
    restored = flax_ckpt_compat.restore("out", step=2)
    assert restored.keys() == {"b", "c"}
    assert isinstance(restored["b"], tuple)
    assert (restored["c"] == 2).all()
    assert sys.modules["my_project_for_convert"].calls == [1]  # once for both checkpoints
    result = convert("runs", "more", "--to", "orbax", "--target", "my_project_for_convert:none")
    assert result.exit_code == 2
    assert "my_project_for_convert" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none", "out", "--to", "orbax"), "does not exist"),
        (("runs", "runs/out", "--to", "orbax"), "is in the source"),
        (("runs", "runs", "--to", "orbax"), "runs is in the source"),
        (("runs", "runs/../runs/", "--to", "manager"), "runs is in the source"),
        (("runs/checkpoint_1", "runs/checkpoint_1", "--to", "orbax"), "checkpoint_1 is in the source"),
        (("runs", "out", "--to", "zip"), "'zip' is not one of 'orbax', 'msgpack', 'manager', 'v1', 'safetensors'"),
        (("runs", "out", "--to", "orbax", "--step", "9"), "available steps: 1, 2; pass one of them"),
        (("runs", "out"), "Missing option '--to'"),
    ],
)
def test_refusals_say_what_to_do(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """Exit code 2, no traceback, nothing written."""
    monkeypatch.chdir(tmp_path)
    result = convert(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == [runs.name]


def test_safetensors_need_their_library(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nothing is begun, and the message names the extra."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = convert(runs, tmp_path / "out", "--to", "safetensors")
    assert result.exit_code == 2 and "pip install 'flax-ckpt-compat[safetensors]'" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_a_pipe_of_another_encoding_gets_escapes(runs: Path, tmp_path: Path, encoding: str) -> None:
    """All is converted: what the encoding lacks is no reason to stop after the first one."""
    command = [sys.executable, "-m", "flax_ckpt_compat", "convert", runs, tmp_path / "out", "--to", "orbax"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": encoding}, cwd=ROOT, capture_output=True, check=True
    )
    assert rb"checkpoint_2 \u2192 " in done.stdout and (tmp_path / "out" / "checkpoint_2").is_dir()
