"""Commands in a terminal of 80 columns: what it shows, as text and as an SVG picture."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence

from rich.color import blend_rgb
from rich.color_triplet import ColorTriplet
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

WIDTH = 80
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\r\n]")
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
# In light and in dark: background, foreground, and the eight colours of terminals; bright ones are the same.
_COLORS = (
    ("#f6f8fa", "#161b22"),
    ("#1f2328", "#e6edf3"),
    ("#24292f", "#484f58"),
    ("#cf222e", "#ff7b72"),
    ("#116329", "#56d364"),
    ("#7a5200", "#e3b341"),
    ("#0550ae", "#79c0ff"),
    ("#8250df", "#d2a8ff"),
    ("#1b7c83", "#76e3ea"),
    ("#57606a", "#b1bac4"),
)


def run(command: str, cwd: str, environment: Mapping[str, str], answer: str = "") -> tuple[int, str]:
    """Run a command of bash in a terminal.

    Args:
        command: the command.
        cwd: its working directory.
        environment: its variables.
        answer: what is typed when it asks, with ``[y/N]``.

    Returns:
        The exit code, and the lines that the terminal shows at the end, with their colours.
    """
    code, written = raw(["bash", "-c", command], cwd, environment, answer)
    return code, shown(written)


def raw(words: Sequence[str], cwd: str, environment: Mapping[str, str], answer: str = "") -> tuple[int, str]:
    """Run a program in a terminal; see `run`. Return the exit code, and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    variables = {**environment, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with subprocess.Popen(
        words, cwd=cwd, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        written = b""
        while chunk := _read(ours):
            written += chunk
            if answer and written.endswith(b"[y/N]: "):
                os.write(ours, f"{answer}\n".encode())
    os.close(ours)
    return process.returncode, written.decode()


def _read(file: int) -> bytes:
    try:
        return os.read(file, 65536)
    except OSError:  # Linux: the last program has closed the terminal
        return b""


def shown(written: str) -> str:
    """Return what stays on the screen of what programs wrote: lines that were erased or written over are gone."""
    lines, row, fresh, at = [""], 0, False, 0

    def put(text: str) -> None:
        nonlocal fresh
        if text:
            lines[row] = text if fresh else lines[row] + text
            fresh = False

    for control in _CONTROL.finditer(written):
        put(written[at : control.start()])
        at = control.end()
        if control[0] == "\n":
            row += 1
            lines.extend([""] * (row + 1 - len(lines)))
            fresh = False
        elif control[0] == "\r":
            fresh = True
        elif control[2] == "A":
            row -= int(control[1] or 1)
        elif control[2] == "K":
            lines[row] = ""
        elif control[2] == "m":
            lines[row] = ("" if fresh else lines[row]) + control[0]
    put(written[at:])
    return "\n".join(lines).rstrip()


def plain(text: str) -> str:
    """Return text without its colours."""
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())


def picture(text: str, title: str, name: str) -> str:
    """Return an SVG picture of a terminal, which follows the reader's light or dark theme and loads nothing.

    Args:
        text: what the terminal shows, with colours.
        title: the title of its window.
        name: what its identifiers begin with.
    """
    # Blends of these with the first are below 200, so that all differ.
    marks = [ColorTriplet(1, 2, 200 + 5 * number if number else 0) for number in range(len(_COLORS))]
    colors = [(mark, *map(_color, pair)) for mark, pair in zip(marks, _COLORS, strict=True)]
    background, foreground, *others = [mark for mark, _, _ in colors]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), legacy_windows=False)
    console.print(Text.from_ansi(text), end="\n\n")  # the last row is clipped at its baseline
    svg = console.export_svg(title=title, theme=TerminalTheme(background, foreground, others), unique_id=name)
    # Dim text is a blend with the background.
    colors += [tuple(blend_rgb(one, back, 0.4) for one, back in zip(color, colors[0], strict=True)) for color in colors]
    variables = {mark.hex: f"--c{number}" for number, (mark, _, _) in enumerate(colors)}
    used = {mark: variable for mark, variable in variables.items() if mark in svg}
    for mark, variable in used.items():
        svg = svg.replace(f'fill="{mark}"', f'style="fill: var({variable})"').replace(mark, f"var({variable})")
    light, dark = (
        " ".join(f"{variables[row[0].hex]}: {row[column].hex};" for row in colors if row[0].hex in used)
        for column in (1, 2)
    )
    rules = f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    return re.sub(r"[ \t]+$", "", _FONT_FACE.sub("", svg).replace("<style>", f"<style>\n    {rules}", 1), flags=re.M)


def _color(value: str) -> ColorTriplet:
    return ColorTriplet(*bytes.fromhex(value[1:]))
