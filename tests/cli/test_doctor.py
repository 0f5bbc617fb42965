"""`flax-ckpt doctor`: versions, flag, settings, patches and reachable paths, as one paste."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata

import pytest
from click.testing import CliRunner

import flax_ckpt_compat
from flax_ckpt_compat import config
from flax_ckpt_compat.cli import main
from tests.support.saves import use_flag

NOT_ACTIVE = "Flax's own: the shim is not active here; flax-ckpt run, PYTHONPATH or install() activates it"
DOCTOR = ["-m", "flax_ckpt_compat", "doctor"]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
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
    for name in ("jax", "flax", "tensorstore", "orbax-checkpoint"):
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
    found = run(*DOCTOR, "--json", FLAX_CKPT_COMPAT_CHECKSUMS="maybe")
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
        found = run("-m", "flax_ckpt_compat", "run", *DOCTOR, "ftp://host/run")
        printed, told, code = found.stdout, found.stderr, found.returncode
    else:
        flax_ckpt_compat.install()
        try:
            result = CliRunner().invoke(main, ["doctor", "ftp://host/run"])
        finally:
            flax_ckpt_compat.uninstall()
        printed, told, code = result.stdout, result.stderr, result.exit_code
    assert code == 1 and "ours: the shim is active" in printed and "Problem: ftp://host/run" in told
