"""What processes exchange over their devices, without other processes: every byte, in steps of any size."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import errors
from flax_ckpt_compat._restore import device_exchange


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 16, 17, 40])
def test_every_byte_is_exchanged(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of eight bytes, of several arrays each, of which another process has more or fewer."""
    monkeypatch.setattr(device_exchange, "_STEP_BYTES", 16)
    monkeypatch.setattr(device_exchange, "_LEAST_BYTES", 8)
    monkeypatch.setattr(device_exchange.jax, "process_index", lambda: 0)
    mine, theirs, given = np.arange(11, dtype=np.uint8), np.arange(nbytes, dtype=np.uint8) + 100, list[Any]()

    def gather(group: Any, own: Any) -> Any:
        start, size = sum(one.size for one in given), own.shape[1] - 4  # bytes of its checksum
        given.append(own[0, :size].copy())
        rows, part = np.zeros_like(own, shape=(2, size + 4)), theirs[start : start + size]
        rows[1, : part.size] = part
        return rows

    monkeypatch.setattr(device_exchange, "_all_gather", gather)
    monkeypatch.setattr(device_exchange, "_checksum", lambda data, seed: np.zeros(4, np.uint8))
    got = [np.zeros(min(3, nbytes), np.uint8), np.zeros(0, np.float32), np.zeros(max(0, nbytes - 3), np.uint8)]
    arrays = {0: [mine[:10], mine[10:]], 1: got}
    device_exchange._exchange_in((0, 1), arrays, device_exchange._Progress(), "x")
    assert np.concatenate([got[0], got[2]]).tolist() == theirs.tolist()
    assert np.concatenate(given)[:11].tolist() == mine.tolist()
    assert max(one.size for one in given) <= 8


@pytest.mark.parametrize(
    ("pause", "error"), [pytest.param(0.2, "", marks=pytest.mark.slow), (2.0, "took longer than 1 s")]
)
def test_each_step_has_its_time(pause: float, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, a step that ends in time is no reason to give up; one that does not is."""
    monkeypatch.setattr(device_exchange, "_STEP_BYTES", 16)
    monkeypatch.setattr(device_exchange, "_LEAST_BYTES", 8)
    monkeypatch.setattr(device_exchange.jax, "process_index", lambda: 0)
    monkeypatch.setattr(device_exchange, "_checksum", lambda data, seed: np.zeros(4, np.uint8))

    def gather(group: Any, own: Any) -> Any:
        time.sleep(pause)
        return np.zeros_like(own, shape=(2, own.shape[1]))

    monkeypatch.setattr(device_exchange, "_all_gather", gather)
    arrays = {(0, 1): {0: [np.zeros(64, np.uint8)], 1: [np.zeros(64, np.uint8)]}}
    with pytest.raises(errors.MultiprocessRestoreError, match=error) if error else contextlib.nullcontext():
        device_exchange.exchange("/p", arrays, 1.0, "x")


def test_there_is_no_thread_for_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on threads is an error of ours, which says that restores can do without the exchange."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(device_exchange.threading.Thread, "start", refuse)
    with pytest.raises(errors.MultiprocessRestoreError, match=r"can't start new thread.*read_once"):
        device_exchange.exchange("/p", {}, 1.0, "x")
