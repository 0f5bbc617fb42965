"""README and the guide: their Python and terminal sessions run, their links lead somewhere, their tables are true.

Examples in public docstrings run, too, as do the demo, and the program for preemption of the guide."""

import doctest
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from flax.training import checkpoints as flax_checkpoints

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, errors, save
from flax_ckpt_compat.cli import main
from tests.readers_matrix import table
from tests.support.interpreters import run_python
from tests.support.peers import ocp_released_v1, ocp_v1, skip_without_typed_keys, version
from tests.support.samples import fingerprint
from tests.support.saves import start_python, use_flag

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "migration_guide"
PAGES = [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]
# test_recipes runs the recipes, once.
RUN_HERE = [page for page in PAGES if page.name != "recipes.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIPPED = "<!-- not run: "


def fences(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language, without those that say why they are not run."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        if match[1] == language and not before.startswith(SKIPPED):
            found.append(match[2])
    return found


# What the slow one converts, test_convert.py converts by default.
PYTHON = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem == "leaving"))
    for page in RUN_HERE
    if fences(page, "python")
]


def test_ci_runs_the_test_command() -> None:
    """The README's first command is the demo's, its last the tests', and CI runs the latter word for word."""
    first, *_, last = (block.strip() for block in fences(ROOT / "README.md", "sh"))
    assert first == "python -m pip install '.[demo]' && python migration_guide/demo.py"
    assert last == "python -m pip install '.[test]' && python -m pytest"
    assert last in [line.strip() for line in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("page", PYTHON)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The Python blocks of a page run, one after the other, in one fresh interpreter and an empty folder."""
    program = "\n".join(fences(page, "python"))
    if "from orbax.checkpoint import v1" in program:
        _ = ocp_released_v1.load
    if "From Flax 0.12 on" in page.read_text(encoding="utf-8") and version("flax") < (0, 12):
        pytest.skip("the page needs a newer Flax")
    run_python(program, cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_names_its_language(page: Path) -> None:
    """No code block without a language slips past the test that runs them."""
    text = page.read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(FENCE.findall(text))
    assert all(language for language, _ in FENCE.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files of the repository name files that exist, and headings in them."""
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub, and myst on the site, give the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


BLOCK = re.compile(r"^(?:(<!--[^\n]*-->)\n)?```(sh|bash|console|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Seconds and rates, which differ from run to run, and the folders that the pages show.
VARIES = re.compile(r"\d[\d.]* [kMG]?B/s|\d[\d.e-]* s\b|\d[\d.]* [kMGT]?B(?= are free)")


def state(block: str = "block", seed: int = 0, **more: Any) -> dict[str, Any]:
    """A tree of 24 equal layers, with an optimizer's moments."""
    random = np.random.default_rng(seed)
    layers = {
        f"{block}_{i}": {
            "kernel": random.normal(size=(64, 64)).astype(np.float32),
            "bias": np.zeros(64, np.float32),
        }
        for i in range(24)
    }
    return {"params": layers, "opt": [np.ones(300, ml_dtypes.bfloat16), None], "step": 7, **more}


def show() -> None:
    """One checkpoint in Orbax's format, with two layers that differ."""
    tree = state()
    tree["params"]["block_3"]["kernel"] = np.ones((64, 32), np.float16)
    tree["params"]["block_5"]["bias"][0] = np.nan
    save("runs/a", tree, step=1, format="orbax")


def verify() -> None:
    """Three checkpoints: whole, without checksums and with a strange file, damaged."""
    save("runs/a", state(), step=1, format="msgpack")
    with config.override(checksums="off"):
        save("runs/b", state(), step=1, format="orbax")
    Path("runs/b/checkpoint_1/notes.txt").touch()
    save("runs/b", state(), step=2, format="orbax")
    kernel = state()["params"]["block_7"]["kernel"].tobytes()
    for file in Path("runs/b/checkpoint_2/d").iterdir():
        file.write_bytes(file.read_bytes().replace(kernel, b"\1" + kernel[1:]))


def diff() -> None:
    """Two checkpoints that differ in every way."""
    one, other = state(name="gpt"), state(head=np.zeros((3, 4)))
    for layer in other["params"].values():
        layer["kernel"] += np.float32(0.01)
    other["opt"][0], other["step"] = other["opt"][0].astype(np.float32), 8
    other["params"]["block_3"]["bias"] = np.zeros(65, np.float32)
    save("runs/a", one, step=1, format="msgpack")
    save("runs/c", other, step=1, format="orbax")


def plan() -> None:
    """A checkpoint, and a program whose layers have another name."""
    save("runs/a", state(), step=1, format="msgpack")
    Path("guide_train.py").write_text(
        "from tests.guide.test_pages import state\n\n\ndef create_state():\n    return state('layer')\n",
        encoding="utf-8",
    )


def convert() -> None:
    """A run of two steps."""
    for step in (1, 2):
        save("runs/a", {"params": state()["params"], "step": step}, step=step, format="msgpack")


def scan() -> None:
    """A program that takes a checkpoint for a file."""
    Path("src").mkdir()
    Path("src/train.py").write_text(
        "import os\n\nfrom flax.training import checkpoints\n\n\ndef save(state, step):\n"
        '    path = checkpoints.save_checkpoint("runs/a", state, step)\n    print(os.path.getsize(path), "bytes")\n',
        encoding="utf-8",
    )


SCENES = {scene.__name__: scene for scene in (show, verify, diff, plan, convert, scan)}


def sessions() -> list[Any]:
    """The terminal sessions of all pages, but for those that say why they are not run."""
    found = []
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if match[2] == "console" and not (match[1] or "").startswith(SKIPPED):
                found.append(pytest.param(match[3], id=f"{page.stem}-{len(found)}"))
    return found


@pytest.mark.parametrize("session", sessions())
def test_session(session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands print each line that the page shows, but for what three dots stand for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    SCENES[session.split()[2]]()
    shown = [line.split() for line in session.splitlines()]
    printed: list[str] = []
    for words in [words for words in shown if words[:2] == ["$", "flax-ckpt"]]:
        output = CliRunner().invoke(main, words[2:]).output.replace(str(tmp_path), "/home/me")
        printed += [_comparable(line) for line in output.splitlines()]
    for line in [_comparable(line) for line in session.splitlines() if not line.startswith("$ ")]:
        start, cut, _ = line.partition("…")
        assert line in printed or (cut and any(other.startswith(start) for other in printed)), "\n".join(printed)


def _comparable(line: str) -> str:
    return " ".join(VARIES.sub("?", line).split())


def test_every_block_runs_or_says_why() -> None:
    """No shell block or text on a page is untested without saying why; recipes' texts are their programs' output."""
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            is_tested = match[2] == "console" or page.name == "recipes.md" or page.name == "README.md"
            assert is_tested or (match[1] or "").startswith(SKIPPED), f"{page.relative_to(ROOT)}: {match[3]}"


NAMES = {"np": np, "jnp": jnp, "jax": jax, "ml_dtypes": ml_dtypes}
READERS: dict[str, Callable[[str], Any]] = {
    "PyTreeCheckpointer": lambda path: ocp.PyTreeCheckpointer().restore(path),
    "StandardCheckpointer": lambda path: ocp.StandardCheckpointer().restore(path),
    "v1 load": lambda path: ocp_v1.load(path),
}


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table that follows a heading, without their backquotes."""
    text = (GUIDE / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def value_of(cell: str) -> Any:
    """The value that a cell spells; the test is skipped where the installed ml_dtypes lacks its dtype."""
    try:
        return eval(cell, dict(NAMES))
    except AttributeError as error:
        pytest.skip(str(error))


SEEN = rows("formats.md", "What others see")


@pytest.mark.parametrize("leaf, flax_sees", [row[:2] for row in SEEN], ids=[row[0] for row in SEEN])
def test_what_flax_sees(leaf: str, flax_sees: str, tmp_path: Path) -> None:
    """Real Flax reads our msgpack file as the table says; where that is an error, its own file is one, too."""
    value = value_of(leaf)
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path / "ours", {"x": value}, 1)
        if flax_sees == "error":
            flax_checkpoints.save_checkpoint(tmp_path / "flax", {"x": value}, 1)
            for writer in ("ours", "flax"):
                with pytest.raises(TypeError, match="data type"):
                    flax_checkpoints.restore_checkpoint(tmp_path / writer, None)
        else:
            seen = flax_checkpoints.restore_checkpoint(tmp_path / "ours", None)["x"]
            assert fingerprint(seen) == fingerprint(value if flax_sees == "same" else value_of(flax_sees))
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path / "ours", {"x": value})["x"]) == fingerprint(value)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("leaf, orbax_sees", [row[::2] for row in SEEN], ids=[row[0] for row in SEEN])
def test_what_orbax_sees(leaf: str, orbax_sees: str, reader: str, tmp_path: Path) -> None:
    """Every reader of real Orbax reads our directory as the table says, and we read the leaf as it was."""
    value = value_of(leaf)
    if "random.key" in leaf:
        skip_without_typed_keys()
    with use_flag(True):
        path = checkpoints.save_checkpoint(tmp_path, {"x": value}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = READERS[reader](path)["x"]
    assert fingerprint(seen) == fingerprint(value if orbax_sees == "same" else value_of(orbax_sees))
    assert fingerprint(checkpoints.restore_checkpoint(path, {"x": value})["x"]) == fingerprint(value)


def test_the_table_of_releases_is_that_of_the_results() -> None:
    """`python -m tests.readers_matrix --write` wrote it last; no row is of a release that is not pinned."""
    assert table.text() in table.GUIDE.read_text()
    assert table.results().keys() <= table.RELEASES.keys()


def test_every_error_is_explained() -> None:
    """The page on errors has one section for each class, for no other, and each says what to do."""
    text = (GUIDE / "troubleshooting.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert sorted(name for name, _ in sections) == sorted(set(errors.__all__) - {"CheckpointError"})
    assert all("\n**Do:** " in section for _, section in sections)


MODULES = ("checkpoints", "config", "rules", "transforms")
# What the reference says every example begins with.
PUBLIC = {"np": np} | {name: getattr(flax_ckpt_compat, name) for name in flax_ckpt_compat.__all__}


def documented() -> dict[str, Any]:
    """Every public function and class, by its name in the package."""
    named = {name: PUBLIC[name] for name in flax_ckpt_compat.__all__}
    for module_name in MODULES:
        module = importlib.import_module(f"flax_ckpt_compat.{module_name}")
        named |= {f"{module_name}.{name}": getattr(module, name) for name in module.__all__}
    return {name: one for name, one in named.items() if inspect.isfunction(one) or inspect.isclass(one)}


EXAMPLES = {name: one for name, one in documented().items() if ">>> " in (one.__doc__ or "")}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("flag")
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example prints what it shows, with either value of Flax's flag."""
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags)
    text: list[str] = []
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, dict(PUBLIC), name, None, None)
    runner.run(example, out=text.append)
    assert not runner.failures, "".join(text)


@pytest.mark.slow
def test_the_demo_passes() -> None:
    """It is killed, goes on where it stopped, and every value is what real Flax and real Orbax read."""
    command = [sys.executable, str(GUIDE / "demo.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  begins at step 200\n" in done.stdout and done.stdout.count("bit-identical") == 6


PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from flax_ckpt_compat import checkpoints

{function}

print("reached", train(sys.argv[1], 1_000_000), flush=True)
"""


def program() -> str:
    """The page's function, in a program of its own."""
    (function,) = re.findall(
        r"^(def train\(.*?^    return .*?\n)", (GUIDE / "how_to.md").read_text(encoding="utf-8"), re.M | re.S
    )
    return PROGRAM.format(function=function)


@pytest.mark.slow
def test_a_signal_of_the_scheduler(flag: bool, tmp_path: Path) -> None:
    """The program ends by itself, with code 0, having saved the step that it reached; the next one goes on there."""
    run, reached = tmp_path / "run", []
    for _ in range(2):
        before = checkpoints.latest_checkpoint(run)
        process = start_python(program(), run, FLAX_USE_ORBAX_CHECKPOINTING=str(flag).lower())
        try:
            end = time.monotonic() + 60
            while checkpoints.latest_checkpoint(run) == before and time.monotonic() < end:
                time.sleep(0.05)  # until it trains, and has its handler
            process.send_signal(signal.SIGTERM)
            printed, told = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, told
        reached.append(int(printed.split()[1]))
        with use_flag(flag):
            state = checkpoints.restore_checkpoint(run, {"w": np.zeros(4), "step": 0})
        assert state["step"] == reached[-1] and (state["w"] == reached[-1]).all()
    assert 0 < reached[0] < reached[1]
