"""T5X's checkpoints (versions 0 to 3, 2021 to 2024): a msgpack file with a TensorStore spec for each array beside it.

`path_kinds.toml` has the newest as it was written; here are others, whose specs name other places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from tests.support import path_kinds
from tests.support.trees import fingerprint

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
