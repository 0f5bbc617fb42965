"""Layouts of other programs that are read and never written: CLU, EasyLM, Hugging Face's shards, Pax and levanter.

Flax, msgpack and TensorStore write them here as those programs do; tests/data/layouts has what some of them wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization, traverse_util
from jax.experimental.array_serialization import serialization as jax_serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.backend import ArraySlice
from tests.support.layouts import assert_every_function_reads, assert_same

WRITTEN = Path(__file__).parents[1] / "data" / "layouts"


def clu_state(step: int) -> dict[str, Any]:
    """The state of a step."""
    return {"step": np.int32(step), "params": {"w": np.full(3, step, np.float32)}}


def write_clu(folder: Path, *steps: int, latest: str) -> None:
    """Write what CLU's ``Checkpoint`` writes: a .flax file a step, TensorFlow's files, and the look-up file."""
    folder.mkdir(exist_ok=True)
    for step in steps:
        (folder / f"ckpt-{step}.flax").write_bytes(serialization.to_bytes(clu_state(step)))
        (folder / f"ckpt-{step}.index").write_bytes(b"\x00\x00\x02\x08\x01" + bytes(40))
        (folder / f"ckpt-{step}.data-00000-of-00001").write_bytes(bytes(16))
    names = "".join(f'all_model_checkpoint_paths: "ckpt-{step}"\n' for step in steps)
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{latest}"\n{names}')


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


PAX = {
    "mdl_vars": {"params": {"lm": {"softmax": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}}}},
    "opt_states_0": {"count": np.array(1000, np.int32), "m": {"w": np.ones((2, 3), np.float32)}},
    "step": np.array(1000, np.uint32),
}
LEVANTER = {
    "model": {
        "embeddings": {"weight": np.arange(8, dtype=np.float32).reshape(4, 2)},
        "layers": {"0": {"b": np.ones(2, np.float32)}, "1": {"b": np.zeros(2, np.float32)}},
    },
    "opt_state": {"0": {"count": np.array(7, np.int32)}},
    "step": np.array(7, np.int32),
}


def write_pax(folder: Path) -> None:
    """Write a step as Pax does without OCDBT: a JSON item, and an array for each key path."""
    (folder / "metadata").mkdir(parents=True)
    metadata = {"version": 1.1, "train_state_metadata": {"mdl_vars": {}}}
    (folder / "metadata" / "metadata").write_text(json.dumps(metadata))
    for name, value in traverse_util.flatten_dict(PAX, sep=".").items():
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / "state" / name)}}
        options = {"metadata": {"compressor": {"id": "zstd", "level": 1}, "chunks": list(value.shape)}}
        array = ts.open({**spec, **options}, create=True, dtype=value.dtype.name, shape=value.shape).result()
        array.write(value).result()


def write_levanter(folder: Path, tree: Any = LEVANTER, *, database: bool = False) -> None:
    """Write a step as levanter does: jax's own serialization into folders, or zarr3 arrays in one database."""
    folder.mkdir(parents=True)
    leaves = traverse_util.flatten_dict(tree, sep="/")
    if database:
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}/"}
        for name, value in leaves.items():
            spec = {"driver": "zarr3", "kvstore": {**kvstore, "path": f"{name}/"}}
            ts.open(spec, create=True, dtype=value.dtype.name, shape=value.shape).result().write(value).result()
    else:
        manager = jax_serialization.GlobalAsyncCheckpointManager()
        paths = [str(folder / name) for name in leaves]
        manager.serialize_with_paths(list(map(jnp.asarray, leaves.values())), paths, on_commit_callback=lambda: None)
        manager.wait_until_finished()
    metadata = {"step": 7, "timestamp": "2024-05-01T12:00:00", "is_temporary": False}
    (folder / "metadata.json").write_text(json.dumps(metadata))


LAYOUTS: dict[str, tuple[str, Any, Callable[[Path], Any]]] = {
    "CLU": ("clu", clu_state(9), lambda path: write_clu(path, 8, 9, 10, latest="gs://bucket/run/ckpt-9")),
    "EasyLM": ("stream", EASYLM, lambda path: path.write_bytes(stream(EASYLM))),
    "levanter": ("levanter", LEVANTER, write_levanter),
    "levanter, OCDBT": ("levanter", LEVANTER, lambda path: write_levanter(path, database=True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_function_reads_it(name: str, tmp_path: Path) -> None:
    """By its own path. CLU's look-up file names the latest step, wherever the folder is now; not the largest number."""
    format, expected, write = LAYOUTS[name]
    write(tmp_path / "it-7")
    assert_every_function_reads(tmp_path / "it-7", expected, format, tmp_path / "converted")


@pytest.mark.parametrize("shards", [1, 3])
def test_every_function_reads_shards(shards: int, tmp_path: Path) -> None:
    """The index is the path of the whole model; parts of one dict are joined, also of Python values alone."""
    assert_every_function_reads(write_shards(tmp_path, SHARDED, shards), SHARDED, "flax shards", tmp_path / "converted")
    numbers = {"config": {f"n{n:02}": n for n in range(40)}}
    assert flax_ckpt_compat.restore(write_shards(tmp_path, numbers, shards)) == numbers


@pytest.mark.parametrize("latest", ["ckpt-7", "../ckpt-9", "..", "", 'ckpt-9\\"', "a/"])
def test_a_step_of_clu_that_is_not_there(latest: str, tmp_path: Path) -> None:
    """The folder is refused, with a file in it that restores; only names in the folder count."""
    write_clu(tmp_path / "run", 8, 10, latest=latest)
    with pytest.raises(errors.CheckpointError, match=r"\.flax"):
        flax_ckpt_compat.restore(tmp_path / "run")
    assert_same(flax_ckpt_compat.restore(tmp_path / "run" / "ckpt-8.flax"), clu_state(8))


def test_saves_leave_clu_alone(tmp_path: Path) -> None:
    """Flax's own checkpoints may be saved beside it; then these are the latest."""
    write_clu(tmp_path, 8, 9, latest="ckpt-9")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, clu_state(step), step, keep=1, overwrite=True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "checkpoint_2"}
    assert before == after
    assert_same(flax_ckpt_compat.restore(tmp_path), clu_state(2))


def test_what_clu_wrote() -> None:
    """The files are those of clu 0.0.12 with TensorFlow 2.21, which saved steps 1 and 2 of a class of flax.struct."""
    folder = WRITTEN / "clu_0.0.12"
    params = {"kernel": np.full((2, 3), 2, np.float32), "bias": np.zeros(3, ml_dtypes.bfloat16)}
    opt_state = {"0": np.ones(2, np.float32), "1": np.array(2, np.int32)}
    expected = {"step": 2, "params": {"dense": params}, "opt_state": opt_state}
    assert_same(flax_ckpt_compat.restore(folder), expected)
    assert flax_ckpt_compat.restore(folder / "ckpt-2.flax")["step"] == 1
    target = {**expected, "opt_state": (np.zeros(2, np.float32), np.array(0, np.int32))}
    assert_same(flax_ckpt_compat.restore(folder, target)["opt_state"], tuple(opt_state.values()))


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


def test_pax(tmp_path: Path) -> None:
    """The names of the arrays are key paths, joined with dots."""
    write_pax(tmp_path / "checkpoint_00001000")
    assert_same(flax_ckpt_compat.restore(tmp_path / "checkpoint_00001000"), PAX)
    assert_same(flax_ckpt_compat.restore(tmp_path / "checkpoint_00001000" / "state"), PAX)
    assert_same(checkpoints.restore_checkpoint(tmp_path, None), PAX)
    target = jax.tree.map(np.zeros_like, PAX)
    assert_same(flax_ckpt_compat.restore(tmp_path, target), PAX)
    with flax_ckpt_compat.open_checkpoint(tmp_path / "checkpoint_00001000") as view:
        assert view.format == "pax"
    assert not flax_ckpt_compat.verify(tmp_path / "checkpoint_00001000").damaged
    flax_ckpt_compat.convert(tmp_path / "checkpoint_00001000", tmp_path / "converted", "msgpack", item="state")
    assert_same(flax_ckpt_compat.restore(tmp_path / "converted"), PAX)


def test_levanter_that_was_not_finished(tmp_path: Path) -> None:
    """``metadata.json`` is written last: without it the folder is refused."""
    write_levanter(tmp_path / "step-7")
    (tmp_path / "step-7" / "metadata.json").unlink()
    with pytest.raises(errors.CheckpointError):
        flax_ckpt_compat.restore(tmp_path / "step-7")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"step": "7", "timestamp": ""}', "[" * 100_000])
def test_other_metadata_is_not_levanters(content: str, tmp_path: Path) -> None:
    """A folder with another ``metadata.json`` stays what it was: something else."""
    write_levanter(tmp_path / "step-7")
    (tmp_path / "step-7" / "metadata.json").write_text(content)
    with pytest.raises(errors.CheckpointError):
        flax_ckpt_compat.restore(tmp_path / "step-7")


def test_names_that_are_no_tree(tmp_path: Path) -> None:
    """An array inside the folder of another one is damage, not a tree without one of the two."""
    write_levanter(tmp_path / "step-7", {"a": np.ones(2), "b": np.ones(3)})
    (tmp_path / "step-7" / "b").rename(tmp_path / "step-7" / "a" / "b")
    with pytest.raises(errors.CorruptCheckpointError, match="both a leaf and a branch"):
        flax_ckpt_compat.restore(tmp_path / "step-7")


def test_a_tree_of_orbax_that_lost_its_structure_is_not_paxs(tmp_path: Path) -> None:
    """Arrays beside a JSON item are Pax' only with the model's variables among them."""
    write_pax(tmp_path / "checkpoint_1")
    state = tmp_path / "checkpoint_1" / "state"
    for folder in list(state.iterdir()):
        if folder.name.startswith("mdl_vars."):
            folder.rename(state / folder.name.replace("mdl_vars.", ""))
    with pytest.raises(errors.CheckpointError):
        flax_ckpt_compat.restore(tmp_path / "checkpoint_1" / "state")


def test_what_levanter_wrote() -> None:
    """The files are those of levanter 1.1, which wrote a module, a list, a named array of haliax and a number."""
    found = flax_ckpt_compat.restore(WRITTEN / "levanter_1.1" / "step-7")
    layers = {"0": np.ones(2, np.float32), "1": np.zeros(3, np.float32)}
    model = {"layers": layers, "w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert_same(found, {"model": model, "n": np.ones((2, 3), np.float32), "step": np.array(7, np.int32)})
