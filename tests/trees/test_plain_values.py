"""Python values of subclasses and buffers: both formats save the plain value, and say so once."""

from __future__ import annotations

import enum
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, restore
from flax_ckpt_compat._save import snapshot


class Mode(enum.IntEnum):
    EVAL = 3


class Name(enum.StrEnum):
    BEST = "best"


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Number(float):
    def __float__(self) -> float:
        return 7.0


class Whole(int):
    def __int__(self) -> int:
        return 7


class Complex(complex):
    def __complex__(self) -> complex:
        return 7j


class Raw(bytes):
    def __bytes__(self) -> bytes:
        return b"seven"


VALUES: list[tuple[Any, Any]] = [
    (Mode.EVAL, 3),
    (Name.BEST, "best"),
    (Text("q"), "q"),
    (Number(-0.0), -0.0),
    (Whole(4), 4),
    (Complex(1 - 2j), 1 - 2j),
    (Raw(b"\0x"), b"\0x"),
    (bytearray(b"ab"), b"ab"),
    (memoryview(b"abcd")[::2], b"ac"),
]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("value", "plain"), VALUES, ids=[type(value).__name__ for value, _ in VALUES])
def test_the_plain_value_is_saved(flag: bool, tmp_path: Path, value: Any, plain: Any, background: bool) -> None:
    """The base type's own value, whatever the subclass would convert to."""
    manager = checkpoints.AsyncManager() if background else None
    checkpoints.save_checkpoint(tmp_path, {"a": value, "b": [value, value]}, 1, async_manager=manager)
    if manager is not None:
        manager.wait_previous_save()
    restored = checkpoints.restore_checkpoint(tmp_path, None)
    again = restore(tmp_path, {"a": value, "b": [value, value]})
    for found in (restored["a"], restored["b"]["0"], restored["b"]["1"], again["a"], *again["b"]):
        assert type(found) is type(plain) and found == plain
        assert not isinstance(plain, float) or math.copysign(1, found) == math.copysign(1, plain)


def test_a_buffer_has_the_values_of_the_call(flag: bool, tmp_path: Path) -> None:
    """What is mutated after the call does not reach a background save."""
    manager, buffer = checkpoints.AsyncManager(), bytearray(b"then")
    checkpoints.save_checkpoint(tmp_path, {"a": buffer}, 1, async_manager=manager)
    buffer[:] = b"now!"
    manager.wait_previous_save()
    assert checkpoints.restore_checkpoint(tmp_path, None)["a"] == b"then"


def test_it_is_told_once_for_each_type(
    flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact types and numpy's scalars, which are also Python numbers, are not mentioned."""
    monkeypatch.setattr(snapshot, "_warned", set())
    caplog.set_level(logging.WARNING)
    tree = {"mode": Mode.EVAL, "again": Mode.EVAL, "scalar": np.float64(1), "text": np.str_("x"), "n": True}
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, tree, step)
    (record,) = caplog.records
    assert record.getMessage().startswith("mode: a ") and "Mode is saved as the plain int 3" in record.getMessage()
    restored = checkpoints.restore_checkpoint(tmp_path, tree)
    assert type(restored["scalar"]) is np.float64 and type(restored["text"]) is np.str_ and restored["n"] is True
