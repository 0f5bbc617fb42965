"""Layouts of other programs that are read and never written: EasyLM's streams and Hugging Face's shards.

Flax and msgpack write them here as those programs do; tests/data/layouts has what transformers wrote."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization, traverse_util

import flax_ckpt_compat
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.backend import ArraySlice
from tests.support.layouts import assert_every_function_reads, assert_same

WRITTEN = Path(__file__).parents[1] / "data" / "layouts"


EASYLM = {
    "step": np.int32(80000),
    "params": {
        "params": {
            "wte": {"embedding": np.arange(12, dtype=np.float32).reshape(4, 3)},
            "h": {str(n): {"kernel": np.full((3, 3), n, ml_dtypes.bfloat16)} for n in range(12)},
            "large": np.arange(30_000, dtype=np.float32).reshape(300, 100),
        }
    },
}


def stream(state: Any) -> bytes:
    """What EasyLM writes: a pair of key path and bytes for each leaf."""
    packer = msgpack.Packer()
    leaves = traverse_util.flatten_dict(serialization.to_state_dict(state))
    return b"".join(packer.pack((key, serialization.to_bytes(leaf))) for key, leaf in leaves.items())


SHARDED = {
    "encoder": {
        "layer": {str(n): {"kernel": np.full((2, 3), n, np.float32), "bias": np.arange(n + 1)} for n in range(3)},
        "norm": {"scale": np.ones(4, np.float16)},
    },
    "pooler": {"kernel": np.arange(6, dtype=np.int8).reshape(3, 2)},
}
INDEX = "flax_model.msgpack.index.json"


def write_shards(folder: Path, params: Any, shards: int) -> Path:
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


def test_every_function_reads_a_stream(tmp_path: Path) -> None:
    """By its own path."""
    (tmp_path / "it-7").write_bytes(stream(EASYLM))
    assert_every_function_reads(tmp_path / "it-7", EASYLM, "stream", tmp_path / "converted")


@pytest.mark.parametrize("shards", [1, 3])
def test_every_function_reads_shards(shards: int, tmp_path: Path) -> None:
    """The index is the path of the whole model; parts of one dict are joined, also of Python values alone."""
    assert_every_function_reads(write_shards(tmp_path, SHARDED, shards), SHARDED, "flax shards", tmp_path / "converted")
    numbers = {"config": {f"n{n:02}": n for n in range(40)}}
    assert flax_ckpt_compat.restore(write_shards(tmp_path, numbers, shards)) == numbers


def test_one_entry(tmp_path: Path) -> None:
    """A stream of one leaf is a stream, also if its key is one name."""
    (tmp_path / "a").write_bytes(stream({"w": np.ones(3)}))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a"), {"w": np.ones(3)})
    (tmp_path / "b").write_bytes(msgpack.packb(("w", serialization.to_bytes(np.ones(3)))))
    assert_same(flax_ckpt_compat.restore(tmp_path / "b"), {"w": np.ones(3)})


def test_arrays_above_a_gibibyte_are_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flax splits large arrays into pieces, here too."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1000)
    (tmp_path / "a").write_bytes(stream(EASYLM))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a"), EASYLM)


def test_slices_are_read_alone(tmp_path: Path) -> None:
    """A slice of one leaf is what numpy cuts out."""
    (tmp_path / "a").write_bytes(stream(EASYLM))
    with flax_ckpt_compat.open_checkpoint(tmp_path / "a") as view:
        handle = view.leaves()["params/params/large"]
        (found,) = handle.reader.read([ArraySlice(handle, (slice(17, 19), slice(3, 5)))])
    np.testing.assert_array_equal(found, EASYLM["params"]["params"]["large"][17:19, 3:5])


GOOD = stream({"w": np.ones(3), "v": np.ones(2)})


@pytest.mark.parametrize(
    "damaged",
    [
        GOOD[:-1],
        GOOD[: len(GOOD) // 2 + 5],
        GOOD + b"\x92",
        GOOD + b"\x00",
        GOOD + GOOD[: len(GOOD) // 2 + 8],
        msgpack.packb((("w",), serialization.to_bytes(np.ones(3)) + b"\xc0")),
        msgpack.packb((("w",), b"")),
        msgpack.packb((("w",), b"\xc1")),
        msgpack.packb((("w",), b"\x81\xa1a\xc1")),
        GOOD + msgpack.packb((("w", "x"), serialization.to_bytes(np.ones(3)))),
        GOOD + msgpack.packb((("x", 3), serialization.to_bytes(np.ones(3)))),
        GOOD + msgpack.packb((["x"] * 2000, serialization.to_bytes(np.ones(3)))),
        GOOD + b"\x92\x91\xa1x\xc6\xff\xff\xff\xff",
        GOOD + b"\x92\xdc\xff\xff",
    ],
    ids=str,
)
def test_damaged_streams(damaged: bytes, tmp_path: Path) -> None:
    """What ends early, says one thing twice or is no stream to its end is an error that names the file."""
    (tmp_path / "stream").write_bytes(damaged)
    with pytest.raises(errors.CorruptCheckpointError, match="stream"):
        flax_ckpt_compat.restore(tmp_path / "stream")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """Without one of its files the model is incomplete, and never restored in part."""
    index = write_shards(tmp_path, SHARDED, 3)
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
    index = write_shards(tmp_path, SHARDED, 2)
    (tmp_path / "flax_model-00002-of-00002.msgpack").write_bytes(serialization.to_bytes(SHARDED))
    with pytest.raises(errors.CorruptCheckpointError, match="in another shard, too"):
        flax_ckpt_compat.restore(index)


def test_what_transformers_wrote() -> None:
    """The files are those of ``FlaxBertModel.save_pretrained`` of transformers 4.57.1, as are the expected values."""
    folder = WRITTEN / "transformers_4.57.1"
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
