"""What is removed from a store, what is refused, and what is told of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from tests.support.s3 import Bucket
from tests.support.store_places import AnyBucket


def state(number: int) -> dict[str, Any]:
    """A tree that tells in each value which save it is from, and has other names in each."""
    return {"n": number, "w": np.full(700, number, np.float32), f"only_in_{number}": np.arange(5) + number}


def test_arrays_go_with_their_file(any_bucket: AnyBucket) -> None:
    """What several processes wrote beside an evicted msgpack file is removed with it, and no other folder."""
    root = f"{any_bucket.url}/run"
    flax_ckpt_compat.save(root, state(1), step=1, format="msgpack")
    for name in ("checkpoint_1_gda/w/.zarray", "checkpoint_1_gda/w/0", "checkpoint_9_gda/w/0"):
        any_bucket.put(f"run/{name}", b"{}")
    flax_ckpt_compat.save(root, state(2), step=2, format="msgpack", keep=1)
    assert sorted(any_bucket.keys("run/")) == ["run/checkpoint_2", "run/checkpoint_9_gda/w/0"]


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_removal_that_is_refused(format: Any, bucket: Bucket) -> None:
    """The save says that it is complete, and what is left over."""
    root = f"{bucket.url}/run"
    flax_ckpt_compat.save(root, state(1), step=1, format=format)
    with (
        bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "checkpoint_1" in path else ""),
        pytest.raises(errors.CleanupError, match=r"was saved.*checkpoint_1"),
    ):
        flax_ckpt_compat.save(root, state(2), step=2, format=format, keep=1)
    assert flax_ckpt_compat.restore(root)["n"] == 2


def test_a_marker_whose_removal_is_refused(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """The save is complete beside it, and evicts what it should; a warning says so once for a folder of checkpoints."""
    root, other = f"{bucket.url}/run", f"{bucket.url}/other"
    with bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "/_begun" in path else ""):
        for step in (1, 2):
            flax_ckpt_compat.save(root, state(step), step=step, format="orbax")
        flax_ckpt_compat.save(other, state(1), step=1, format="orbax")
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2
    assert all(
        f"Cannot remove the marker of a save that is complete at {one}/checkpoint_1: " in message
        and "_begun" in message
        and "do not permit this in the bucket" in message
        for one, message in zip((root, other), told, strict=True)
    )
    assert ours.available_steps(root) == [1, 2]
    assert flax_ckpt_compat.restore(root)["n"] == 2
    flax_ckpt_compat.save(root, state(3), step=3, format="orbax", keep=1)
    assert ours.available_steps(root) == [3]
    assert not [key for key in bucket.keys("run/") if "_begun" in key]


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_bucket_with_versions(format: Any, bucket: Bucket) -> None:
    """There a deletion hides the object, and a write hides the old one: neither comes back."""
    status = b'<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>Enabled</Status>'
    bucket._ask("PUT", "?versioning", status + b"</VersioningConfiguration>")
    root = f"{bucket.url}/run"
    for step in (1, 2, 3):
        flax_ckpt_compat.save(root, state(step), step=step, format=format, keep=2)
    flax_ckpt_compat.save(root, state(30), step=3, format=format, keep=2, overwrite=True)
    flax_ckpt_compat.save(root, state(20), step=2, format=format, overwrite=True)
    assert ours.available_steps(root) == [2, 3]
    assert [flax_ckpt_compat.restore(root, step=step)["n"] for step in (2, 3)] == [20, 30]
    assert not flax_ckpt_compat.verify(root).damaged
    assert not [key for key in bucket.keys("run/") if "checkpoint_1" in key]
