"""Steps of Pax and levanter: zarr arrays whose names spell the tree. TensorStore writes them here as these do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import traverse_util
from jax.experimental.array_serialization import serialization as jax_serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from tests.support.layouts import assert_every_function_reads, assert_same

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


def test_pax_is_never_removed(tmp_path: Path) -> None:
    """It was complete for look-ups, and `keep` neither counts nor removes it."""
    for step in (1, 2):
        write_pax(tmp_path / f"checkpoint_{step:08}")
    for step in (3, 4):
        checkpoints.save_checkpoint(tmp_path, {"w": np.ones(2)}, step, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_00000001", "checkpoint_00000002", "checkpoint_4"}


@pytest.mark.parametrize("database", [False, True], ids=["folders", "OCDBT"])
def test_levanter(database: bool, tmp_path: Path) -> None:
    """The paths of folders, or the keys of the database, are key paths."""
    write_levanter(tmp_path / "step-7", database=database)
    assert_every_function_reads(tmp_path / "step-7", LEVANTER, "levanter", tmp_path / "converted")


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
    found = flax_ckpt_compat.restore(Path(__file__).parents[1] / "data" / "layouts" / "levanter_1.1" / "step-7")
    layers = {"0": np.ones(2, np.float32), "1": np.zeros(3, np.float32)}
    model = {"layers": layers, "w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert_same(found, {"model": model, "n": np.ones((2, 3), np.float32), "step": np.array(7, np.int32)})
