"""A Flax without `flax.training.checkpoints`, and no Orbax: every way in works, with real files removed.

What is written there is read here, by real Flax and real Orbax.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path

import flax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

ROOT = Path(__file__).parents[1]
SAVES_AND_RESTORES = """
    import os
    import numpy as np
    for step, flag in enumerate(["false", "true"]):
        os.environ["FLAX_USE_ORBAX_CHECKPOINTING"] = flag
        if hasattr(flax.config, "flax_use_orbax_checkpointing"):
            flax.config.update("flax_use_orbax_checkpointing", flag == "true")
        tree = {"w": np.arange(3, dtype=np.float32) + step, "step": step}
        checkpoints.save_checkpoint("saved", tree, step, keep=2)
        found = checkpoints.restore_checkpoint("saved", {"w": np.zeros(3, np.float32), "step": 9})
        assert found["step"] == step and np.array_equal(found["w"], tree["w"])
    try:
        checkpoints.save_checkpoint("saved", tree, 0)
    except flax.errors.InvalidCheckpointError as error:
        print(error)
    assert checkpoints.latest_checkpoint("saved") == "saved/checkpoint_1"
"""
FLAXS = "import flax, flax.errors\nfrom flax.training import checkpoints\n"
OURS = "import flax, flax.errors\nfrom flax_ckpt_compat import checkpoints\n"
ORIGINALS = {"checkpoints": "training/checkpoints.py", "errors": "errors.py", "flag": "configurations.py"}


def remove(package: Path, *, all_of_it: bool) -> None:
    """Remove the module from a copy of Flax; on demand also the error classes and the flag that only it uses."""
    (package / ORIGINALS["checkpoints"]).unlink()
    if not all_of_it:
        return
    for file, names in (
        (package / ORIGINALS["errors"], ("InvalidCheckpointError", "MPA")),
        (package / ORIGINALS["flag"], ("flax_use_orbax_checkpointing",)),
    ):
        tree = ast.parse(file.read_text("utf-8"))
        kept = [node for node in tree.body if not _name(node).startswith(names)]
        assert len(kept) < len(tree.body)
        tree.body = kept
        file.unlink()
        file.write_text(ast.unparse(tree), "utf-8")


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return node.name if isinstance(node, ast.ClassDef) else ""


def make_environment(folder: Path, *, all_of_it: bool) -> Path:
    """Make a virtual environment with what is installed here, but for Orbax and parts of Flax; return its Python."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    left_out = ("orbax", "flax-ckpt-compat", "flax_ckpt_compat", "__editable__")
    for entry in [entry for path in sys.path if "site-packages" in path for entry in Path(path).iterdir()]:
        there = os.path.lexists(site / entry.name) or entry.name == "flax"
        if not there and not entry.name.startswith(left_out) and entry.suffix not in (".pth", ".egg-link"):
            (site / entry.name).symlink_to(entry)
    shutil.copytree(Path(flax.__file__).parent, site / "flax")
    remove(site / "flax", all_of_it=all_of_it)
    (site / "checkout.pth").write_text(f"{ROOT}\n")
    return folder / "bin/python"


@pytest.fixture(scope="module", params=[pytest.param("module", marks=pytest.mark.slow), "all"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreters whose Flax lacks the module, and whose Flax lacks the error classes and the flag as well."""
    return make_environment(tmp_path_factory.mktemp("environment"), all_of_it=request.param == "all")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(python: Path, tmp_path: Path) -> Run:
    """Run that Python in the test's folder; ``code=0`` is the exit code that it must end with."""

    def run_python(*words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [python, *words],
            cwd=tmp_path,
            env={**variables, "JAX_PLATFORMS": "cpu", **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run_python


def write(folder: Path, start: str) -> None:
    """Write the program that saves and restores, with its own way in."""
    (folder / "train.py").write_text(start + textwrap.dedent(SAVES_AND_RESTORES))


def check_saved(folder: Path, printed: str) -> None:
    """Both checkpoints hold what the program saved, say real Flax and real Orbax, and the refusal was a useful one."""
    legacy = serialization.msgpack_restore((folder / "saved/checkpoint_0").read_bytes())
    with ocp.PyTreeCheckpointer() as checkpointer:
        directory = checkpointer.restore(folder / "saved/checkpoint_1")
    for step, tree in enumerate([legacy, directory]):
        assert tree["step"] == step
        assert np.array_equal(tree["w"], np.arange(3, dtype=np.float32) + step)
    assert "overwrite=True" in printed


@pytest.mark.slow
def test_a_notebook_saves_and_restores(run: Run, tmp_path: Path) -> None:
    """``%load_ext`` gives notebooks the module of Flax's name; what it lacks is explained; uninstalled, it is gone."""
    start = "import flax_ckpt_compat\nflax_ckpt_compat.load_ipython_extension(None)\n" + FLAXS
    write(tmp_path, start)
    with (tmp_path / "train.py").open("a") as file:
        file.write(
            textwrap.dedent("""
            try:
                checkpoints._allowempty_listdir
            except AttributeError as error:
                print(error)
            flax_ckpt_compat.unload_ipython_extension(None)
            try:
                from flax.training import checkpoints
            except ImportError:
                print("gone")
            """)
        )
    printed = run("train.py").stdout
    check_saved(tmp_path, printed)
    assert "'_allowempty_listdir': Flax's own module is missing" in printed
    assert printed.endswith("gone\n")


# What a program begins with, and how it is run.
WAYS = {
    "changed import": (OURS, []),
    "install": ("import flax_ckpt_compat; flax_ckpt_compat.install()\n" + FLAXS, []),
    "run": (FLAXS, ["-m", "flax_ckpt_compat", "run"]),
    "pythonpath": (FLAXS, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ways_in(run: Run, tmp_path: Path, way: str) -> None:
    """An unchanged program fails by itself; each of these is enough."""
    start, words = WAYS[way]
    write(tmp_path, start)
    if way == "pythonpath":
        assert "cannot import name 'checkpoints'" in run("train.py", code=1).stderr
        assert "No module named 'orbax'" in run("-c", "import orbax", code=1).stderr
        folder = {"PYTHONPATH": run("-m", "flax_ckpt_compat", "run", "--pythonpath").stdout.strip()}
    check_saved(tmp_path, run(*words, "train.py", **(folder if way == "pythonpath" else {})).stdout)


CLI = """
    import json, sys
    from click.testing import CliRunner
    from flax_ckpt_compat.cli import main
    results = [CliRunner().invoke(main, words.split()) for words in sys.argv[1:]]
    print(json.dumps([[result.exit_code, result.output] for result in results]))
"""


@pytest.mark.slow
def test_commands(run: Run, tmp_path: Path) -> None:
    """Each command does its work, and those that need what is gone say so and what to do."""
    write(tmp_path, OURS)
    run("train.py")
    (tmp_path / "goal.py").write_text("def target():\n    return {'w': 0, 'renamed': 0}\n")
    (tmp_path / "old.py").write_text(FLAXS)
    expected = {
        "ls saved": (0, "checkpoint_1"),
        "show saved/checkpoint_1": (0, "float32[3]"),
        "verify saved": (0, "2 checkpoints: 2 ok"),
        "diff saved/checkpoint_0 saved/checkpoint_1": (1, "max abs 1"),
        "plan saved --target goal:target": (1, "renamed"),
        "clean saved": (0, "0 to remove"),
        "scan old.py": (0, "imports the legacy API"),
        "doctor": (0, "install() puts ours in its place"),
    }
    for form in ("orbax", "msgpack", "manager"):
        expected |= {f"convert saved to_{form} --to {form}": (0, ""), f"verify to_{form}": (0, "2 checkpoints: 2 ok")}
    results = json.loads(run("-c", textwrap.dedent(CLI), *expected).stdout.splitlines()[-1])
    for words, (code, output), (expected_code, text) in zip(expected, results, expected.values(), strict=True):
        assert (code, text in output) == (expected_code, True), (words, code, output)
    patched = run("-m", "flax_ckpt_compat", "run", "-m", "flax_ckpt_compat", "doctor").stdout
    assert "ours: the shim is active" in patched
    assert "orbax-checkpoint             not installed" in patched
