"""Commands in a terminal of 80 columns: what they write, and what it shows."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence

WIDTH = 80
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\r\n]")


def raw(words: Sequence[str], cwd: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a program in a terminal; return the exit code, and all that it wrote."""
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
