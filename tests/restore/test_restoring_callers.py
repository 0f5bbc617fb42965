"""How callers of Flax call restore_checkpoint: idioms of public code, paths, steps, and settings."""

import os
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat.errors import CheckpointNotFoundError
from tests.support.samples import fingerprint
from tests.support.saves import Save, use_flag


def test_mlcommons_idiom(save: Save, flag: bool, tmp_path: Path) -> None:
    """None in the target takes the raw stored value (a tuple as a dict), int sentinels come back as ints."""
    results = ({"loss": 0.5}, {"loss": 0.25})
    saved = {"model_params": {"w": np.ones(2)}, "global_step": 7, "preemption_count": 0, "eval_results": results}
    save(tmp_path, saved, 7, keep=np.inf, overwrite=True)
    target = {"model_params": {"w": np.zeros(2)}, "global_step": -1, "preemption_count": 0, "eval_results": None}
    latest = checkpoints.restore_checkpoint(tmp_path, target=target)
    assert [value["loss"] for _, value in latest["eval_results"].items()] == [0.5, 0.25]
    assert latest["global_step"] != -1
    assert os.path.exists(tmp_path / ("checkpoint_" + str(latest["global_step"])))


def test_vision_transformer_idiom(save: Save, flag: bool, tmp_path: Path) -> None:
    """A tuple target with a Python int restores as a tuple that unpacks."""
    save(tmp_path, ({"w": np.ones(2)}, (np.zeros(1),), 5), 5)
    params, opt_state, step = checkpoints.restore_checkpoint(tmp_path, ({"w": np.zeros(2)}, (np.ones(1),), 0))
    assert step == 5 and type(step) is int and params["w"].sum() == 2 and type(opt_state) is tuple


def test_scenic_idiom(save: Save, flag: bool, tmp_path: Path) -> None:
    """restore_checkpoint(path, None, step) takes the step by position; the checkpoint's own path works, too."""
    for step in (1, 2):
        save(tmp_path, {"optimizer": {"target": {"w": np.full(2, step)}}}, step, keep=2)
    assert checkpoints.restore_checkpoint(tmp_path, None, 1)["optimizer"]["target"]["w"].tolist() == [1, 1]
    path = str(tmp_path / "checkpoint_1")
    assert checkpoints.restore_checkpoint(path, target=None)["optimizer"]["target"]["w"].tolist() == [1, 1]


def test_steps_of_any_number_type(flag: bool, tmp_path: Path) -> None:
    """A step to restore may be a numpy or jax scalar, 0 included."""
    for step in (0, 1, 2.5):
        checkpoints.save_checkpoint(tmp_path, {"s": step}, step, keep=9)
    for step, expected in ((np.int32(0), 0), (jnp.int32(1), 1), (np.array(1), 1), (2.5, 2.5), (0, 0)):
        assert checkpoints.restore_checkpoint(tmp_path, None, step=step)["s"] == expected


def test_a_missing_step(flag: bool, tmp_path: Path) -> None:
    """A step that is not there is Flax's ValueError, with the steps that are."""
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, {"s": step}, step, keep=9)
    with pytest.raises(ValueError, match=r"^Matching checkpoint not found: .*checkpoint_3 .*1, 2") as caught:
        checkpoints.restore_checkpoint(tmp_path, None, step=3)
    assert isinstance(caught.value, CheckpointNotFoundError) and isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("form", ["relative", "slash", "PathLike", "link"])
def test_forms_of_paths(form: str, flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, trailing slashes, PathLikes and linked directories restore."""
    checkpoints.save_checkpoint(tmp_path / "dir", {"a": 1}, 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("dir")
    path: Any = {"relative": "dir", "slash": "./dir/", "PathLike": tmp_path / "dir", "link": "link"}[form]
    assert checkpoints.restore_checkpoint(path, {"a": 0}) == {"a": 1}
    assert checkpoints.restore_checkpoint(f"{path}/checkpoint_1", {"a": 0}) == {"a": 1}


def test_the_flag_plays_no_part(tmp_path: Path) -> None:
    """Both formats restore with either flag, by step and as the latest of both."""
    for step, value in enumerate((False, True, False)):
        with use_flag(value):
            checkpoints.save_checkpoint(tmp_path, {"s": step}, step, keep=9)
    for value in (False, True):
        with use_flag(value):
            assert [checkpoints.restore_checkpoint(tmp_path, None, s)["s"] for s in range(3)] == [0, 1, 2]
            assert checkpoints.restore_checkpoint(tmp_path, None)["s"] == 2


def test_falsy_targets(flag: bool, tmp_path: Path) -> None:
    """Falsy targets, and those whose truth is ambiguous, are targets: 0, an empty string, arrays, containers."""
    for tree, target in ((3, 0), ("x", ""), (np.ones(3), np.zeros(3)), ({}, {}), ((), ()), ([], [])):
        checkpoints.save_checkpoint(tmp_path, tree, 1, overwrite=True)
        assert fingerprint(checkpoints.restore_checkpoint(tmp_path, target)) == fingerprint(tree)


def test_structure_stored(flag: bool, tmp_path: Path) -> None:
    """Without a target lists and tuples are dicts, as in Flax; structure=stored gives back what the format records."""
    tree = {"l": [1, {"x": [2]}], "t": (3, 4), "i": {7: 5}}
    checkpoints.save_checkpoint(tmp_path, tree, 1)
    plain = {"l": {"0": 1, "1": {"x": {"0": 2}}}, "t": {"0": 3, "1": 4}, "i": {"7": 5}}
    assert checkpoints.restore_checkpoint(tmp_path, None) == plain
    with config.override(structure="stored"):
        assert checkpoints.restore_checkpoint(tmp_path, None) == (tree if flag else plain)


def test_nothing_is_warned(save: Save, flag: bool, tmp_path: Path) -> None:
    """Restoring issues no Python warnings, also where it has something to say: that is logged."""
    save(tmp_path, {"a": np.ones(2), "b": jnp.ones(2), "extra": 1}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.restore_checkpoint(tmp_path, None)
        checkpoints.restore_checkpoint(tmp_path, {"a": np.ones(3), "b": jnp.ones(2)})
        checkpoints.restore_checkpoint(tmp_path / "gone", None)


def test_a_background_save_is_waited_for_by_nobody_else(flag: bool, tmp_path: Path) -> None:
    """A restore of a finished checkpoint works while another save into the directory is on its way."""
    checkpoints.save_checkpoint(tmp_path, {"s": 1}, 1, keep=5)
    manager = checkpoints.AsyncManager()
    checkpoints.save_checkpoint(tmp_path, {"s": np.ones(10**6)}, 2, keep=5, async_manager=manager)
    assert checkpoints.restore_checkpoint(tmp_path, None, step=1) == {"s": 1}
    manager.wait_previous_save()
    manager.executor.shutdown()
