"""Many requests that share a slow network: they take as long as all their bytes, and are not given up before."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flax_ckpt_compat._core.object_store import client, retrying, uploads
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat.errors import StorageError
from tests.support.s3 import Bucket

_FILES, _BYTES = 8, 2**20
_RATE = 4 * 2**20  # bytes/s at least: 1/4 s for a file, two seconds for all
_SECONDS = 0.1
_TAKEN = 0.5  # s; longer than a file alone may take, and much shorter than all of them
names = [f"f{number}" for number in range(_FILES)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of files, whose uploads have a short time."""
    monkeypatch.setattr(retrying, "_TIMEOUT", _SECONDS)
    monkeypatch.setattr(retrying, "_MIN_RATE", _RATE)
    monkeypatch.setattr(retrying, "_FIRST_PAUSE", 0.01)
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * (_BYTES // 2))
    yield tmp_path
    retrying.renew_context()


def sent(bucket: Bucket) -> Counter[str]:
    """How often each file was sent."""
    return Counter(asked.path.rpartition("/")[2] for asked in bucket.proxy.log if asked.method == "PUT")


def test_files_at_once(bucket: Bucket, folder: Path) -> None:
    """All of them end when their time alone is over: each is sent once. The same holds for ranges that are read."""

    def slow(method: str, path: str) -> str:
        time.sleep(_TAKEN)
        return ""

    assert _SECONDS + _BYTES / _RATE < _TAKEN < _SECONDS + _FILES * _BYTES / _RATE
    with bucket.proxy.failing(slow):
        uploads.upload(str(folder), f"{bucket.url}/run", names, {})
    assert sent(bucket) == Counter(names)
    bucket.proxy.log.clear()
    found = dict.fromkeys(names, b"")

    def read(name: str) -> None:
        found[name] = client.read_range(f"{bucket.url}/run/{name}", 0, _BYTES)

    with bucket.proxy.failing(slow):
        in_parallel(read, names)
    assert found == {name: (folder / name).read_bytes() for name in names}
    assert len(bucket.proxy.log) == _FILES


def test_one_that_hangs_among_others(bucket: Bucket, folder: Path) -> None:
    """It is sent again as soon as those beside it have ended."""
    left = ["stall"]
    with bucket.proxy.failing(lambda method, path: left.pop() if path.endswith("f3") and left else ""):
        uploads.upload(str(folder), f"{bucket.url}/run", names, {})
    assert sent(bucket).keys() == set(names)  # the one that hangs is logged when it ends
    assert [bucket.get(f"run/{name}")[:2] for name in names] == [name.encode() for name in names]


@pytest.mark.slow
def test_a_network_that_is_dead(bucket: Bucket, folder: Path) -> None:
    """It is given up after the time of all bytes, and hardly anything is sent a second time."""
    tried = []

    def stalled(method: str, path: str) -> str:
        tried.append(path.rpartition("/")[2])
        return "stall"

    with bucket.proxy.failing(stalled), pytest.raises(StorageError, match="did not answer in time"):
        uploads.upload(str(folder), f"{bucket.url}/run", names, {})
    assert set(tried) == set(names)
    assert len(tried) < 2 * _FILES  # and not four times as many
