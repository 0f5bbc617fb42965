"""Checkpoints that several processes of real Flax wrote, in stores."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.dtypes import dtype_from_name
from tests.support import s3
from tests.support.s3 import Bucket

GDA = Path(__file__).parents[1] / "data" / "gda"
CASES = [("two_processes_leaf", "checkpoint_7"), ("two_processes_tree", "checkpoint_3")]


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_arrays_beside_a_msgpack_file(folder: str, name: str, bucket: Bucket) -> None:
    """One process reads from a store what two processes of real Flax wrote, in the folder beside the file."""
    root = bucket.upload(GDA / folder, folder)
    with bucket.proxy.failing(s3.sometimes(0.1, seed=3)):
        found = ours.restore_checkpoint(f"{root}/{name}", None)
    expected = json.loads((GDA / folder / "expected.json").read_text())
    leaves = {"/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    assert leaves.keys() == expected.keys()
    for path, saved in expected.items():
        if saved["kind"] == "py":
            assert leaves[path] == saved["value"]
        else:
            array = np.frombuffer(base64.b64decode(saved["data"]), dtype_from_name(saved["dtype"]))
            np.testing.assert_array_equal(leaves[path].reshape(-1).view(np.uint8), array.view(np.uint8))
            assert (leaves[path].dtype, leaves[path].shape) == (array.dtype, tuple(saved["shape"]))


def test_arrays_that_are_lost(bucket: Bucket) -> None:
    """A chunk, the description of an array and the whole folder are missed by name; no value is made up."""
    folder, name = CASES[1]
    root = bucket.upload(GDA / folder, folder)
    keys = bucket.keys(f"{folder}/{name}_gda/")
    for lost in (next(key for key in keys if not key.endswith(".zarray")), next(key for key in keys if "." in key)):
        content = bucket.get(lost)
        bucket.delete(lost)
        lost_parts = errors.CorruptCheckpointError, errors.IncompleteCheckpointError
        with pytest.raises(lost_parts, match=f"{name}_gda"):
            ours.restore_checkpoint(f"{root}/{name}", None)
        bucket.put(lost, content)
    ours.restore_checkpoint(f"{root}/{name}", None)
