"""Large arrays in stores are many objects, each sent by a connection of its own; ``progress=`` reports their bytes."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import flax_ckpt_compat
from flax_ckpt_compat import Progress, restore, save
from flax_ckpt_compat._core import progress
from tests.support.layouts import assert_same
from tests.support.store_places import AnyBucket

MIB = 2**20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of Orbax, which takes it from the file
@pytest.mark.parametrize("placed", [False, True], ids=["numpy", "jax"])
def test_objects_of_one_large_array(placed: bool, bucket: AnyBucket, tmp_path: Path) -> None:
    """200 MiB are parts of at most 32 MiB, in objects of about 64 MiB; real Orbax reads a copy, and so do we."""
    array = np.arange(50 * MIB, dtype=np.int32).reshape(-1, 64)
    tree = {"w": jax.numpy.asarray(array) if placed else array, "b": np.ones(3)}
    flax_ckpt_compat.save(f"{bucket.url}/run/checkpoint_1", tree, format="orbax")
    sizes = [len(bucket.get(key)) for key in bucket.keys("run/") if "/d/" in key]
    assert sum(size > MIB for size in sizes) >= 3
    assert max(sizes) < (64 + 32) * MIB
    copy = bucket.download("run/checkpoint_1", tmp_path / "copy")
    np.testing.assert_array_equal(ocp.PyTreeCheckpointer().restore(copy)["w"], array)
    found = flax_ckpt_compat.restore(f"{bucket.url}/run", tree)
    np.testing.assert_array_equal(found["w"], array)
    assert flax_ckpt_compat.verify(f"{bucket.url}/run/checkpoint_1").ok


def test_a_disk_keeps_one_chunk(tmp_path: Path) -> None:
    """There, one array is one chunk up to 2 GiB, which is read and mapped in one piece."""
    flax_ckpt_compat.save(tmp_path / "a", {"w": np.zeros(70 * MIB, np.uint8)}, format="orbax")
    kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/a/", "path": "w/"}
    assert ts.open({"driver": "zarr", "kvstore": kvstore}).result().chunk_layout.read_chunk.shape == (70 * MIB,)


TREE = {"kernel": np.arange(5_000_000.0), "table": np.ones((1000, 1000), np.int8)}
NBYTES = 8 * 5_000_000 + 1000 * 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("any_bucket", "format"),
    [*itertools.product(["s3", "gs"], ["msgpack", "orbax"]), ("az", "orbax"), ("shelf", "orbax")],
    indirect=["any_bucket"],
)
def test_reports(any_bucket: AnyBucket, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports never fall and end with all bytes; half of a save is the local files, the other half their upload."""
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("flax_ckpt_compat.legacy.reader._WHOLE_OBJECT", 0)  # what is read on opening is not counted
    reports: list[Progress] = []
    path = f"{any_bucket.url}/c"
    for overwrite in (False, True):
        reports.clear()
        save(path, TREE, format=format, overwrite=overwrite, progress=reports.append)
        done = [one.done for one in reports]
        assert done == sorted(done)
        assert done[-1] == NBYTES > done[-2]
        assert [one.finished for one in reports].count(True) == 1
        assert {one.total for one in reports} == {NBYTES}
        halves = Counter(one.done > NBYTES // 2 for one in reports[:-1])
        assert halves[False] > 0
        if format == "orbax":  # of several files
            assert halves[True] > 0
    reports.clear()
    assert_same(restore(path, progress=reports.append), TREE)
    done = [one.done for one in reports]
    assert done == sorted(done)
    assert done[-1] == NBYTES > done[-2] > 0
