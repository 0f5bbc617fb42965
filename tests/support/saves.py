"""Saving with ours and with real Flax side by side, and fresh interpreters."""

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic, temporaries
from tests.support.interpreters import run_python as run_python
from tests.support.interpreters import start_python as start_python

Save = Callable[..., str]


@contextlib.contextmanager
def use_flag(value: bool | str) -> Iterator[None]:
    """Flax's flag with this value; legacy Flax's deprecation warning kept quiet."""
    before: Any = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", value)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Flax Checkpointing will soon", DeprecationWarning)
            yield
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for one example of hypothesis, where pytest's folders are: in memory by default."""
    return tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))


def names(directory: Path | str) -> list[str]:
    """Everything in a directory, temporaries too, sorted; nothing where it does not exist."""
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def tree(step: float = 0) -> dict[str, Any]:
    """A tiny tree that tells which save it is from."""
    return {"w": np.full(3, step, np.float32), "n": float(step)}


def save_by(manager: Any, directory: Path | str, tree: Any, step: Any, **options: Any) -> str:
    """Saves with ours, in the background where a manager is given, and waits for the end; the path."""
    path = checkpoints.save_checkpoint(directory, tree, step, async_manager=manager, **options)
    if manager is not None:
        manager.wait_previous_save()
    return path


# What programs begin with that save into a directory, their first argument, with Flax's flag, the second.
_SAVING = """
import atexit, contextlib, gc, os, signal, sys, threading, time
import flax, numpy as np
from flax.training import checkpoints as theirs
from flax_ckpt_compat import checkpoints, convert, errors, verify
from flax_ckpt_compat._core.local import atomic
folder, flag, *arguments = sys.argv[1:]
flax.config.update("flax_use_orbax_checkpointing", flag == "True")
signal.alarm(100)
"""


def run_saving(code: str, folder: Path | str, flag: bool, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Return what a program that saves wrote to stdout and stderr; see `run_python`."""
    return run_python(_SAVING + code, folder, flag, *arguments, PYTHONWARNINGS="ignore", **options)


def around(patch: pytest.MonkeyPatch, holder: Any, name: str, first: Any = None, then: Any = None) -> None:
    """Calls something with what each call of a function is given, first or when it has returned."""
    real = getattr(holder, name)

    def called(*arguments: Any, **options: Any) -> Any:
        if first:
            first(*arguments)
        found = real(*arguments, **options)
        if then:
            then(*arguments)
        return found

    patch.setattr(holder, name, called)


def before_publish(monkeypatch: pytest.MonkeyPatch, first: Callable[[str], Any]) -> None:
    """Calls something with the path before each checkpoint gets its name; what it raises fails the save."""
    around(monkeypatch, atomic, "publish", lambda _, final: first(final))


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, name: str, number: int = errno.EACCES) -> None:
    """Makes the system refuse a call about a path that ends so, as it does to other users than root."""
    real = getattr(os, call)

    def refusing(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, call, refusing)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Acts as a user without rights; only root can, and others have none that matter."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def dead_pid() -> int:
    """The id of a process of ours that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
        return process.pid


def saved_by_peer(directory: Path, tree: Any, *, real_orbax: bool = False) -> str:
    """A checkpoint as real Flax writes it in msgpack, or real Orbax."""
    if real_orbax:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(directory / "checkpoint_1", tree)
        return str(directory / "checkpoint_1")
    flax.config.update("flax_use_orbax_checkpointing", False)
    with pytest.warns(DeprecationWarning):
        return flax_checkpoints.save_checkpoint(directory, tree, 1)


def save_items(root: Path, step: int = 3, **items: Any) -> None:
    """Save a step of real Orbax's CheckpointManager: trees, and what is an argument of a handler for something else."""
    kinds = ocp.args.CheckpointArgs
    args = {name: item if isinstance(item, kinds) else ocp.args.PyTreeSave(item) for name, item in items.items()}
    with ocp.CheckpointManager(root) as manager:
        manager.save(step, args=ocp.args.Composite(**args))


def set_aside(path: Path) -> None:
    """Renames a checkpoint to what a writer leaves that died before it put its own in the place."""
    path.rename(temporaries.temporary_path(str(path), "old"))


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all files count as long unchanged."""
    monkeypatch.setattr(temporaries, "_STALE_SECONDS", -1.0)
