"""T5X's checkpoints: a msgpack file with a TensorStore spec for each array, and the arrays beside it.

Flax's msgpack and TensorStore write them here, as t5x/checkpoints.py does (versions 0 to 3, 2021 to 2024).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization, traverse_util

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors

STATE = {
    "target": {
        "encoder": {"layers_0": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}},
        "token_embedder": {"embedding": np.arange(8, dtype=np.int32).reshape(4, 2)},
    },
    "state": {
        "step": np.int32(1000),
        "param_states": {"encoder": {"layers_0": {"kernel": {"v_row": np.ones(2, np.float32)}}}},
    },
}


def spec_of(folder: Path, name: str, array: np.ndarray[Any, Any], kvstore: dict[str, str]) -> dict[str, Any]:
    """Write an array as T5X does; return what its msgpack file has in the array's place."""
    metadata = {"shape": list(array.shape), "chunks": list(array.shape), "compressor": {"id": "gzip"}}
    spec = {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata}
    store = ts.open({**spec, "kvstore": {"driver": "file", "path": str(folder / name)}}, create=True).result()
    store.write(array).result()
    return {**spec, "kvstore": {"path": name, **kvstore}}


def write(folder: Path, state: Any, *, version: int = 3, key: str = "optimizer", **kvstore: str) -> None:
    """Write a checkpoint: arrays with axes beside the msgpack file, scalars in it."""
    folder.mkdir(parents=True)
    leaves = traverse_util.flatten_dict(state, sep=".")
    stored = {
        name: spec_of(folder, name, leaf, {"driver": "file", **kvstore}) if leaf.ndim else leaf
        for name, leaf in leaves.items()
    }
    tree = traverse_util.unflatten_dict(stored, sep=".")
    content = {"version": version, key: tree} if version else tree
    (folder / "checkpoint").write_bytes(serialization.to_bytes(content))


def assert_same(found: Any, expected: Any) -> None:
    """Two trees have the same names, dtypes and values."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("key", ["optimizer", "flax_optimizer"])
def test_versions(version: int, key: str, tmp_path: Path) -> None:
    """All versions have the state below one key."""
    write(tmp_path / "checkpoint_1000", STATE, version=version, key=key)
    found = flax_ckpt_compat.restore(tmp_path / "checkpoint_1000")
    assert found["version"] == version
    assert_same(found[key], STATE)


def test_the_oldest_version_is_the_state_alone(tmp_path: Path) -> None:
    """Version 0 has no number; its file is that of T5X all the same, which ``keep`` never counts."""
    for step in (1, 2):
        write(tmp_path / f"checkpoint_{step}", STATE, version=0)
    assert_same(checkpoints.restore_checkpoint(tmp_path, None), STATE)
    checkpoints.save_checkpoint(tmp_path, {"w": np.ones(3)}, step=3, keep=1)
    assert {"checkpoint_1", "checkpoint_2", "checkpoint_3"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "kvstore",
    [
        {"driver": "gfile"},
        {"driver": "gcs", "bucket": "t5x-dummy-bucket"},
        {"driver": "file", "path": "/cns/of/another/cell/checkpoint_1000.tmp-1646087643/{}/"},
        {"driver": "gcs", "bucket": "t5-data", "path": "pretrained_models/t5x/checkpoint_1000/{}"},
    ],
    ids=["gfile", "gcs", "absolute path", "path in a bucket"],
)
def test_arrays_lie_beside_the_file_wherever_it_was_written(kvstore: dict[str, str], tmp_path: Path) -> None:
    """What the specs say of the place of the save does not matter: the folder may have been copied."""
    write(tmp_path / "moved", STATE)
    content = serialization.msgpack_restore((tmp_path / "moved" / "checkpoint").read_bytes())
    leaves = traverse_util.flatten_dict(content["optimizer"], is_leaf=lambda _, node: "driver" in node)
    for spec in leaves.values():
        if isinstance(spec, dict):
            name = spec["kvstore"]["path"]
            spec["kvstore"] = {"path": name} | {key: value.format(name) for key, value in kvstore.items()}
    (tmp_path / "moved" / "checkpoint").write_bytes(serialization.to_bytes(content))
    assert_same(flax_ckpt_compat.restore(tmp_path / "moved")["optimizer"], STATE)


def test_the_path_may_be_that_of_the_array(tmp_path: Path) -> None:
    """For buckets T5X gave the path to the driver of the array, not to that of the store."""
    write(tmp_path / "moved", STATE)
    content = serialization.msgpack_restore((tmp_path / "moved" / "checkpoint").read_bytes())
    spec = content["optimizer"]["target"]["token_embedder"]["embedding"]
    spec["path"] = spec["kvstore"].pop("path")
    spec["kvstore"] = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
    (tmp_path / "moved" / "checkpoint").write_bytes(serialization.to_bytes(content))
    assert_same(flax_ckpt_compat.restore(tmp_path / "moved")["optimizer"], STATE)


def test_a_spec_that_leads_elsewhere_reads_nothing_there(tmp_path: Path) -> None:
    """Only the last name of a path counts, and it is looked up beside the file."""
    write(tmp_path / "it", STATE)
    (tmp_path / "it" / "target.token_embedder.embedding").rename(tmp_path / "outside")
    content = serialization.msgpack_restore((tmp_path / "it" / "checkpoint").read_bytes())
    for path in ("../outside", str(tmp_path / "outside"), ".."):
        content["optimizer"]["target"]["token_embedder"]["embedding"]["kvstore"]["path"] = path
        (tmp_path / "it" / "checkpoint").write_bytes(serialization.to_bytes(content))
        with pytest.raises(errors.CheckpointError):
            flax_ckpt_compat.restore(tmp_path / "it")
