"""Flax models of Hugging Face in several files. Flax's msgpack writes them here as transformers 4 does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import serialization, traverse_util

import flax_ckpt_compat
from flax_ckpt_compat import errors
from tests.support.layouts import assert_every_function_reads

PARAMS = {
    "encoder": {
        "layer": {str(n): {"kernel": np.full((2, 3), n, np.float32), "bias": np.arange(n + 1)} for n in range(3)},
        "norm": {"scale": np.ones(4, np.float16)},
    },
    "pooler": {"kernel": np.arange(6, dtype=np.int8).reshape(3, 2)},
}
INDEX = "flax_model.msgpack.index.json"


def write(folder: Path, params: Any, shards: int) -> Path:
    """Write a model as ``save_pretrained(max_shard_size=…)`` does; return the path of the index."""
    leaves = traverse_util.flatten_dict(params, sep="/")
    weight_map = {
        name: f"flax_model-{number * shards // len(leaves) + 1:05}-of-{shards:05}.msgpack"
        for number, name in enumerate(leaves)
    }
    for file in set(weight_map.values()):
        part = {name: leaf for name, leaf in leaves.items() if weight_map[name] == file}
        (folder / file).write_bytes(serialization.to_bytes(traverse_util.unflatten_dict(part, sep="/")))
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return folder / INDEX


@pytest.mark.parametrize("shards", [1, 3])
def test_every_function_reads_it(shards: int, tmp_path: Path) -> None:
    """The index is the path of the whole model."""
    assert_every_function_reads(write(tmp_path, PARAMS, shards), PARAMS, "flax shards", tmp_path / "converted")


def test_the_folder_names_the_index(tmp_path: Path) -> None:
    """A folder of such a model is refused with the file to pass instead."""
    write(tmp_path, PARAMS, 2)
    with pytest.raises(errors.CheckpointError, match=INDEX):
        flax_ckpt_compat.restore(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """Without one of its files the model is incomplete, and never restored in part."""
    index = write(tmp_path, PARAMS, 3)
    (tmp_path / "flax_model-00002-of-00003.msgpack").unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match=r"1 of 3 shards are missing.*00002-of-00003"):
        flax_ckpt_compat.restore(index)


@pytest.mark.parametrize("name", ["../outside.msgpack", "/etc/passwd.msgpack", "weights.bin", 7, ["a.msgpack"]])
def test_no_file_elsewhere_is_opened(name: Any, tmp_path: Path) -> None:
    """An index names msgpack files in its own folder, or is damaged."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(errors.CorruptCheckpointError, match=r"index\.json"):
        flax_ckpt_compat.restore(tmp_path / INDEX)


def test_one_leaf_in_two_files_is_damage(tmp_path: Path) -> None:
    """Which of the two counts is unknown, and neither is taken silently."""
    index = write(tmp_path, PARAMS, 2)
    (tmp_path / "flax_model-00002-of-00002.msgpack").write_bytes(serialization.to_bytes(PARAMS))
    with pytest.raises(errors.CorruptCheckpointError, match="in another shard, too"):
        flax_ckpt_compat.restore(index)


def test_what_transformers_wrote() -> None:
    """The files are those of ``FlaxBertModel.save_pretrained`` of transformers 4.57.1, as are the expected values."""
    folder = Path(__file__).parents[1] / "data" / "layouts" / "transformers_4.57.1"
    found = traverse_util.flatten_dict(flax_ckpt_compat.restore(folder / INDEX), sep="/")
    expected = json.loads((folder / "expected.json").read_text())
    assert {
        name: {
            "dtype": str(leaf.dtype),
            "shape": list(leaf.shape),
            "sha256": hashlib.sha256(leaf.tobytes()).hexdigest(),
        }
        for name, leaf in found.items()
    } == expected


def test_a_dict_of_numbers_in_two_files(tmp_path: Path) -> None:
    """The files' parts of one dict are joined, also where all of them are Python values."""
    params = {"config": {f"n{n:02}": n for n in range(40)}}
    index = write(tmp_path, params, 2)
    assert flax_ckpt_compat.restore(index) == params
