"""Saving and restoring through the msgpack backend, from plain dicts to plain dicts."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flax_ckpt_compat.legacy import BACKEND

from flax_ckpt_compat._core.backend import WriteOptions
from tests.support.trees import read_whole, to_branches

restore = functools.partial(read_whole, BACKEND)


@pytest.fixture
def in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads small files as if they were large, not whole when it is opened."""
    monkeypatch.setattr("flax_ckpt_compat.legacy.reader._WHOLE", 0)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Fresh file names; session-wide, because hypothesis runs a test many times."""
    folder = tmp_path_factory.mktemp("msgpack")
    numbers = itertools.count()
    return lambda: folder / f"checkpoint_{next(numbers)}"


@pytest.fixture(scope="session")
def save(scratch: Callable[[], Path]) -> Callable[[Any], Path]:
    """Writes a plain dict of leaves to a fresh file."""

    def write(tree: Any) -> Path:
        path, branches = scratch(), to_branches(tree)
        BACKEND.write(str(path), BACKEND.prepare(branches), WriteOptions())
        return path

    return write


@pytest.fixture(scope="session")
def load_bytes(scratch: Callable[[], Path]) -> Callable[[bytes], Any]:
    """Reads a document back as plain dicts and lists."""

    def read(document: bytes) -> Any:
        path = scratch()
        path.write_bytes(document)
        try:
            return restore(path)
        finally:
            path.unlink()

    return read
