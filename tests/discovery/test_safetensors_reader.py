"""safetensors files, and Hugging Face's shards of them, as sources of restores and conversions."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import serialization, traverse_util

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from tests.support.layouts import assert_every_function_reads, assert_same

TENSORS = {
    "model.layers.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.layers.1.weight": np.arange(12, dtype=np.float16).reshape(4, 3),
    "model.norm": np.array(2.5),
    "ids": np.arange(5, dtype=np.int8),
    "empty": np.zeros((0, 3), np.int64),
}
NESTED = traverse_util.unflatten_dict(TENSORS, sep=".")


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
    """A file, and shards; what is restored owns its memory, and real Orbax reads the steps that it becomes."""
    path = request.getfixturevalue(source)
    assert_every_function_reads(path, NESTED, "safetensors", tmp_path)
    flax_ckpt_compat.restore(path)["ids"][:] = 0
    assert_same(flax_ckpt_compat.restore(path), NESTED)
    assert_same(serialization.msgpack_restore((tmp_path / "msgpack").read_bytes()), NESTED)
    flax_ckpt_compat.convert(path, tmp_path / "steps", "manager", step=3)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        found = manager.restore(3, args=ocp.args.StandardRestore())
    assert_same([found["model"]["norm"], found["empty"]], [TENSORS["model.norm"], TENSORS["empty"]])


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
        "." * 1_200: np.ones(1),  # one name, and no key path too deep
    }
    flax_ckpt_compat.save(tmp_path / "source", tree, format="orbax")
    flax_ckpt_compat.convert(tmp_path / "source", tmp_path / name, "safetensors")
    expected = {**tree, "list": {"0": np.ones(1), "1": np.zeros(2)}}
    assert_same(flax_ckpt_compat.restore(tmp_path / name), expected)
    assert len(safetensors.deserialize((tmp_path / name).read_bytes())) == 8
    flax_ckpt_compat.convert(tmp_path / name, tmp_path / "again", "orbax")
    assert_same(flax_ckpt_compat.restore(tmp_path / "again"), tree)


@pytest.mark.parametrize("length", [372, 628, 884])
def test_a_header_whose_length_looks_like_a_container_of_msgpack(tmp_path: Path, length: int) -> None:
    """The lengths begin with the byte of a map or of an array of Flax."""
    tree = {"w" * length: np.ones(1)}
    flax_ckpt_compat.save(tmp_path / "source", tree, format="msgpack")
    flax_ckpt_compat.convert(tmp_path / "source", tmp_path / "file", "safetensors")
    assert (tmp_path / "file").read_bytes()[0] in (0xD4, 0xD8)
    assert_same(flax_ckpt_compat.restore(tmp_path / "file"), tree)


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


def ours(**kept: str) -> bytes:
    """A file of two numbers, with what `convert` keeps in the header."""
    kept = {f"flax_ckpt_compat{name}": text for name, text in kept.items()}
    return header({"__metadata__": kept} | entry(), bytes(8))


def is_damage(folder: Path, content: bytes, error: type[Exception] = errors.CorruptCheckpointError) -> None:
    """A file is refused by its name, before anything is read."""
    (folder / "x.safetensors").write_bytes(content)
    with pytest.raises(error, match=r"x\.safetensors"):
        flax_ckpt_compat.restore(folder / "x.safetensors")


PATHS = ["[]", *(f'{{"a": {path}}}' for path in ("[1]", "[null]", '[["x"]]', '"xy"', '{"x": 1}'))]
ENTRIES: list[dict[str, Any]] = [
    *({"data_offsets": offsets} for offsets in ([0, 4], [8, 0], [-8, 0], ["0", 8], [0.0, 8], [0])),
    *({"shape": shape} for shape in ([-2], [2**62, 4], "2", 2, [2.0], ["2"], [True, 2])),
    {"shape": [1] * 65 + [2]},
    {"shape": [2**62, 0], "data_offsets": [0, 0]},
]


@pytest.mark.parametrize(
    "content",
    [
        header(entry(), b"1234567"),
        *(header(entry(**changed), bytes(8 * (changed.get("data_offsets") != [0, 0]))) for changed in ENTRIES),
        *(header({"a": value}) for value in (3, {})),
        header(b"{" + b'"a":{' * 100_000 + b"}"),
        *(ours(**{"": text}) for text in ("[[1]]", "[", '[[["b"], [1]]]', '[["bc", 1]]', "[[[1], 1]]")),
        *(ours(**{".paths": text}) for text in PATHS),
        ours(**{"": '[[["b.c"], 1], [["b", "c"], 2], [["b"], 3]]'}),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    """Bytes, shapes and key paths that contradict the file, or each other."""
    is_damage(tmp_path, content)


@pytest.mark.parametrize("offsets", [[0, 8], [4, 12], [12, 20]])
def test_bytes_of_two_tensors_and_of_none(offsets: list[int], tmp_path: Path) -> None:
    """Overlaps, gaps, and bytes behind the last tensor are refused, as the real library does."""
    second = {"b": entry(data_offsets=offsets)["a"]}
    for content in (header(entry() | second, bytes(max(16, offsets[1]))), header(entry(), bytes(12))):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)
        is_damage(tmp_path, content)


def test_what_is_no_damage(tmp_path: Path) -> None:
    """Names of so many parts that it took seconds to refuse them."""
    for content in (
        header({".".join("a" * 20_000): entry()["a"]}, bytes(8)),
        ours(**{".paths": json.dumps({"a": ["x"] * 20_000})}),
        ours(**{"": json.dumps([[["x"] * 20_000, 1]])}),
    ):
        is_damage(tmp_path, content, errors.DepthError)


def test_a_dtype_that_numpy_lacks(tmp_path: Path) -> None:
    """It hides no other tensor of its file, and is refused where it is asked for."""
    file = tmp_path / "model.safetensors"
    values = np.arange(2, dtype=np.float32)
    of_others = {"b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}}
    file.write_bytes(
        header(entry(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3]) | of_others, b"123" + values.tobytes())
    )
    np.testing.assert_array_equal(flax_ckpt_compat.restore(file, {"b": np.zeros(2, np.float32)})["b"], values)
    with flax_ckpt_compat.open_checkpoint(file) as opened:
        assert opened.tree["a"].shape == (4,)
        with pytest.raises(errors.UnsupportedLeafError):
            opened.read("a")
    for target in (None, {"a": np.zeros(4, np.float32), "b": values}):
        with pytest.raises(errors.UnsupportedLeafError, match="a is of the dtype 'F6_E2M3'"):
            flax_ckpt_compat.restore(file, target)


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
