"""safetensors files, and Hugging Face's shards of them, as sources of restores and conversions."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from tests.support.layouts import assert_same

TENSORS = {
    "model.layers.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.layers.1.weight": np.arange(12, dtype=np.float16).reshape(4, 3),
    "model.norm": np.array(2.5),
    "ids": np.arange(5, dtype=np.int8),
    "empty": np.zeros((0, 3), np.int64),
}
NESTED = {
    "model": {
        "layers": {
            "0": {"weight": TENSORS["model.layers.0.weight"]},
            "1": {"weight": TENSORS["model.layers.1.weight"]},
        },
        "norm": TENSORS["model.norm"],
    },
    "ids": TENSORS["ids"],
    "empty": TENSORS["empty"],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that the real library wrote."""
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Two shards, and the index that says which tensor is in which."""
    names = list(TENSORS)
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for name, tensors in files.items():
        safetensors.numpy.save_file({tensor: TENSORS[tensor] for tensor in tensors}, tmp_path / name)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    return tmp_path / "model.safetensors.index.json"


@pytest.mark.parametrize("source", ["file", "index"])
def test_every_function_reads_it(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Both restores, with a target and without, the plan, the open checkpoint and conversions."""
    path = request.getfixturevalue(source)
    assert_same(flax_ckpt_compat.restore(path), NESTED)
    assert_same(checkpoints.restore_checkpoint(path, jax.tree.map(np.zeros_like, NESTED)), NESTED)
    found = flax_ckpt_compat.restore(path)
    found["ids"][:] = 0  # it owns its memory
    assert_same(flax_ckpt_compat.restore(path), NESTED)
    assert flax_ckpt_compat.plan_restore(path, NESTED).raises is None
    with flax_ckpt_compat.open_checkpoint(path) as view:
        assert (view.format, view.leaves()["model/norm"].shape) == ("safetensors", ())
    flax_ckpt_compat.convert(path, tmp_path / "file", "msgpack")
    assert_same(serialization.msgpack_restore((tmp_path / "file").read_bytes()), NESTED)
    flax_ckpt_compat.convert(path, tmp_path / "steps", "manager", step=3)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        assert_same(manager.restore(3, args=ocp.args.StandardRestore())["model"]["norm"], TENSORS["model.norm"])
        assert_same(manager.restore(3, args=ocp.args.StandardRestore())["empty"], TENSORS["empty"])


def test_parts_of_a_large_array(tmp_path: Path) -> None:
    """A sharded restore reads its rows and columns."""
    array = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    safetensors.numpy.save_file({"w": array}, tmp_path / "a.safetensors")
    from flax_ckpt_compat._core.backend import ArraySlice

    with flax_ckpt_compat.open_checkpoint(tmp_path / "a.safetensors") as view:
        handle = view.leaves()["w"]
        (part,) = handle.reader.read([ArraySlice(handle, (slice(3, 7), slice(2, 30)))])
    assert_same(part, array[3:7, 2:30])


@pytest.mark.parametrize("name", ["saved", "saved.safetensors", "checkpoint_3"])
def test_what_convert_writes_is_read_back(tmp_path: Path, name: str) -> None:
    """All leaves with their types, under any name; lists are dicts of 0, 1, … as in msgpack files."""
    tree = {
        "w": np.ones((2, 3), ml_dtypes.bfloat16),
        "a.b": {"": np.arange(2), "c.": {"d": np.array(1.0)}},
        "numbers": {"i": 3, "f": 0.5, "b": True, "t": "text", "none": None, "nan": float("inf")},
        "empty": {"dict": {}},
        "list": [np.ones(1), np.zeros(2)],
        "8": np.ones(2, ml_dtypes.float8_e4m3fn),
        "z": np.ones(2, np.complex64),
    }
    flax_ckpt_compat.save(tmp_path / "source", tree, format="orbax")
    flax_ckpt_compat.convert(tmp_path / "source", tmp_path / name, "safetensors")
    expected = {**tree, "list": {"0": np.ones(1), "1": np.zeros(2)}}
    assert_same(flax_ckpt_compat.restore(tmp_path / name), expected)
    assert len(safetensors.deserialize((tmp_path / name).read_bytes())) == 7
    flax_ckpt_compat.convert(tmp_path / name, tmp_path / "again", "orbax")
    assert_same(flax_ckpt_compat.restore(tmp_path / "again"), tree)


def test_a_bare_array(tmp_path: Path) -> None:
    """The whole tree may be one array."""
    flax_ckpt_compat.save(tmp_path / "source", np.arange(3), format="msgpack")
    flax_ckpt_compat.convert(tmp_path / "source", tmp_path / "file", "safetensors")
    assert_same(flax_ckpt_compat.restore(tmp_path / "file"), np.arange(3))


def test_names_that_are_no_key_paths(tmp_path: Path) -> None:
    """A tensor "a" beside "a.b" cannot be a dict, so all keep their names."""
    tensors = {"a": np.ones(1), "a.b": np.zeros(2), "c.d": np.zeros(3)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    assert_same(flax_ckpt_compat.restore(tmp_path / "x.safetensors"), tensors)


def test_it_is_no_checkpoint_of_a_directory(tmp_path: Path) -> None:
    """An export beside checkpoints is never the latest, and a save leaves it alone."""
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, {"a": np.full(2, step)}, step, keep=9)
    safetensors.numpy.save_file(TENSORS, tmp_path / "checkpoint_9.safetensors")
    safetensors.numpy.save_file(TENSORS, tmp_path / "checkpoint_9")
    found = flax_ckpt_compat.convert(tmp_path, tmp_path.with_name("converted"), "manager", dry_run=True)
    assert [Path(one.source).name for one in found] == ["checkpoint_1", "checkpoint_2"]
    with pytest.raises(errors.UnrecognizedFormatError, match=r"if its name ends in \.safetensors"):
        flax_ckpt_compat.restore(tmp_path / "checkpoint_9")
    checkpoints.save_checkpoint(tmp_path, {"a": np.zeros(2)}, 10, keep=1)
    assert {path.name for path in tmp_path.iterdir()} >= {"checkpoint_9", "checkpoint_9.safetensors", "checkpoint_10"}


def header(content: Any, data: bytes = b"") -> bytes:
    """A file with this header."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changed: Any) -> dict[str, Any]:
    """The entry of two numbers."""
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changed}


@pytest.mark.parametrize(
    "content",
    [
        header(entry(), b"1234567"),
        header(entry(data_offsets=[0, 4]), b"12345678"),
        header(entry(data_offsets=[8, 0]), b"12345678"),
        header(entry(data_offsets=[-8, 0]), b"12345678"),
        header(entry(shape=[-2]), b"12345678"),
        header(entry(shape=[2**62, 4]), b"12345678"),
        header(entry(shape="2"), b"12345678"),
        header({"a": 3}),
        header({"a": {}}),
        header(b"{" + b'"a":{' * 100_000 + b"}"),
        header({"__metadata__": {"flax_ckpt_compat": "[[1]]"}}),
        header({"__metadata__": {"flax_ckpt_compat": "["}}),
        header({"__metadata__": {"flax_ckpt_compat": '[[["a"], [1]]]'}}),
        header({"__metadata__": {"flax_ckpt_compat.paths": "[]"}}),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    """An error of damage that names the file, before anything is read."""
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(errors.CorruptCheckpointError, match=r"x\.safetensors"):
        flax_ckpt_compat.restore(tmp_path / "x.safetensors")


def test_a_dtype_that_numpy_lacks(tmp_path: Path) -> None:
    """The error names the tensor."""
    (tmp_path / "x.safetensors").write_bytes(header(entry(dtype="F6_E2M3", data_offsets=[0, 2]), b"12"))
    with pytest.raises(errors.UnsupportedLeafError, match="F6_E2M3"):
        flax_ckpt_compat.restore(tmp_path / "x.safetensors")


def test_lost_and_strange_shards(index: Path) -> None:
    """A missing shard is named; an index that leads elsewhere is damaged."""
    (index.parent / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match="1 of 2 shards are missing, such as model-00002-of"):
        flax_ckpt_compat.restore(index)
    for name in ("../model.safetensors", "/etc/passwd", "model.bin", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(errors.CorruptCheckpointError):
            flax_ckpt_compat.restore(index)
    index.write_text("{}")
    with pytest.raises(errors.CorruptCheckpointError, match="not an index"):
        flax_ckpt_compat.restore(index)
