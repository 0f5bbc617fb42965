"""Files of other programs, which are read and never written: numpy's, safetensors with its shards, EasyLM's streams."""

import io
import itertools
import json
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
from flax import serialization, traverse_util
from safetensors.numpy import save_file

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from tests.support.interpreters import run_python
from tests.support.layouts import assert_every_function_reads, assert_same

PARAMS = {
    "params": {
        "embedding": {"kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "bias": np.arange(4.0)},
        "Transformer": {"encoderblock_0": {"MlpBlock_3": {"kernel": np.asfortranarray(np.arange(6).reshape(2, 3))}}},
        "cls": np.zeros((0, 3), np.float16),
    },
    "step": np.array(7),
}
TENSORS = {
    "model.layers.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.layers.1.weight": np.arange(12, dtype=np.float16).reshape(4, 3),
    "model.norm": np.array(2.5),
    "ids": np.arange(5, dtype=np.int8),
    "empty": np.zeros((0, 3), np.int64),
}
NESTED = traverse_util.unflatten_dict(TENSORS, sep=".")
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


def index(folder: Path) -> Path:
    """Two shards, and the index that says which tensor is in which."""
    names = list(TENSORS)
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for name, tensors in files.items():
        save_file({tensor: TENSORS[tensor] for tensor in tensors}, folder / name)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    return folder / "model.safetensors.index.json"


Write = Callable[[dict[str, Any], Path], object]
WRITERS: dict[str, Write] = {
    "a.safetensors": save_file,
    "a.npz": lambda tree, path: np.savez(path, **tree),
    "packed.npz": lambda tree, path: np.savez_compressed(path, **tree),
    "stream": lambda tree, path: path.write_bytes(stream(tree)),
}
ONE = {"w": np.ones(3)}
LEAF = serialization.to_bytes(ONE["w"])
FLAT = traverse_util.flatten_dict(PARAMS, sep="/")
# Name → the format that is announced, what it holds, and what writes it, unless that is its name's writer.
SOURCES: dict[str, tuple[str, Any, Callable[[Path], object]]] = {
    "a.npz": ("npz", PARAMS, lambda path: np.savez(path, **FLAT)),
    "packed.npz": ("npz", PARAMS, lambda path: np.savez_compressed(path, **FLAT)),
    "model.safetensors": ("safetensors", NESTED, lambda path: save_file(TENSORS, path)),
    "model.safetensors.index.json": ("safetensors", NESTED, lambda path: index(path.parent)),
    "it-7": ("stream", EASYLM, lambda path: path.write_bytes(stream(EASYLM))),
    "one leaf": ("stream", ONE, lambda path: path.write_bytes(stream(ONE))),
    "a leaf under one name": ("stream", ONE, lambda path: path.write_bytes(msgpack.packb(("w", LEAF)))),
    "under a word": ("stream", {"word": ONE["w"]}, lambda path: path.write_bytes(msgpack.packb(("word", LEAF)))),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_function_reads_it(name: str, tmp_path: Path) -> None:
    """Names with separators are nested; arrays in Fortran's order have the same values, and memory of their own."""
    format, expected, write = SOURCES[name]
    write(tmp_path / name)
    assert_every_function_reads(tmp_path / name, expected, format, tmp_path / "converted")
    for array in jax.tree.leaves(flax_ckpt_compat.restore(tmp_path / name)):
        if isinstance(array, np.ndarray):
            array[...] = 0
    assert_same(flax_ckpt_compat.restore(tmp_path / name), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_it_becomes(name: str, tmp_path: Path) -> None:
    """Real Flax reads the file, and real Orbax the step."""
    SOURCES[name][2](tmp_path / name)
    flax_ckpt_compat.convert(tmp_path / name, tmp_path / "msgpack", "msgpack")
    assert_same(serialization.msgpack_restore((tmp_path / "msgpack").read_bytes()), NESTED)
    flax_ckpt_compat.convert(tmp_path / name, tmp_path / "steps", "manager", step=3)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        found = manager.restore(3, args=ocp.args.StandardRestore())
    assert_same([found["model"]["norm"], found["empty"]], [TENSORS["model.norm"], TENSORS["empty"]])


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Write]:
    """Where a file of each kind will be, and what writes it."""
    return tmp_path / request.param, WRITERS[request.param]


SHAPES = [(), (0, 3), (1,), (7,), (300, 5), (2, 3, 4), (40_000,)]
PARTS: list[tuple[str, tuple[slice, ...]]] = [
    ("int8_0", ()),
    ("int8_1", (slice(0, 0), slice(1, 3))),
    ("float64_3", (slice(2, 5),)),
    ("float32_4", (slice(1, 2), slice(0, 5))),
    ("float32_4", (slice(0, 300), slice(1, 3))),
    ("float64_5", (slice(1, 2), slice(0, 3), slice(1, 2))),
    ("float64_6", (slice(39_990, 40_000),)),
]


def _tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        f"{np.dtype(dtype).name}_{number}": rng.integers(0, 100, shape).astype(dtype)
        for number, shape in enumerate(SHAPES)
        for dtype in (np.float32, np.int8, np.float64)
    }


def test_arrays_and_parts_of_them(written: tuple[Path, Write]) -> None:
    """As numpy has them: small and large, empty ones, rows, columns, and single elements."""
    path, write = written
    tree = _tree(0)
    write(tree, path)
    assert_same(flax_ckpt_compat.restore(path), tree)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        leaves = view.leaves()
        parts = [leaves[name].part(index) for name, index in PARTS]
        for (name, index), found in zip(PARTS, leaves["int8_0"].reader.read(parts), strict=True):
            np.testing.assert_array_equal(found, tree[name][index])


def test_what_replaces_a_file_is_not_mixed_in(written: tuple[Path, Write]) -> None:
    """A reader that was opened gives the arrays of the file as it was."""
    path, write = written
    write(_tree(1), path)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        write(_tree(2), path.with_name(f"new-{path.name}"))
        os.replace(path.with_name(f"new-{path.name}"), path)
        assert_same(view.read(), _tree(1))
    assert_same(flax_ckpt_compat.restore(path), _tree(2))


def test_a_file_that_is_cut_off_while_it_is_open(written: tuple[Path, Write]) -> None:
    """The error names it; nothing that is not there is returned."""
    path, write = written
    write(_tree(3), path)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises((errors.CorruptCheckpointError, errors.StorageError), match=str(path)):
            view.read()


FORKS_BESIDE_THREADS = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import flax_ckpt_compat
np.savez(sys.argv[1], **{str(number): np.full(50_000, number) for number in range(4)})
with flax_ckpt_compat.open_checkpoint(sys.argv[1]) as view, ThreadPoolExecutor(2) as threads:
    is_right = lambda: all((array == int(name)).all() for name, array in view.read().items())
    others, children = [threads.submit(lambda: all(is_right() for _ in range(5))) for _ in range(2)], []
    for _ in range(2):
        if not (child := os.fork()):
            signal.alarm(60)  # ends a child that waits for ever
            os._exit(not all(is_right() for _ in range(5)))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert all(one.result() for one in others)
"""


def test_processes_and_threads_read_at_positions_of_their_own(tmp_path: Path) -> None:
    """A fork while other threads read neither waits for them, nor moves them; in a process of its own, as jax warns."""
    run_python(FORKS_BESIDE_THREADS, tmp_path / "a.npz", PYTHONWARNINGS="ignore")


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_checksums_are_verified(write: Any, tmp_path: Path) -> None:
    """An archive has a CRC-32 of each array, and `verify` finds what differs from it."""
    write(tmp_path / "a.npz", **FLAT)
    for _ in range(50):  # threads that read one archive got each other's bytes
        assert flax_ckpt_compat.verify(tmp_path / "a.npz").ok
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        member = archive.getinfo("params/embedding/kernel.npy")
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[member.header_offset + 30 + len(member.filename) + member.compress_size] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    assert flax_ckpt_compat.verify(tmp_path / "a.npz").damaged


BFLOAT16 = np.arange(5, dtype=ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("stored", "expected"), [(BFLOAT16.view("V2"), BFLOAT16), (np.arange(3, dtype=">i4"), np.arange(3, dtype=">i4"))]
)
def test_dtypes_of_npz(stored: Any, expected: Any, tmp_path: Path) -> None:
    """numpy writes bfloat16 as two raw bytes, which big_vision takes for what they were; byte orders stay."""
    np.savez(tmp_path / "a.npz", w=stored)
    assert_same(flax_ckpt_compat.restore(tmp_path / "a.npz"), {"w": expected})


@pytest.mark.parametrize("file", ["a.npz", "a.safetensors"])
@pytest.mark.parametrize("names", [("a", "a/b"), ("a//b", "c"), ("/a",), ("a/",), ("a", "a.b", "c.d")], ids=str)
def test_names_that_are_no_key_paths(file: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """A tensor "a" beside "a.b" cannot be a dict, so all keep their names."""
    tensors = {name: np.full(2, at) for at, name in enumerate(names)}
    WRITERS[file](tensors, tmp_path / file)
    assert_same(flax_ckpt_compat.restore(tmp_path / file), tensors)


BAD = "good.bad"  # so that there are no key paths, but names


def hostile(path: Path) -> None:
    """An archive with an array of objects."""

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (path.with_name("ran"),))

    np.savez(path, good=np.ones(3), **{BAD: np.array([Hostile()], dtype=object)})


def damaged(path: Path) -> None:
    """An archive in which an array has another value than was saved."""
    np.savez(path, **{BAD: np.full(3, 7.25)}, good=np.ones(3))
    path.write_bytes(path.read_bytes().replace(np.full(3, 7.25).tobytes(), np.full(3, 7.5).tobytes()))


def packed(path: Path) -> None:
    """A file with a tensor of a dtype that numpy lacks."""
    entries = {
        BAD: {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "good": {"dtype": "F64", "shape": [3], "data_offsets": [3, 27]},
    }
    path.write_bytes(header(entries, b"123" + np.ones(3).tobytes()))


@pytest.mark.parametrize(
    ("name", "write", "error", "told", "states"),
    [
        ("a.npz", hostile, errors.UnsupportedLeafError, "holds Python objects", ("ok", "unreadable")),
        ("a.npz", damaged, errors.CorruptCheckpointError, "does not decode", ("ok", "damaged")),
        ("a.safetensors", packed, errors.UnsupportedLeafError, "is of the dtype 'F6", ("unverified", "unreadable")),
    ],
)
def test_what_cannot_be_read_hides_no_other(
    name: str, write: Callable[[Path], None], error: Any, told: str, states: tuple[str, str], tmp_path: Path
) -> None:
    """It is refused where it is asked for, and by `verify`; no pickle is run."""
    path, good = tmp_path / name, {"good": np.ones(3)}
    write(path)
    assert_same(flax_ckpt_compat.restore(path, {"good": np.zeros(3)}), good)
    for target in (None, {BAD: np.zeros(4, np.float32), **good}):
        with pytest.raises(error, match=f"{BAD} {told}") as caught:
            flax_ckpt_compat.restore(path, target)
        assert caught.value.leaf == BAD
    (found,) = flax_ckpt_compat.verify(path).checkpoints
    assert {leaf.path: leaf.state for leaf in found.leaves} == dict(zip(("good", BAD), states, strict=True))
    with flax_ckpt_compat.open_checkpoint(path) as view:
        assert_same(view.read("good"), good)
        assert write is not packed or view.tree[BAD].shape == (4,)
        with pytest.raises(error):
            view.read(BAD)
    assert not (tmp_path / "ran").exists()


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


def test_names_of_many_levels(tmp_path: Path) -> None:
    """A file of arrays may nest deeper than half of Python's recursion limit."""
    np.savez(tmp_path / "p.npz", **{"/".join("a" * 600): np.ones(2)})
    assert not flax_ckpt_compat.diff(tmp_path / "p.npz", tmp_path / "p.npz").differences
    found = flax_ckpt_compat.restore(tmp_path / "p.npz")
    for _ in range(600):
        found = found["a"]
    assert found.tolist() == [1, 1]


@pytest.mark.parametrize("tree", [np.arange(3), *({"w" * n: np.ones(1)} for n in (372, 628, 884))], ids=len)
def test_headers_that_look_like_something_else(tree: Any, tmp_path: Path) -> None:
    """The whole tree may be one array; the lengths begin with the byte of a map or of an array of Flax."""
    flax_ckpt_compat.save(tmp_path / "source", tree, format="msgpack")
    flax_ckpt_compat.convert(tmp_path / "source", tmp_path / "file", "safetensors")
    assert isinstance(tree, np.ndarray) or (tmp_path / "file").read_bytes()[0] in (0xD4, 0xD8)
    assert_same(flax_ckpt_compat.restore(tmp_path / "file"), tree)


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


def test_lost_and_strange_shards(tmp_path: Path) -> None:
    """A missing shard is named; an index that leads elsewhere is damaged."""
    path = index(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match="1 of 2 shards are missing, such as model-00002-of"):
        flax_ckpt_compat.restore(path)
    for name in ("../model.safetensors", "/etc/passwd", "model.bin", 3):
        path.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(errors.CorruptCheckpointError):
            flax_ckpt_compat.restore(path)
    path.write_text("{}")
    with pytest.raises(errors.CorruptCheckpointError, match="not an index"):
        flax_ckpt_compat.restore(path)


def test_arrays_above_a_gibibyte_are_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flax splits large arrays into pieces, here too."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1000)
    (tmp_path / "a").write_bytes(stream(EASYLM))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a"), EASYLM)


def archive(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """A zip archive of these files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as found:
        for name, content in members.items():
            found.writestr(name.replace("_npy", ".npy"), content)
    return stream.getvalue()


def npy(header: str, data: bytes = b"") -> bytes:
    """An ``.npy`` file with a header of this text."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def array(shape: str = "(2,)", descr: str = "'<f4'", nbytes: int = 8) -> bytes:
    """An ``.npy`` file of an array."""
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}", bytes(nbytes))


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


def damaged_at(at: int, content: bytes) -> bytes:
    """A file of which a byte was changed."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGED = [
    *(archive(a_npy=array())[:length] for length in (-1, 60)),
    archive(a_npy=array()).replace(b"a.npy", b"b.npy", 1),
    archive(a_npy=array())[:-4] + b"\1\0\0\0",  # the directory is said to begin behind the end
    *(damaged_at(39, archive(codec, a_npy=array())) for codec in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
    *(
        archive(a_npy=content)
        for content in (
            *(array(nbytes=7), array(nbytes=9), b"", b"\x93NUMPY\x09\x00", array(descr="'<q9'")),
            *(npy("__import__('os').system('false')"), npy("(" * 110)),
            *(array(shape) for shape in ("(-2,)", "(2**70,)")),
            *(array(shape, nbytes=0) for shape in ("(99999999999999999999,)", "(4611686018427387904, 0)")),
        )
    ),
]
# Other files in the archive, structured arrays, and text of no length are not left out silently.
UNSUPPORTED = [archive(notes=b"text"), *(archive(a_npy=array("(2,)", d)) for d in ("[('x', '<f4')]", "'|S0'"))]
PATHS = ["[]", *(f'{{"a": {path}}}' for path in ("[1]", "[null]", '[["x"]]', '"xy"', '{"x": 1}'))]
ENTRIES: list[dict[str, Any]] = [
    *({"data_offsets": offsets} for offsets in ([0, 4], [8, 0], [-8, 0], ["0", 8], [0.0, 8], [0])),
    *({"shape": shape} for shape in ([-2], [2**62, 4], "2", 2, [2.0], ["2"], [True, 2])),
    {"shape": [1] * 65 + [2]},
    {"shape": [2**62, 0], "data_offsets": [0, 0]},
]
TENSOR_FILES = [
    header(entry(), b"1234567"),
    *(header(entry(**changed), bytes(8 * (changed.get("data_offsets") != [0, 0]))) for changed in ENTRIES),
    *(header({"a": value}) for value in (3, {})),
    header(b"{" + b'"a":{' * 100_000 + b"}"),
    *(ours(**{"": text}) for text in ("[[1]]", "[", '[[["b"], [1]]]', '[["bc", 1]]', "[[[1], 1]]")),
    *(ours(**{".paths": text}) for text in PATHS),
    ours(**{"": '[[["b.c"], 1], [["b", "c"], 2], [["b"], 3]]'}),
]
GOOD = stream({"w": np.ones(3), "v": np.ones(2)})
STREAMS = [
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
]
# Names of so many parts that it took seconds to refuse them.
DEEP = [
    ("a.npz", archive(**{"/".join("a" * 20_000) + "_npy": array()})),
    ("a.safetensors", header({".".join("a" * 20_000): entry()["a"]}, bytes(8))),
    ("a.safetensors", ours(**{".paths": json.dumps({"a": ["x"] * 20_000})})),
    ("a.safetensors", ours(**{"": json.dumps([[["x"] * 20_000, 1]])})),
]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        *(("a.npz", content, errors.CorruptCheckpointError) for content in DAMAGED),
        *(("a.npz", content, errors.UnsupportedLeafError) for content in UNSUPPORTED),
        *(("a.safetensors", content, errors.CorruptCheckpointError) for content in TENSOR_FILES),
        *(("stream", content, errors.CorruptCheckpointError) for content in STREAMS),
        *((*one, errors.DepthError) for one in DEEP),
    ],
    ids=itertools.count(),  # an archive holds the time at which it was made, and each worker has made its own
)
def test_hostile_files(name: str, content: bytes, error: type[Exception], tmp_path: Path) -> None:
    """What contradicts the file, or itself, ends early or nests without end: named before any array is allocated."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=re.escape(name)):
        flax_ckpt_compat.restore(tmp_path / name)


@pytest.mark.parametrize("failure", [TimeoutError("timed out"), OSError("lost"), RuntimeError("no lzma")], ids=repr)
def test_what_is_not_read_is_no_damage(failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be whole whose bytes do not come, or that this Python cannot decompress."""
    (tmp_path / "a.npz").write_bytes(archive(zipfile.ZIP_LZMA, a_npy=array()))
    monkeypatch.setattr("flax_ckpt_compat._core.local.local_file.LocalFile.fill", Mock(side_effect=failure))
    expected = errors.StorageError if isinstance(failure, OSError) else RuntimeError
    with pytest.raises(expected, match=str(failure)):
        flax_ckpt_compat.restore(tmp_path / "a.npz")


@pytest.mark.parametrize("offsets", [[0, 8], [4, 12], [12, 20]])
def test_bytes_of_two_tensors_and_of_none(offsets: list[int], tmp_path: Path) -> None:
    """Overlaps, gaps, and bytes behind the last tensor are refused, as the real library does, by the stored name."""
    second = {"b\nb": entry(data_offsets=offsets)["a"], "__metadata__": {"flax_ckpt_compat.paths": '{"b\\nb": ["c"]}'}}
    for content in (header(entry() | second, bytes(max(16, offsets[1]))), header(entry(), bytes(12))):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(errors.CorruptCheckpointError, match=r"x\.safetensors: (b\\nb has|4 bytes behind)"):
            flax_ckpt_compat.restore(tmp_path / "x.safetensors")
