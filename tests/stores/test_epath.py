"""What a store is good for, in one of each kind: s3://, az://, and path classes that users register."""

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.object_store import hub_and_epath
from tests.support.layouts import assert_same
from tests.support.store_places import AnyBucket

TREE = {
    "params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "h": np.ones(5, ml_dtypes.bfloat16)},
    "step": 7,
    "name": "run",
    "large": np.arange(300_000, dtype=np.int32),
}


@pytest.fixture(params=["shelf", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bucket", "az_bucket"))])
def place(request: pytest.FixtureRequest) -> AnyBucket:
    """An empty place of each; of s3:// other files tell as much by default."""
    found: AnyBucket = request.getfixturevalue(request.param)
    return found


def test_saves_and_restores(place: AnyBucket, format: str) -> None:
    """All functions take the URL, as text and as an epath; look-ups, retention and overwriting are as elsewhere."""
    run = f"{place.url}/run"
    for step in (1, 2, 3):
        path = f"{run}/checkpoint_{step}"
        flax_ckpt_compat.save(epath.Path(path), {**TREE, "step": step}, format=format)
    assert checkpoints.latest_checkpoint(run) == f"{run}/checkpoint_3"
    assert checkpoints.available_steps(run) == [1, 2, 3]
    assert_same(flax_ckpt_compat.restore(run), {**TREE, "step": 3})
    assert_same(checkpoints.restore_checkpoint(epath.Path(run), {**TREE, "step": 0}, step=2), {**TREE, "step": 2})
    assert flax_ckpt_compat.plan_restore(run, TREE).format == format
    assert not flax_ckpt_compat.verify(run).damaged
    with flax_ckpt_compat.open_checkpoint(f"{run}/checkpoint_1") as view:
        assert view.read("params/w")["params"]["w"].tolist() == TREE["params"]["w"].tolist()
    with pytest.raises(errors.CheckpointError):
        flax_ckpt_compat.save(f"{run}/checkpoint_3", TREE, format=format)
    flax_ckpt_compat.save(f"{run}/checkpoint_3", {**TREE, "step": 33}, format=format, overwrite=True)
    assert_same(flax_ckpt_compat.restore(run), {**TREE, "step": 33})
    assert not [key for key in place.keys("run/") if layout.BEGUN in key]


def test_keep_and_overwrite(place: AnyBucket, flag: bool) -> None:
    """The drop-in functions leave what they leave on a disk."""
    run = f"{place.url}/run"
    for step in range(1, 5):
        checkpoints.save_checkpoint(run, TREE, step, keep=2)
    assert checkpoints.available_steps(run) == [3, 4]
    with pytest.raises(errors.InvalidCheckpointError):
        checkpoints.save_checkpoint(run, TREE, 2)
    checkpoints.save_checkpoint(run, {**TREE, "step": 2}, 2, overwrite=True)
    assert {key.split("/")[1] for key in place.keys("run/")} == {"checkpoint_2"}
    assert_same(checkpoints.restore_checkpoint(run, None), {**TREE, "step": 2})


def test_real_orbax_reads_what_is_uploaded(place: AnyBucket, tmp_path: Path) -> None:
    """A folder is what a save on a disk is, and ends with the file that Orbax writes last in stores."""
    flax_ckpt_compat.save(f"{place.url}/run/checkpoint_1", TREE, format="orbax")
    assert f"run/checkpoint_1/{layout.COMMIT_FILE}" in place.keys("run/")
    place.download("run/checkpoint_1", tmp_path / "here")
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "here")
    np.testing.assert_array_equal(found["params"]["w"], TREE["params"]["w"])


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_what_real_orbax_wrote(options: dict[str, Any], place: AnyBucket, tmp_path: Path) -> None:
    """Arrays with codecs, and arrays in files of their own restore as from a disk."""
    tree = {"w": jax.numpy.arange(1000.0), "b": np.ones((3, 2), np.int8)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "it", args=ocp.args.PyTreeSave(tree))
    place.upload(tmp_path / "it", "run/it")
    assert_same(flax_ckpt_compat.restore(f"{place.url}/run/it"), tree)


def test_an_upload_that_never_ended_counts_as_nothing(place: AnyBucket, caplog: pytest.LogCaptureFixture) -> None:
    """Look-ups skip it, and an empty file, with a warning that names both; an older complete step is the latest."""
    run = f"{place.url}/run"
    for step in (1, 2):
        flax_ckpt_compat.save(f"{run}/checkpoint_{step}", {**TREE, "step": step}, format="orbax")
    place.delete(f"run/checkpoint_2/{layout.COMMIT_FILE}")
    place.put(f"run/checkpoint_2/{layout.BEGUN}.{2**31}.{'0' * 32}", b"")
    place.put("run/checkpoint_3", b"")
    assert checkpoints.available_steps(run) == [1]
    assert_same(flax_ckpt_compat.restore(run), {**TREE, "step": 1})
    assert "checkpoint_2 (commit_success.txt is missing" in caplog.text
    assert "checkpoint_3 (the file is empty)" in caplog.text
    with pytest.raises(errors.IncompleteCheckpointError):
        flax_ckpt_compat.restore(f"{run}/checkpoint_2")


def test_other_layouts(place: AnyBucket, tmp_path: Path) -> None:
    """Files of other programs are read from there, too, and safetensors written."""
    np.savez(tmp_path / "a.npz", **{"a/b": np.ones(3)})
    place.put("models/a.npz", (tmp_path / "a.npz").read_bytes())
    place.put("models/flax_model.msgpack", serialization.to_bytes({"a": np.ones(2)}))
    assert_same(flax_ckpt_compat.restore(f"{place.url}/models/a.npz"), {"a": {"b": np.ones(3)}})
    (done,) = flax_ckpt_compat.convert(f"{place.url}/models/flax_model.msgpack", f"{place.url}/out/it", "orbax")
    assert done.error is None
    assert_same(flax_ckpt_compat.restore(f"{place.url}/out/it"), {"a": np.ones(2)})
    flax_ckpt_compat.convert(f"{place.url}/out/it", f"{place.url}/out/it.safetensors", "safetensors")
    assert_same(flax_ckpt_compat.restore(f"{place.url}/out/it.safetensors"), {"a": np.ones(2)})


def test_what_is_missing(place: AnyBucket) -> None:
    """A folder that is not there is one without checkpoints; nothing is taken for one that was lost."""
    assert checkpoints.restore_checkpoint(f"{place.url}/none", {"w": 1}) == {"w": 1}
    assert checkpoints.latest_checkpoint(f"{place.url}/none") is None
    assert checkpoints.available_steps(f"{place.url}/none") == []
    with pytest.raises(errors.CheckpointNotFoundError):
        flax_ckpt_compat.restore(f"{place.url}/none")


def test_what_others_change_is_seen_at_once(place: AnyBucket) -> None:
    """No cache of a client outlives it."""
    run = f"{place.url}/run"
    flax_ckpt_compat.save(f"{run}/checkpoint_1", TREE, format="msgpack")
    assert checkpoints.available_steps(run) == [1]
    place.put("run/checkpoint_2", place.get("run/checkpoint_1"))
    assert checkpoints.available_steps(run) == [1, 2]
    place.delete("run/checkpoint_2")
    assert checkpoints.available_steps(run) == [1]


def test_a_file_that_goes_between_two_looks(shelf: AnyBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missing, and there is nothing to delete."""
    shelf.put("a", b"x")
    monkeypatch.setattr(hub_and_epath, "_stat", lambda path: path.parent.joinpath("none").stat())
    client = hub_and_epath.EpathClient()
    assert client.find(f"{shelf.url}/a") is None
    assert client.delete(f"{shelf.url}/a") is False


def test_a_file_in_the_place_of_the_folder_stays(shelf: AnyBucket, flag: bool) -> None:
    """As on a disk: no folder of checkpoints can be where it is, and no checkpoint with it within is replaced."""
    shelf.put("exp/notes.txt", b"mine")
    with pytest.raises(errors.StorageError):
        checkpoints.save_checkpoint(f"{shelf.url}/exp/notes.txt", TREE, 1)
    assert shelf.get("exp/notes.txt") == b"mine"
    with pytest.raises(errors.StorageError, match="an orbax_checkpointer cannot save to an object store"):
        checkpoints.save_checkpoint(shelf.url, TREE, 1, orbax_checkpointer=ocp.PyTreeCheckpointer())
    flax_ckpt_compat.save(f"{shelf.url}/it", TREE, format="orbax")
    shelf.put("it/notes.txt", b"mine")
    with pytest.raises(errors.InvalidCheckpointError, match=r"it holds notes\.txt besides a checkpoint"):
        flax_ckpt_compat.save(f"{shelf.url}/it", TREE, overwrite=True)


@pytest.mark.slow
def test_a_container_that_is_not_there(az_bucket: AnyBucket) -> None:
    """It is an error, as a missing bucket is: a run must not begin anew for a typo."""
    assert az_bucket.keys() == []
    with pytest.raises(errors.StorageError, match="there is no bucket 'no-such-one'"):
        checkpoints.restore_checkpoint("az://no-such-one/run", {"w": 1})
