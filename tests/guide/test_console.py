"""The terminal sessions of the guide print what they show; every other block runs elsewhere or says why it does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from flax_ckpt_compat import config, save
from flax_ckpt_compat.cli import main
from tests.guide.test_readme import PAGES, ROOT, SKIPPED

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
        "from tests.guide.test_console import state\n\n\ndef create_state():\n    return state('layer')\n",
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


SCENES = {
    "show": show,
    "verify": verify,
    "diff": diff,
    "plan": plan,
    "convert": convert,
    "scan": scan,
}


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
