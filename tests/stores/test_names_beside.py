"""Objects of other programs and late ones beside a checkpoint: a folder's own object, and a folder of a file's name."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from flax_ckpt_compat.legacy import BACKEND

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.backend import ProcessInfo, ProcessSave, WriteOptions
from flax_ckpt_compat._core.object_store.multiprocess import Upload
from tests.support.gs import GsBucket
from tests.support.saves import tree
from tests.support.store_places import BY_TURNS, AnyBucket
from tests.support.trees import to_branches

STORES = pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])


def test_no_folder_of_arrays_where_there_are_none(gs_bucket: GsBucket) -> None:
    """Several processes whose arrays are all whole leave nothing beside the msgpack file that process 0 uploads."""
    marker = f"_begun.1795326311.{'0' * 32}"
    upload = Upload(f"{gs_bucket.url}/c", f"{gs_bucket.url}/c_gda", marker)
    prepared = BACKEND.prepare(to_branches({"n": 3, "w": np.ones(5)}), ProcessInfo(0, 2))
    BACKEND.finish_multiprocess(ProcessSave("c", prepared, WriteOptions(), ProcessInfo(0, 2), upload))
    assert gs_bucket.keys() == []


@STORES
def test_objects_for_folders(any_bucket: AnyBucket, format: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Consoles, Hadoop and gcsfuse create them: they hide no checkpoint, and none is left of an evicted one."""
    root = f"{any_bucket.url}/run"
    for name in ("", "checkpoint_1/", "checkpoint_2/", "checkpoint_2/d/", "checkpoint_3/"):
        any_bucket.put(f"run/{name}", b"")
    for step in (1, 2):
        flax_ckpt_compat.save(root, tree(step), step=step, format=format, overwrite=True)
        assert checkpoints.available_steps(root) == list(range(1, step + 1))
        assert checkpoints.restore_checkpoint(root, None)["n"] == step
    flax_ckpt_compat.save(root, tree(3), step=3, format=format, keep=1)
    assert checkpoints.available_steps(root) == [3]
    assert "incomplete" not in caplog.text


@pytest.mark.parametrize("name", ["d/" + "1" * 32, "notes.txt"])
def test_a_folder_of_the_name_of_a_msgpack_checkpoint(any_bucket: AnyBucket, name: str) -> None:
    """A data file of a dead writer that the store wrote late, or a user's file, does not hide it."""
    root = f"{any_bucket.url}/run"
    for step in (1, 2):
        flax_ckpt_compat.save(root, tree(step), step=step, format="msgpack")
    any_bucket.put(f"run/checkpoint_2/{name}", b"late")
    assert checkpoints.available_steps(root) == [1, 2]
    assert checkpoints.latest_checkpoint(root) == f"{root}/checkpoint_2"
    assert checkpoints.restore_checkpoint(root, None)["n"] == 2
    flax_ckpt_compat.save(root, tree(3), step=3, format="msgpack", keep=1)
    assert any_bucket.keys("run/") == ["run/checkpoint_3"]


@STORES
def test_what_a_store_does_not_let_go(any_bucket: AnyBucket, format: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where deletions are refused, as by a retention policy, what a dead writer left a day ago stops no save."""
    root = f"{any_bucket.url}/run"
    any_bucket.put(f"run/checkpoint_1/_begun.5.{'1' * 32}", b"")
    any_bucket.put("run/checkpoint_1/d/x", b"")
    with (
        any_bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "checkpoint_1" in path else ""),
        caplog.at_level(logging.WARNING),
    ):
        flax_ckpt_compat.save(root, tree(2), step=2, format=format)
    assert f"Cannot remove what an interrupted save left at {root}/checkpoint_1" in caplog.text
    assert checkpoints.restore_checkpoint(root, None)["n"] == 2
