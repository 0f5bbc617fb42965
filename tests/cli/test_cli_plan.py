"""``flax-ckpt plan``: the plan of a restore into the state that a user's function returns, and what it refuses."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat.cli import main
from tests.support.saves import use_flag

SCRIPT = """
import argparse
import numpy as np
from flax_ckpt_compat import rules

def create_state():
    return {"head": {"w": np.zeros((2, 3), np.float32)}, "step": 0}

def without_data():
    raise RuntimeError("no data set here")

def create_other_shape():
    return {"dense": {"w": np.zeros((4, 3), np.float32)}, "step": 0}

def forgot_return():
    create_state()

def main():
    argparse.ArgumentParser().parse_args(["--steps", "3"])

def from_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=3)
    print("building with", parser.parse_args())
    return {"head": {"w": np.zeros((2, parser.parse_args().width), np.float32)}, "step": 0}

RULES = [rules.rename("dense", "head")]
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A project with a module and a run of real Flax, as working directory."""
    (tmp_path / "my_train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with use_flag(False):
        flax_checkpoints.save_checkpoint(tmp_path / "run", {"dense": {"w": np.ones((2, 3), np.float32)}, "step": 7}, 7)
    yield
    sys.modules.pop("my_train", None)


def plan(*arguments: str) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(main, ["plan", *arguments])


@pytest.mark.parametrize(
    ("target", "options", "code", "told"),
    [
        ("state", [], 1, "restore raises MissingLeavesError"),
        ("state", ["--restore-checkpoint"], 1, "restore_checkpoint raises MissingLeavesError"),
        ("other_shape", [], 1, "restore raises ShapeMismatchError (restore_checkpoint would succeed)"),
        (
            "other_shape",
            ["--restore-checkpoint"],
            0,
            "restore_checkpoint succeeds. Where shapes differ, the result has the stored shape.",
        ),
    ],
)
def test_what_each_function_would_do(target: str, options: list[str], code: int, told: str) -> None:
    """``restore_checkpoint`` warns of another shape, where ``restore`` raises; rules for leaves are told."""
    result = plan("run", "--target", f"my_train:create_{target}", *options)
    assert (result.exit_code, told in result.stdout) == (code, True), result.stdout
    assert ("rules.rename" in result.stdout) == (target == "state")
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("target", "printed"), [("create_state", ""), ("from_options", "building with Namespace(width=3)\n")]
)
def test_rules_of_the_project(target: str, printed: str) -> None:
    """With transforms of the project the restore would succeed: exit code 0, and JSON with every leaf.

    A function that parses options sees none of ours, and takes its defaults; what it prints is not in the JSON."""
    result = plan("run", "--target", f"my_train:{target}", "--transforms", "my_train:RULES", "--json")
    assert (result.exit_code, result.stderr) == (0, printed)
    found = json.loads(result.stdout)
    assert (found["raises"], found["format"], found["missing"]) == (None, "msgpack", [])
    leaf = {leaf["path"]: leaf for leaf in found["leaves"]}["head/w"]
    assert (leaf["sources"], leaf["shape"], leaf["dtype"]) == (["dense/w"], [2, 3], "float32")


@pytest.mark.parametrize(
    "target, says",
    [
        ("my_train:create_stat", "'my_train:create_stat': module 'my_train' has no attribute 'create_stat'"),
        ("my_train:without_data", "return the state, raised RuntimeError: no data set here"),
        ("my_train:main", "return the state, ended the program (SystemExit: 2)"),
        ("my_train:forgot_return", "my_train:forgot_return is None; it must be the state, or return it"),
        ("my_trian:create_state", "searched in {cwd} and PYTHONPATH, raised ModuleNotFoundError"),
        ("my_train", "is not module:name"),
        ("my_train.py:create_state", "is not module:name, such as train:create_state; a module is no path of a file"),
        ("../my-code/vit:create_state", "is not module:name"),
    ],
)
def test_targets_that_cannot_be_loaded(target: str, says: str, tmp_path: Path) -> None:
    """A misspelt or failing target, or a file, is one paragraph that says what to do; exit code 2."""
    result = plan("run", "--target", target.format(cwd=tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert says.format(cwd=tmp_path) in result.stderr
    assert "Traceback" not in result.stderr
