"""restore(): strict where nobody said otherwise, and whose word counts where somebody did."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints
from flax.training import train_state

from flax_ckpt_compat import checkpoints, config, errors, restore, save
from tests.support.samples import fingerprint
from tests.support.saves import run_python, save_items, tree, use_flag

STORED = {"a": np.arange(3, dtype=np.float32), "b": np.ones(2, np.int8)}
OTHER_SHAPE = {"a": np.zeros(4, np.float32), "b": np.zeros(2, np.int8)}
ONE_MORE = {**STORED, "c": np.full(1, 7.0)}


pytestmark = pytest.mark.usefixtures("nothing_set")


def state(step: int = 0) -> Any:
    """A TrainState."""
    params = {"w": jnp.full((2, 3), float(step)), "b": jnp.zeros(3, jnp.bfloat16)}
    return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1)).replace(step=step)


def test_checkpoints_of_real_flax(tmp_path: Path, flag: bool) -> None:
    """What Flax saved restores the same as by our restore_checkpoint: latest, a step, another prefix, one path."""
    with use_flag(flag):
        for step in (1, 2, 10):
            flax_checkpoints.save_checkpoint(tmp_path, state(step), step, prefix="m_", keep=9)
    for arguments in ({}, {"step": 2}, {"step": jnp.asarray(2)}, {"step": "10"}):
        mine = restore(tmp_path, state(), prefix="m_", **arguments)  # type: ignore[arg-type]
        theirs = checkpoints.restore_checkpoint(tmp_path, state(), prefix="m_", **arguments)  # type: ignore[arg-type]
        assert mine.step == (10 if arguments.get("step") in (None, "10") else 2)
        assert fingerprint(jax.tree.leaves(mine)) == fingerprint(jax.tree.leaves(theirs))
    for path in (tmp_path / "m_1", str(tmp_path / "m_1")):
        assert restore(path, state()).step == 1


def test_directories_of_real_orbax(tmp_path: Path) -> None:
    """A step of Orbax's CheckpointManager, with several items, comes as a dict of them; lists are lists."""
    trees = {name: ocp.args.StandardSave({"l": [np.ones(1), 2]}) for name in ("state", "ema")}
    save_items(tmp_path, **trees, note=ocp.args.JsonSave({"k": [1]}))
    restored = restore(tmp_path)
    assert restored.keys() == {"state", "ema", "note"} and restored["note"] == {"k": [1]}
    assert fingerprint(restore(tmp_path / "3" / "state")) == fingerprint(restored["state"])
    assert isinstance(restored["state"]["l"], list)


def test_what_was_set_beats_the_strict_defaults(tmp_path: Path, format: Any) -> None:
    """A block beats the process, the process beats the strict default, and an argument of the call beats them all."""
    save(tmp_path / "m", STORED, format=format)

    def is_strict(**arguments: Any) -> bool:
        try:
            return restore(tmp_path / "m", OTHER_SHAPE, **arguments) is None
        except errors.ShapeMismatchError:
            return True

    assert is_strict()
    with config.override(shape_mismatch="warn"):  # the very default of Flax's functions, but set on purpose
        assert not is_strict()
        with config.override(dtype="target"):
            assert not is_strict()
        assert is_strict(shape_mismatch="error")
    config.update(shape_mismatch="ignore")
    assert not is_strict() and is_strict(shape_mismatch="error")
    with config.override(shape_mismatch="error"):
        assert is_strict() and not is_strict(shape_mismatch="ignore")
    config.update(missing_leaves="ignore")
    assert fingerprint(restore(tmp_path / "m", ONE_MORE)) == fingerprint(ONE_MORE)
    with pytest.raises(errors.MissingLeavesError):
        restore(tmp_path / "m", ONE_MORE, missing_leaves="error")


ENVIRONMENT = """
import sys
import numpy as np
from flax_ckpt_compat import errors, restore
path, target = sys.argv[1], {"a": np.zeros(4, np.float32)}
print(restore(path + "/nowhere", target) is target, restore(path, target)["a"].shape)
try:
    restore(path, target, shape_mismatch="error")
except errors.ShapeMismatchError:
    print("refused")
try:
    restore(path + "/nowhere", must_exist=True)
except errors.CheckpointNotFoundError:
    print("not found")
print(restore(path)["a"])
"""


def test_environment_variables_beat_the_strict_defaults(tmp_path: Path) -> None:
    """A variable counts as set also where it names Flax's default; an argument of the call is stronger."""
    save(tmp_path, {"a": [1, 2]}, step=1, format="orbax")
    save(tmp_path, {"a": np.zeros(3, np.float32)}, step=2, format="orbax")
    variables = {"MUST_EXIST": "0", "SHAPE_MISMATCH": "warn", "STRUCTURE": "flax"}
    out, _ = run_python(ENVIRONMENT, tmp_path, **{f"FLAX_CKPT_COMPAT_{name}": text for name, text in variables.items()})
    assert out.splitlines()[:3] == ["True (3,)", "refused", "not found"]


def test_a_failed_background_save_is_told(tmp_path: Path) -> None:
    """restore() raises, once, what a save into the same place failed with that nobody waited for."""
    manager = checkpoints.AsyncManager()
    save(tmp_path / "m", tree(1), format="msgpack")
    save(tmp_path / "m" / "below", tree(2), format="msgpack", async_manager=manager)
    manager.executor.shutdown()
    with pytest.raises(errors.StorageError, match="check the path"):
        restore(tmp_path / "m")
    assert restore(tmp_path / "m")["n"] == 1


def test_transforms_reach_the_restore(tmp_path: Path, format: Any) -> None:
    """{} gives Orbax's ways with None, and the target's values for what the checkpoint lacks only if asked to."""
    save(tmp_path / "m", STORED, format=format)
    restored = restore(tmp_path / "m", ONE_MORE, transforms={}, missing_leaves="ignore")
    assert fingerprint(restored) == fingerprint(ONE_MORE)
    with pytest.raises(errors.MissingLeavesError):
        restore(tmp_path / "m", ONE_MORE, transforms={})
    assert restore(tmp_path / "m", dict.fromkeys(STORED), transforms={}) == dict.fromkeys(STORED)
