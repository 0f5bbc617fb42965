"""The recorded walk from legacy code to Orbax: it ends well, and the guide shows what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guide.terminal import picture, plain, run, shown
from tests.guide.walk import words_of
from tests.support.peers import version

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_walk() -> None:
    """Every command of the page does what the page says; the words that no run changes are those of today."""
    # Older releases warn in other words, so what they print is not compared.
    check = ["--check"] if version("orbax-checkpoint") >= (0, 12) else []
    command = [sys.executable, "-m", "tests.guide.walk", *check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr


def test_terminal(tmp_path: Path) -> None:
    """A command sees a terminal of 80 columns, and is answered; of progress bars stays what a terminal shows."""
    code, text = run("tput cols; test -t 1 && read -p 'Go? [y/N]: ' x; echo $x; exit 3", str(tmp_path), os.environ, "y")
    assert (code, plain(text).splitlines()) == (3, ["80", "Go? [y/N]: y", "y"])
    assert shown("a\r\n 10%\r 99%\r\x1b[2Kdone\r\nx\r\n\x1b[1A\x1b[2K\x1b[1mend\x1b[0m") == "a\ndone\n\x1b[1mend\x1b[0m"


def test_picture() -> None:
    """A picture shows the text, has colours for light and dark, and loads nothing."""
    svg = picture("$ flax-ckpt ls runs\n\x1b[31mred\x1b[0m and \x1b[2mdim <>\x1b[0m", "a run", "name")
    assert words_of(svg) == ["$", "flax-ckpt", "ls", "runs", "red", "and", "dim", "<>"]
    assert "prefers-color-scheme: dark" in svg
    for theme in ("#cf222e", "#ff7b72"):
        variable = re.search(rf"(--c\d+): {theme};", svg)
        assert variable and svg.count(f"{variable[1]}:") == 2 and svg.count(f"var({variable[1]})") == 1
    assert "font-face" not in svg and svg.count("http") == svg.count("http://www.w3.org") + svg.count(
        "https://www.text"
    )
