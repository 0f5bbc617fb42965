"""hf:// URLs, read from a hub on loopback with the client of Hugging Face."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.object_store.hub_and_epath import HubClient
from tests.support import hub as hubs
from tests.support.hub import Hub
from tests.support.layouts import assert_same

PARAMS = {"encoder": {"norm": {"scale": np.ones(4, np.float16)}}, "pooler": {"kernel": np.arange(6).reshape(3, 2)}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub to which the client is led, and a cache of its own; it reads the variables when it is imported."""
    if why := hubs.why_not():
        pytest.skip(why)
    with hubs.serving() as found, pytest.MonkeyPatch.context() as patch:
        from huggingface_hub import constants

        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, found.address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", found.address)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found


@pytest.fixture
def hub(server: Hub) -> Hub:
    """An empty repository."""
    import fsspec

    fsspec.get_filesystem_class("hf").clear_instance_cache()
    server.files.clear()
    return server


def put(hub: Hub, folder: Path, prefix: str = "") -> None:
    """Put the files of a folder into the repository."""
    for file in folder.rglob("*"):
        if file.is_file():
            hub.files[prefix + file.relative_to(folder).as_posix()] = file.read_bytes()


@pytest.mark.slow
def test_one_file(hub: Hub, tmp_path: Path) -> None:
    """Flax's file, safetensors and a file of another revision restore by their URLs."""
    hub.files["flax_model.msgpack"] = serialization.to_bytes(PARAMS)
    safetensors.numpy.save_file({"a.b": np.ones(3)}, tmp_path / "model.safetensors")
    put(hub, tmp_path)
    assert_same(flax_ckpt_compat.restore(f"{hub.url}/flax_model.msgpack"), PARAMS)
    assert_same(flax_ckpt_compat.restore(f"{hub.url}@main/flax_model.msgpack"), PARAMS)
    assert_same(flax_ckpt_compat.restore(f"{hub.url}/model.safetensors"), {"a": {"b": np.ones(3)}})
    with flax_ckpt_compat.open_checkpoint(f"{hub.url}/flax_model.msgpack") as view:
        assert view.leaves()["pooler/kernel"].shape == (3, 2)
    flax_ckpt_compat.convert(f"{hub.url}/flax_model.msgpack", tmp_path / "converted", "orbax")
    assert flax_ckpt_compat.diff(f"{hub.url}/flax_model.msgpack", tmp_path / "converted").same


@pytest.mark.slow
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_steps_of_a_manager(use_ocdbt: bool, hub: Hub, tmp_path: Path) -> None:
    """A run that was uploaded as it was restores by its folder, the latest step and another."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    for step in (1, 2):
        with ocp.Checkpointer(handler) as checkpointer:
            tree = {"w": jax.numpy.full(1000, step, "float32")}
            checkpointer.save(tmp_path / f"checkpoint_{step}", args=ocp.args.PyTreeSave(tree))
    put(hub, tmp_path, "run/")
    assert checkpoints.available_steps(f"{hub.url}/run") == [1, 2]
    for step in (1, 2):
        found = checkpoints.restore_checkpoint(f"{hub.url}/run", None, step=step)
        np.testing.assert_array_equal(found["w"], np.full(1000, step, np.float32))


def test_it_is_only_read(hub: Hub) -> None:
    """A save is refused before anything is written, and says what to do."""
    hub.files["a"] = b"x"
    with pytest.raises(errors.StorageError, match="hf:// is only read"):
        flax_ckpt_compat.save(f"{hub.url}/run/checkpoint_1", {"w": np.ones(2)})
    assert hub.files == {"a": b"x"}


def test_a_file_that_cannot_be_fetched_is_not_absent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, the client says that it finds no entry: in its cache."""
    import huggingface_hub

    missed = huggingface_hub.errors.LocalEntryNotFoundError("cannot find the requested files in the local cache")
    hub.files["run/checkpoint_1"] = serialization.to_bytes({"w": 1})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=missed))
    with pytest.raises(errors.StorageError, match=r"could not be read: .*and the network"):
        checkpoints.restore_checkpoint(f"{hub.url}/run", {"w": 2})


def test_what_is_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file or folder is missing; a missing repository is an error of every look-up."""
    hub.files["a"] = b"x"
    for path in (f"{hub.url}/none", f"{hub.url}/none/x.msgpack"):
        with pytest.raises(errors.CheckpointNotFoundError):
            flax_ckpt_compat.restore(path)
    with pytest.raises(errors.StorageError, match=r"could not be read: .*HF_TOKEN"):
        checkpoints.restore_checkpoint("hf://org/none/x", {"w": 1})
    missing = type("EntryNotFoundError", (Exception,), {})  # as for a folder that is not there
    monkeypatch.setattr("huggingface_hub.HfApi.get_paths_info", Mock(side_effect=missing))
    assert HubClient().find(f"{hub.url}/none") is None
