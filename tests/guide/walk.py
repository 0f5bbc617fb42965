"""The recording on ``migration_guide/walk.md``: a project moves from real Flax to real Orbax.

``python -m tests.guide.walk --check`` runs every command of the page in a terminal, in a new folder, checks exit codes
and values, and compares what is stable of the output with the page and its pictures. ``--write`` writes them.

The page says what is done: commands in blocks of ``console``, changes of files in blocks of ``diff`` after
``<!-- edit: FILE -->``. ``<!-- exit code: 1 -->`` is that of a block's last command; all others end with 0.
``<!-- before: NAME -->`` and ``<!-- after: NAME -->`` name functions of ``walk_checks``.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.guide import walk_checks
from tests.guide.terminal import picture, plain, run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "migration_guide" / "walk.md"
PROJECT = Path(__file__).with_name("walk_project")
_BLOCK = re.compile(
    r"(?P<marks>(?:<!-- [^\n]* -->\n)*)```(?P<language>console|diff)\n(?P<text>.*?)^```$"
    r"(?:\n\n!\[[^]]*\]\((?P<picture>[^)]+)\))?",
    re.MULTILINE | re.DOTALL,
)
# What the page shows for the folder of a run; of the same length, so that lines break alike.
_SHOWN_FOLDER = "/home/me/my-digits"
# What differs from run to run, and between releases of the libraries: times, sizes, versions.
_UNSTABLE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+ [+-]\d{4})?|[\d.]+ (?:s|[kM]?B)\b|\d+\.\d+|\(\d+%\)|[━╸╺]+"
)


class Walk:
    """A run of the page.

    Attributes:
        folder: where the project lies.
        aside: a folder for what the page does not show.
        environment: variables of its commands.
    """

    def __init__(self, folder: Path, aside: Path):
        self.folder, self.aside = folder, aside
        shutil.copytree(PROJECT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("later", "__pycache__"))
        programs = os.path.dirname(sys.executable)
        assert os.path.exists(f"{programs}/flax-ckpt"), f"install the library: {programs}/flax-ckpt is missing"
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("FLAX_", "PYTHON", "COLUMNS"))}
        self.environment = {**ours, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        # Warnings of other libraries are not part of the walk.
        self.environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}

    def block(self, marks: str, commands: list[str]) -> str:
        """Run the commands of a block, and return what the terminal shows, with its colours."""
        answer, expected = re.search(r"answer: (\w+)", marks), re.search(r"exit code: (\d+)", marks)
        self._call("before", marks, "")
        screen = []
        for command in commands:
            code, text = run(command, str(self.folder), self.environment, answer[1] if answer else "")
            wanted = int(expected[1]) if expected and command == commands[-1] else 0
            assert code == wanted, f"exit code {code} of: {command}\n{text}"
            lines = text.replace(str(self.folder), _SHOWN_FOLDER).splitlines()
            screen += [f"$ {command}", *(line for line in lines if not line.startswith("WARNING:absl:"))]
        self._call("after", marks, plain("\n".join(screen)))
        return "\n".join(screen)

    def _call(self, when: str, marks: str, shown: str) -> None:
        for name in re.findall(rf"{when}: (\w+)", marks):
            getattr(walk_checks, name)(self, shown)

    def edit(self, file: str, diff: str) -> None:
        """Replace the lines that begin with a minus, which are there once, by those with a plus."""
        old, new = (
            "\n".join(line[1:] for line in diff.splitlines() if line.startswith(sign)) + "\n" for sign in ("-", "+")
        )
        text = (self.folder / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has not once:\n{old}\n\n{text}"
        (self.folder / file).write_text(text.replace(old, new), encoding="utf-8")


def walked() -> tuple[str, dict[str, str]]:
    """Run the page; return it with today's output, and its pictures by their paths."""
    # A path as long as the one that the page shows.
    with tempfile.TemporaryDirectory(prefix="walk-", dir="/tmp") as folder, tempfile.TemporaryDirectory() as aside:
        return _walked(Walk(Path(folder), Path(aside)))


def _walked(walk: Walk) -> tuple[str, dict[str, str]]:
    pictures: dict[str, str] = {}

    def replacement(block: re.Match[str]) -> str:
        if block["language"] == "diff":
            file = re.search(r"<!-- edit: (\S+) -->", block["marks"])
            assert file, f"the page does not say which file this changes:\n{block[0]}"
            walk.edit(file[1], block["text"])
            return block[0]
        commands = [line[2:] for line in block["text"].splitlines() if line.startswith("$ ")]
        screen = walk.block(block["marks"], commands)
        if block["picture"]:
            pictures[block["picture"]] = picture(screen, "my-digits", Path(block["picture"]).stem)
        return block[0].replace(block["text"], plain(screen) + "\n")

    return _BLOCK.sub(replacement, PAGE.read_text(encoding="utf-8")), pictures


def stable(text: str) -> list[str]:
    """Return the words of a page or picture that no run changes."""
    return _UNSTABLE.sub("#", text).split()


def words_of(svg: str) -> list[str]:
    """Return the stable words that a picture shows, in its order of lines."""
    rows: dict[str, str] = {}
    for y, text in re.findall(r'<text [^>]* y="([\d.]+)" [^>]*>([^<]*)</text>', svg):
        rows[y] = rows.get(y, "") + html.unescape(text).replace("\xa0", " ")
    return stable("\n".join(rows.values()))


def differences(page: str, pictures: dict[str, str]) -> Iterator[str]:
    """Yield what of the files is not what this run has shown."""
    if stable(page) != stable(PAGE.read_text(encoding="utf-8")):
        yield f"{PAGE} shows other words than this run"
    for name, svg in pictures.items():
        file = PAGE.parent / name
        if not file.exists() or words_of(file.read_text(encoding="utf-8")) != words_of(svg):
            yield f"{file} shows other words than this run"


def main() -> int:
    """Run the page; write it, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page and its pictures")
    parser.add_argument("--check", action="store_true", help="exit with 1 where they show something else")
    arguments = parser.parse_args()
    page, pictures = walked()
    if arguments.write:
        PAGE.write_text(page, encoding="utf-8")
        for name, svg in pictures.items():
            (PAGE.parent / name).write_text(svg, encoding="utf-8")
    found = list(differences(page, pictures)) if arguments.check else []
    for line in found:
        print(f"{line}: run python -m tests.guide.walk --write, and look at the changes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
