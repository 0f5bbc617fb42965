"""Large arrays in Orbax's format are many objects in a store, each sent by a connection of its own."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import flax_ckpt_compat
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
