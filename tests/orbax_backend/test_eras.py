"""Layouts of old releases, made from what the current Orbax writes and from the format as it is written down; T5X's.

The current Orbax still reads most of them and is the judge there. T5X (versions 0 to 3, 2021 to 2024) wrote a msgpack
file with a TensorStore spec for each array beside it: `path_kinds.toml` has the newest as it was written.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import serialization
from flax_ckpt_compat.orbax_backend.shardings import read_shardings

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from tests.support import path_kinds
from tests.support.logs import warnings_logged
from tests.support.orbax_trees import handles, load
from tests.support.trees import fingerprint

ARRAYS = {"a": {"b": np.arange(6.0).reshape(2, 3)}, "l": [np.int32([1, 2]), np.arange(3, dtype=np.uint8)]}


def placeholders(tree: Any, path: tuple[str, ...] = ()) -> Any:
    """The msgpack tree of a checkpoint whose values are all stored elsewhere."""
    if isinstance(tree, dict):
        return {name: placeholders(child, (*path, name)) for name, child in tree.items()}
    if isinstance(tree, list):
        return [placeholders(child, (*path, str(index))) for index, child in enumerate(tree)]
    return tree if tree is None else "PLACEHOLDER://" + ".".join(path)


def array_ext(array: np.ndarray[Any, Any]) -> msgpack.ExtType:
    """An array as Flax and Orbax put it into msgpack files: ext code 1 of (shape, dtype name, bytes)."""
    return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))


def old(path: Path, tree: Any, packed: Any = None, *, ocdbt: bool = True, metadata: bool = False) -> Path:
    """A checkpoint as releases before 0.4.3 wrote it: a msgpack file, and no ``_METADATA``."""
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)).save(path, tree)
    keep = {"d", "manifest.ocdbt", "_strings.json", "_sharding"}
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt", "array_metadatas")[metadata:]:
        file = path / name
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    assert not ocdbt or keep & {file.name for file in path.iterdir()}
    (path / "checkpoint").write_bytes(msgpack.packb(placeholders(tree) if packed is None else packed))
    return path


@pytest.mark.parametrize("metadata", [True, False])
def test_placeholders_and_values_of_the_msgpack_file(tmp_path: Path, metadata: bool) -> None:
    """A placeholder stands for its own key path, in the words of every release; values override arrays.

    As for real Orbax, with ``_METADATA`` or without one."""
    nines = np.full(3, 9.0)
    tree = {"x": nines, "y": nines, "a": np.zeros(3), "b": np.ones(2)}
    words = {"x": "PLACEHOLDER://foo", "y": "AGGREGATED://foo", "b": "PLACEHOLDER://b"}
    path = old(tmp_path / "c", tree, {**words, "a": array_ext(nines)}, metadata=metadata)
    for found in (load(path), ocp.PyTreeCheckpointer().restore(path)):
        assert fingerprint(found) == fingerprint({**tree, "a": nines})


def test_everything_that_the_msgpack_file_holds(tmp_path: Path) -> None:
    """Numbers, texts, bytes, empties, and the extension codes of arrays, complex numbers, scalars and tuples."""
    scalar = msgpack.ExtType(3, msgpack.packb(((), "float32", np.float32(1.5).tobytes())))
    both = msgpack.ExtType(4, msgpack.packb((1, msgpack.ExtType(4, msgpack.packb((array_ext(np.arange(2)), 2.5))))))
    packed = {
        "a": array_ext(np.arange(4, dtype=np.int16).reshape(2, 2)), "c": msgpack.ExtType(2, msgpack.packb((1.0, 2.0))),
        "s": scalar, "t": both, "n": None, "d": {}, "l": [], "i": 3, "f": 1.5, "b": True, "text": "é", "raw": b"\0\1",
    }  # fmt: skip
    (tmp_path / "checkpoint").write_bytes(msgpack.packb(packed))
    expected = packed | {
        "a": np.arange(4, dtype=np.int16).reshape(2, 2), "c": 1 + 2j, "s": np.float32(1.5),
        "t": [1, [np.arange(2), 2.5]],
    }  # fmt: skip
    assert fingerprint(load(tmp_path)) == fingerprint(expected)


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x91", b"\xdd\xff\xff\xff\xff"])
def test_damaged_tuples(tmp_path: Path, payload: bytes) -> None:
    """A tuple that is not an array, or longer than the file, is damage."""
    (tmp_path / "checkpoint").write_bytes(msgpack.packb({"t": msgpack.ExtType(4, payload)}))
    with pytest.raises(CorruptCheckpointError, match="checkpoint"):
        load(tmp_path)


def test_shardings_by_plain_name(tmp_path: Path) -> None:
    """Till 0.4.1 the keys of ``_sharding`` are the names themselves; whether or not is told by all of them together."""
    tree = {"abcd": jnp.arange(3.0), "x": {"y": jnp.ones(2)}}
    path = old(tmp_path / "c", tree)
    encoded = handles(path)
    text = json.loads((path / "_sharding").read_text())["YWJjZA=="]
    assert encoded["abcd"].sharding == text
    (path / "_sharding").write_text(json.dumps({"abcd": text, "x.y": text}))
    assert {name: handle.sharding for name, handle in handles(path).items()} == {"abcd": text, "x/y": text}
    for keys in (["YQ==", "a"], ["WVE9PQ==", "YQ=="]):  # the latter is the base64 of the former
        (tmp_path / "_sharding").write_text(json.dumps(dict(zip(keys, ["of YQ==", "of a"], strict=True))))
        assert read_shardings(location_of(tmp_path), ["YQ==", "a"]) == {"YQ==": "of YQ==", "a": "of a"}


def test_databases_below_the_database(tmp_path: Path) -> None:
    """Releases 0.1 to 0.4.1 put the array ``sl/ash`` as ``ash`` into a database in ``sl``; the deepest counts."""
    names = ("pl", "sl/ash", "sl/in/ash")
    path = old(tmp_path / "c", {"pl": np.arange(2.0)}, dict.fromkeys(names, "PLACEHOLDER://"))
    expected = {"pl": np.arange(2.0), **{name: np.arange(400, dtype=np.float32) + len(name) for name in names[1:]}}

    def write(folder: str, name: str, values: Any) -> None:
        base = {"driver": "file", "path": f"{path / folder}/"}
        ts.open(
            {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": name}},
            create=True, dtype=np.float32, shape=[400],
        ).result().write(values).result()  # fmt: skip

    for full in names[1:]:
        folder, _, name = full.rpartition("/")
        write(folder, name, expected[full])
    assert fingerprint(load(path)) == fingerprint(expected)
    for file in (path / "sl" / "d").iterdir():
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CorruptCheckpointError):
            load(path)
        file.write_bytes(content)
    write("sl", "in/ash", np.zeros(400, np.float32))
    assert fingerprint(load(path)) == fingerprint(expected)


def test_databases_that_were_never_merged(tmp_path: Path) -> None:
    """The one of a single process counts, as Orbax 0.4.4 left it; of several, each would be a part of the arrays."""
    tree, path = {"a": np.arange(300.0)}, tmp_path / "c"
    ocp.PyTreeCheckpointer().save(path, tree)
    (path / "checkpoint").write_bytes(msgpack.packb(placeholders(tree)))
    (path / "manifest.ocdbt").unlink()
    (path / "a").mkdir()
    assert fingerprint(load(path)) == fingerprint(tree)
    (path / "ocdbt.process_1").mkdir()
    with pytest.raises(IncompleteCheckpointError, match="databases of single processes"):
        load(path)


@pytest.mark.parametrize("name", ["../out", "/etc", "a/../../out"])
@pytest.mark.parametrize("ocdbt", [True, False])
def test_names_lead_nowhere_else(tmp_path: Path, name: str, ocdbt: bool) -> None:
    """A name in the msgpack file never leads out of the directory."""
    victim = tmp_path / "out"
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(victim, {"x": np.arange(3)})
    (victim / "x").rename(tmp_path / "moved")
    shutil.rmtree(victim)
    (tmp_path / "moved").rename(victim)
    (victim / "_strings.json").write_text(json.dumps({"..": {"out": "secret"}}))
    path = old(tmp_path / "c", {"a": np.arange(2)}, {"a": "PLACEHOLDER://", name: "PLACEHOLDER://"}, ocdbt=ocdbt)
    with pytest.raises(CheckpointError):
        load(path)


def test_a_lost_value_of_the_msgpack_file(tmp_path: Path) -> None:
    """A leaf that ``_METADATA`` says is in the msgpack file, and is not, is an error that names the file."""
    ocp.PyTreeCheckpointer().save(tmp_path / "c", {"a": np.arange(3)})
    metadata = json.loads((tmp_path / "c" / "_METADATA").read_text())
    metadata["tree_metadata"]["('a',)"]["value_metadata"]["skip_deserialize"] = True
    (tmp_path / "c" / "_METADATA").write_text(json.dumps(metadata))
    for packed in (None, {}, {"a": "PLACEHOLDER://a"}):
        if packed is not None:
            (tmp_path / "c" / "checkpoint").write_bytes(msgpack.packb(packed))
        with pytest.raises(CorruptCheckpointError, match="'checkpoint'"):
            load(tmp_path / "c")


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "d", "checkpoint"])
def test_old_directories_that_lost_a_part(tmp_path: Path, lost: str) -> None:
    """What is gone is named; loose leaves are never looked for where a database was."""
    path = old(tmp_path / "c", ARRAYS | {"big": np.random.default_rng(0).random(500)})
    shutil.rmtree(path / lost) if (path / lost).is_dir() else (path / lost).unlink()
    with pytest.raises((CorruptCheckpointError, IncompleteCheckpointError), match=lost):
        load(path)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("note", [None, '{"typed": true}', '{"typed": false}', "{}"])
def test_key_items(tmp_path: Path, width: int, note: str | None) -> None:
    """The note beside the data of a key item decides; without it nothing is given out as raw data."""
    data = np.arange(width, dtype=np.uint32)
    handler = ocp.Checkpointer(ocp.ArrayCheckpointHandler())
    handler.save(tmp_path / "key" / "jax_random_key", args=ocp.args.ArraySave(data))
    if note is not None:
        (tmp_path / "key" / "jax_random_key_metadata").mkdir()
        (tmp_path / "key" / "jax_random_key_metadata" / "metadata").write_text(note)
    path = tmp_path / "key" / "jax_random_key"
    if note in (None, "{}"):
        with pytest.raises(CorruptCheckpointError, match="jax_random_key_metadata"):
            load(path)
        return
    with warnings_logged() as logged:
        restored = load(path)
    typed = "true" in note
    assert ["unsafe_rbg" in text for text in logged] == [True] * (typed and width == 4)
    implementation = {2: "threefry2x32", 4: "rbg"}[width]
    assert fingerprint(restored) == (("key", implementation, fingerprint(data)) if typed else fingerprint(data))


@pytest.mark.parametrize("codec", [None, "gzip", "zlib", "bz2", "blosc", "zstd"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_zarr_v2(tmp_path: Path, codec: str | None, order: str) -> None:
    """Every compressor of zarr v2, both orders, chunks that do not divide the shape, loose files."""
    array = np.arange(35, dtype=np.int32).reshape(5, 7)
    (tmp_path / "checkpoint").write_bytes(msgpack.packb({"a": "PLACEHOLDER://a"}))
    ts.open(
        {
            "driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/a/"},
            "metadata": {
                "compressor": codec and {"id": codec}, "order": order, "chunks": [2, 3], "shape": [5, 7], "dtype": "<i4"
            },
        },
        create=True,
    ).result().write(array).result()  # fmt: skip
    assert fingerprint(load(tmp_path)) == fingerprint({"a": array})


STATE = path_kinds.values()["T5X"]["T5X, unwrapped"]
Change = Callable[[Any], Any]


def write(folder: Path, change: Change) -> None:
    """Writes version 3 and changes the content of its msgpack file."""
    folder.mkdir(exist_ok=True)
    path_kinds.BASES["T5X"](folder)
    content = change(serialization.msgpack_restore((folder / "checkpoint").read_bytes()))
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(content))


def of_version(version: int, key: str) -> Change:
    """The state below one key, or alone."""
    return lambda content: {"version": version, key: content["optimizer"]} if version else content["optimizer"]


def spec_of(content: Any) -> Any:
    """One of the specs."""
    return content["optimizer"]["target"]["params"]["w"]


def saved_at(**kvstore: str) -> Change:
    """The spec of a save to another place."""

    def change(content: Any) -> Any:
        name = spec_of(content)["kvstore"]["path"]
        spec_of(content)["kvstore"] = {"path": name} | {key: value.format(name) for key, value in kvstore.items()}
        return content

    return change


def path_of_the_array(content: Any) -> Any:
    """For buckets T5X gave the path to the driver of the array, not to that of the store."""
    spec_of(content)["path"] = spec_of(content)["kvstore"].pop("path")
    spec_of(content)["kvstore"] = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
    return content


@pytest.mark.parametrize(
    ("change", "key"),
    [
        *((of_version(version, key), key) for version in (1, 2, 3) for key in ("optimizer", "flax_optimizer")),
        (saved_at(driver="file", path="/cns/of/another/cell/checkpoint_1000.tmp-1646087643/{}/"), "optimizer"),
        (saved_at(driver="gcs", bucket="t5-data", path="pretrained_models/t5x/checkpoint_1000/{}"), "optimizer"),
        (path_of_the_array, "optimizer"),
    ],
)
def test_arrays_lie_beside_the_file(change: Change, key: str, tmp_path: Path) -> None:
    """Whatever the version, and the place of the save that the specs name: the folder may have been copied."""
    write(tmp_path / "moved", change)
    assert fingerprint(flax_ckpt_compat.restore(tmp_path / "moved")[key]) == fingerprint(STATE)


def test_the_oldest_version_is_the_state_alone(tmp_path: Path) -> None:
    """Version 0 has no number; its file is that of T5X all the same, which ``keep`` never counts."""
    for step in (1, 2):
        write(tmp_path / f"checkpoint_{step}", of_version(0, ""))
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path, None)) == fingerprint(STATE)
    checkpoints.save_checkpoint(tmp_path, {"w": np.ones(3)}, step=3, keep=1)
    assert {"checkpoint_1", "checkpoint_2", "checkpoint_3"} <= {path.name for path in tmp_path.iterdir()}


def test_a_spec_that_leads_elsewhere_reads_nothing_there(tmp_path: Path) -> None:
    """Only the last name of a path counts, and it is looked up beside the file."""
    for number, path in enumerate(("../outside_0", str(tmp_path / "outside_1"), "..")):
        write(tmp_path / str(number), saved_at(driver="file", path=path))
        (tmp_path / str(number) / "target.params.w").rename(tmp_path / f"outside_{number}")
        with pytest.raises(errors.CheckpointError):
            flax_ckpt_compat.restore(tmp_path / str(number))
