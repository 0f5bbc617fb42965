"""Checkpoints within checkpoints of a store, and folders of checkpoints that are named like one."""

from __future__ import annotations

from typing import Any

import pytest

from flax_ckpt_compat import checkpoints, errors, restore, save
from tests.support.s3 import Bucket
from tests.support.saves import tree, use_flag
from tests.support.store_places import BY_TURNS, AnyBucket


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_none_is_lost_with_another(any_bucket: AnyBucket, format: Any) -> None:
    """As on a disk: see `tests.save.test_inside`."""
    root = f"{any_bucket.url}/run"
    save(root, tree(1), step=1, format="orbax")
    with pytest.raises(errors.InvalidCheckpointError, match=f"{root}/checkpoint_1 is a checkpoint.* such as {root}$"):
        save(f"{root}/checkpoint_1/sub", tree(2), step=2, format=format)
    save(f"{root}/checkpoint_5", tree(7), step=7, format=format)
    with (
        use_flag(format == "orbax"),
        pytest.raises(errors.InvalidCheckpointError, match="only checkpoints are replaced"),
    ):
        checkpoints.save_checkpoint(root, tree(5), 5, overwrite=True)
    assert restore(f"{root}/checkpoint_5")["n"] == 7


def test_the_innermost_is_named(bucket: Bucket) -> None:
    """A copy of a checkpoint in another one: what is saved below it would be removed with it first, as on a disk."""
    save(f"{bucket.url}/run/outer", tree(1), format="orbax")
    for key in bucket.keys("run/outer/"):
        bucket.put(key.replace("outer/", "outer/inner/", 1), bucket.get(key))
    with pytest.raises(errors.InvalidCheckpointError, match=f"{bucket.url}/run/outer/inner is a checkpoint"):
        save(f"{bucket.url}/run/outer/inner/sub", tree(2), step=2)


def test_a_bucket_and_a_marker_alone_are_no_checkpoints(bucket: Bucket) -> None:
    """A bucket is never replaced or evicted, whatever lies at its top; a lone marker holds nothing to lose."""
    save(f"{bucket.url}/run/outer", tree(1), format="orbax")
    for key in bucket.keys("run/outer/"):
        bucket.put(key.removeprefix("run/outer/"), bucket.get(key))
    bucket.put("marked/_CHECKPOINT_METADATA", b"{}")
    for folder in ("sub", "marked/sub"):
        save(f"{bucket.url}/{folder}", tree(7), step=7)
        assert restore(f"{bucket.url}/{folder}")["n"] == 7
