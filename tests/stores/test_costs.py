"""What saves to and restores from a store cost: memory, and requests."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.object_store import uploads
from tests.support.s3 import Bucket
from tests.support.saves import run_python

MIB = 2**20

UPLOAD = """
import sys, threading, time
from flax_ckpt_compat._core.object_store import uploads as store_uploads
from flax_ckpt_compat._core.object_store import client as stores

def heap():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

stores.write(sys.argv[2] + "/warm", b"x")
before = peak = heap()
ended = threading.Event()

def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, heap())

watcher = threading.Thread(target=watch)
watcher.start()
for new in (False, True):
    assert store_uploads.publish_file(sys.argv[1], f"{sys.argv[2]}/{new}", new=new)
store_uploads.upload_file(sys.argv[1], f"{sys.argv[2]}/unique")
assert store_uploads.publish_file(sys.argv[1], f"{sys.argv[2]}/unique", new=False)
ended.set()
watcher.join()
print((peak - before) // 1024)
"""


def test_an_upload_takes_no_memory_for_the_file(bucket: Bucket, tmp_path: Path) -> None:
    """It is sent from the page cache: the heap of a fresh process grows by a fraction of the file, and once a copy."""
    content = np.random.default_rng(0).bytes(16 * MIB)
    (tmp_path / "file").write_bytes(content)
    out, _ = run_python(UPLOAD, tmp_path / "file", bucket.url)
    assert int(out) < 8
    assert bucket.get("False") == bucket.get("True") == content


@pytest.mark.parametrize(
    ("number", "nbytes"), [(2000, 700), pytest.param(2000, 10_000, marks=pytest.mark.slow), (200, 100_000)]
)
def test_small_arrays_of_a_msgpack_file_take_few_requests(number: int, nbytes: int, bucket: Bucket) -> None:
    """A request for some MiB, and not one for each array, neither for the structure nor for the values."""
    tree = {f"a{i}": np.full(nbytes // 4, i, np.float32) for i in range(number)}
    url = flax_ckpt_compat.save(f"{bucket.url}/run/c", tree, format="msgpack")
    bucket.proxy.log.clear()
    restored = flax_ckpt_compat.restore(url, tree)
    assert len(bucket.proxy.log) < 40
    for name, array in tree.items():
        np.testing.assert_array_equal(restored[name], array)


def test_a_part_of_a_few_of_many_arrays(bucket: Bucket) -> None:
    """Leaves that are far apart are not read together."""
    tree = {f"a{i:02}": np.full(100_000, i, np.float64) for i in range(40)}
    url = flax_ckpt_compat.save(f"{bucket.url}/run/c", tree, format="msgpack")
    with flax_ckpt_compat.open_checkpoint(url) as opened:
        bucket.proxy.log.clear()
        found = opened.read(["a03", "a20", "a21"])
        assert sum(asked.sent for asked in bucket.proxy.log) < 3 * 800_000 + 10_000
    for name in ("a03", "a20", "a21"):
        np.testing.assert_array_equal(found[name], tree[name])


@pytest.mark.parametrize(("nbytes", "refused"), [(5 * 2**30, False), (5 * 2**30 + 1, True)])
def test_a_file_of_more_than_stores_take(nbytes: int, refused: bool, tmp_path: Path) -> None:
    """S3 takes 5 GiB at once (its documentation): more is an error that says what to do, before anything is read."""
    for name in ("file", "folder/d/array"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(nbytes)
    for name, remedy in (("file", "save in Orbax's format"), ("folder", "sharding of smaller")):
        with pytest.raises(errors.StorageError, match=remedy) if refused else nullcontext():
            uploads.check_sizes(str(tmp_path / name), "s3://bucket/run/c")


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_what_is_too_large_replaces_nothing(format: Any, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that was to be replaced is there as before; nothing was sent."""
    url = flax_ckpt_compat.save(f"{bucket.url}/run/c", {"a": 1}, format=format)
    monkeypatch.setattr(uploads, "MAX_OBJECT", MIB)
    before = bucket.keys("run/")
    with pytest.raises(errors.StorageError, match="more than the 1048576 that stores take at once"):
        flax_ckpt_compat.save(url, {"a": np.ones(2 * MIB, np.uint8)}, format=format, overwrite=True)
    assert bucket.keys("run/") == before
    assert flax_ckpt_compat.restore(url) == {"a": 1}
