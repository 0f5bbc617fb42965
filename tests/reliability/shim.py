"""Compile the shim that is preloaded into the processes of the harness, and command it."""

import ctypes
import enum
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support import interpreters

_HEADER = Path(__file__).with_name("preload.h")
_SOURCES = [Path(__file__).with_name(name) for name in ("shim.c", "reads.c")]  # the first sees calls first


class Action(enum.IntEnum):
    """What the shim does at the n-th call; the values are those in shim.c."""

    PASS = 0
    KILL = 1
    FAIL = 2
    KILL_HALF = 3  # in the middle of a write; a call that writes nothing is killed before it
    FULL = 4  # from there on nothing finds space; a write still gets half


def why_not() -> str:
    """Return why the shim cannot be used on this machine; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "the shim is for Linux"
    return "" if _compiler() else "no C compiler (cc) to build the shim"


def holds_attributes(folder: str) -> bool:
    """Return whether one may write into a folder, and its files may have the attributes that hold checksums."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.setxattr(file.fileno(), "user.reliability", b"")
    except (OSError, AttributeError):
        return False
    return True


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc")


@functools.cache
def _library(source: Path) -> str:
    """Compile a library, once per version of its source, and return its path."""
    digest = hashlib.sha256(source.read_bytes() + _HEADER.read_bytes()).hexdigest()[:12]
    built = Path(tempfile.gettempdir(), f"reliability-{source.stem}-{os.getuid()}-{digest}.so")
    if not built.exists():
        part = f"{built}.{os.getpid()}"
        options = ["-O1", "-shared", "-fPIC", "-Wall", "-o", part, str(source), "-ldl", "-lpthread"]
        subprocess.run([str(_compiler()), *options], check=True)
        os.replace(part, built)
    return str(built)


def environment() -> dict[str, str]:
    """Return the variables of a process that the shim is loaded into."""
    # The interpreter that pytest's programs are forked from runs without it.
    inherited = {name: value for name, value in os.environ.items() if name != interpreters.ADDRESS}
    libraries = ":".join(map(_library, _SOURCES))
    return {**inherited, "LD_PRELOAD": libraries, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}


def is_loaded() -> bool:
    """Return whether this process runs with the shim."""
    return hasattr(ctypes.CDLL(None), "shim_arm")


@functools.cache
def _loaded() -> Any:
    shim = ctypes.CDLL(None)
    shim.shim_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
    shim.shim_disarm.restype = shim.reads_disarm.restype = ctypes.c_long
    shim.reads_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    return shim


def arm(directory: str, at: int = 0, action: Action = Action.PASS, errno: int = 0, record: str = "") -> None:
    """Watch the changes below a directory from now on; act at the ``at``-th, and append all of them to ``record``."""
    _loaded().shim_arm(os.fsencode(os.path.realpath(directory)), at, int(action), errno, os.fsencode(record))


def disarm() -> int:
    """Stop; return how many calls there were."""
    return int(_loaded().shim_disarm())


def arm_reads(directory: str, at: int = 0, errno: int = 0) -> None:
    """Watch what is read below a directory from now on: files, names and their status; let the ``at``-th call fail."""
    _loaded().reads_arm(os.fsencode(os.path.realpath(directory)), at, errno)


def disarm_reads() -> int:
    """Stop; return how many calls there were."""
    return int(_loaded().reads_disarm())


def mark(text: str) -> None:
    """Write a mark into the record."""
    _loaded().shim_mark(text.encode())
