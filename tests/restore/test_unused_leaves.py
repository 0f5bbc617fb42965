"""Stored leaves that a restore does not give, ``...`` in a target, and PRNG keys that this jax does not know."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, errors, rules
from flax_ckpt_compat.errors import UnsupportedLeafError
from tests.support.logs import warnings_logged
from tests.support.peers import skip_without_typed_keys
from tests.support.saves import use_flag

LOGGER = "flax_ckpt_compat"
TREE = {
    "params": {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)},
    "opt": {"mu": np.ones(2)},
    "step": 3,
}
PART = {"params": {"w": np.zeros((2, 3), np.float32)}, "step": 0}


@pytest.fixture(params=["msgpack", "orbax"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A saved tree, in each format."""
    flax_ckpt_compat.save(tmp_path / "saved", TREE, format=request.param)
    return tmp_path / "saved"


def test_a_part_is_no_error_unless_asked_for(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A target may ask for the parameters alone; each policy does what it says, in the restore and in the plan."""
    for policy in (None, "auto", "warn", "ignore"):
        caplog.clear()
        with caplog.at_level(logging.INFO, LOGGER):
            found = flax_ckpt_compat.restore(path, PART, unused_leaves=policy)
        assert found["step"] == 3 and np.array_equal(found["params"]["w"], TREE["params"]["w"])
        (line,) = [record for record in caplog.records if "not in the target, dropped" in record.message]
        assert "params/b" in line.message and "opt/mu" in line.message
        assert line.levelno == (logging.WARNING if policy == "warn" else logging.INFO)
        assert flax_ckpt_compat.plan_restore(path, PART, unused_leaves=policy).raises is None
    with pytest.raises(errors.UnusedLeavesError, match="2 leaves that the target lacks") as caught:
        flax_ckpt_compat.restore(path, PART, unused_leaves="error")
    message = str(caught.value)
    assert "params/b" in message and "opt/mu" in message and "unused_leaves='ignore'" in message
    assert flax_ckpt_compat.plan_restore(path, PART, unused_leaves="error").raises == "UnusedLeavesError"
    dropped = [rules.drop("params/b", "opt")]  # as the message says
    assert "rules.drop(" in message
    assert flax_ckpt_compat.restore(path, PART, unused_leaves="error", transforms=dropped)["step"] == 3


def test_the_setting_is_of_both_functions(path: Path) -> None:
    """Flax's function raises, too, if it is told to; a whole target, and none, are no error."""
    with config.override(unused_leaves="error"):
        for restore in (flax_ckpt_compat.restore, checkpoints.restore_checkpoint):
            with pytest.raises(errors.UnusedLeavesError):
                restore(path, PART)
            assert restore(path, TREE)["step"] == 3
            assert restore(path, None)["step"] == 3
    with pytest.raises(errors.SettingError, match="unused_leaves takes 'auto', 'error', 'warn', 'ignore'"):
        flax_ckpt_compat.restore(path, PART, unused_leaves="keep")  # type: ignore[arg-type]


def test_what_holds_no_value_is_not_unused(tmp_path: Path) -> None:
    """None and empty containers are nothing to lose."""
    flax_ckpt_compat.save(tmp_path / "saved", {"a": np.ones(2), "none": None, "empty": {}}, format="msgpack")
    flax_ckpt_compat.restore(tmp_path / "saved", {"a": np.zeros(2)}, unused_leaves="error")


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_longer_list_of_layers_is_a_longer_sequence(tmp_path: Path, format: Any) -> None:
    """The error is that of sequences, whose remedy works."""
    had, has = ([{"w": np.full(2, layer), "b": np.ones(3)} for layer in range(count)] for count in (16, 12))
    flax_ckpt_compat.save(tmp_path / "saved", {"blocks": had}, format=format)
    with pytest.raises(errors.KindMismatchError, match="a sequence of 16 entries"):
        flax_ckpt_compat.restore(tmp_path / "saved", {"blocks": has})
    found = flax_ckpt_compat.restore(tmp_path / "saved", {"blocks": has}, kind_mismatch="warn")
    jax.tree.map(np.testing.assert_array_equal, found["blocks"], had[:12])


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_count_of_a_schedule_is_named_when_it_is_dropped(
    tmp_path: Path, format: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A constant rate in place of a schedule loses the step of the schedule, and says so, in either function."""
    params = {"w": jnp.ones(3)}
    saved = optax.sgd(optax.linear_schedule(1.0, 0.1, 10)).init(params)
    target = optax.sgd(0.1).init(params)
    flax_ckpt_compat.save(tmp_path / "saved", {"params": params, "opt": saved}, format=format)
    for restore in (flax_ckpt_compat.restore, checkpoints.restore_checkpoint):
        caplog.clear()
        with caplog.at_level(logging.WARNING, LOGGER):
            restore(tmp_path / "saved", {"params": params, "opt": target})
        assert "the step of a schedule, which is dropped: opt/1/count" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, LOGGER):
        flax_ckpt_compat.restore(tmp_path / "saved", {"params": params})  # without an optimizer, there is no schedule
        flax_ckpt_compat.restore(tmp_path / "saved", {"params": params, "opt": target}, unused_leaves="ignore")
    assert not caplog.records


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_fields_that_another_optimizer_lacks(tmp_path: Path, format: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Lion's state is no part of Adam's, whose second moments it lacks; a rule carries over what both have."""
    params = {"w": jnp.ones(3)}
    target = optax.scale_by_lion().init(params)
    flax_ckpt_compat.save(tmp_path / "saved", optax.scale_by_adam().init(params), format=format)
    with pytest.raises(errors.KindMismatchError, match="target one without nu"):
        flax_ckpt_compat.restore(tmp_path / "saved", target)
    with caplog.at_level(logging.WARNING, LOGGER):
        checkpoints.restore_checkpoint(tmp_path / "saved", target)
    assert "target one without nu" in caplog.text
    caplog.clear()
    flax_ckpt_compat.restore(tmp_path / "saved", target, transforms=[rules.drop("nu")])
    assert not caplog.records


@pytest.mark.parametrize("restore", [flax_ckpt_compat.restore, checkpoints.restore_checkpoint])
def test_an_ellipsis_leaves_what_is_there_unread(path: Path, restore: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of a leaf, a subtree, and what is not stored; as real Orbax takes it, it comes back as it is."""
    assert getattr(ocp, "PLACEHOLDER", ...) is ...
    target = {"params": {"w": np.zeros((2, 3), np.float32), "b": ...}, "opt": ..., "step": 0, "new": ...}
    with caplog.at_level(logging.INFO, LOGGER), config.override(unused_leaves="error"):
        found = restore(path, target)
    assert found["params"]["b"] is ... and found["opt"] is ... and found["new"] is ...
    assert (found["step"], found["params"]["w"].sum()) == (3, 6)
    assert "dropped" not in caplog.text
    assert restore(path, ...) is ...


def test_an_ellipsis_in_a_plan_and_with_rules(path: Path) -> None:
    """The plan reads nothing for it; rules give it nothing."""
    target = {"params": {"w": np.zeros((2, 3), np.float32), "b": ...}, "opt": ..., "step": 0}
    plan = flax_ckpt_compat.plan_restore(path, target)
    assert plan.raises is None and plan.unused == ()
    assert {leaf.path for leaf in plan.leaves if leaf.origin in ("stored", "checkpoint")} <= {"params/w", "step"}
    found = flax_ckpt_compat.restore(path, target, transforms=[rules.cast("params", "float16")])
    assert found["params"]["b"] is ... and found["params"]["w"].dtype == np.float16


@pytest.mark.skipif(not hasattr(ocp, "PLACEHOLDER"), reason="this Orbax has no placeholder")
def test_an_ellipsis_is_what_real_orbax_gives(tmp_path: Path) -> None:
    """Real Orbax leaves the placeholder in place, too."""
    tree = {"a": np.arange(3), "b": {"c": np.ones(2)}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        target = {"a": ..., "b": {"c": np.zeros(2)}}
        theirs = checkpointer.restore(tmp_path / "saved", args=ocp.args.PyTreeRestore(target))
    ours = flax_ckpt_compat.restore(tmp_path / "saved", target)
    assert theirs["a"] is ... and ours["a"] is ...
    np.testing.assert_array_equal(ours["b"]["c"], theirs["b"]["c"])


DATA = np.arange(2, dtype=np.uint32)


@pytest.fixture(params=["msgpack", "orbax"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose key is of an implementation of somebody's own."""
    skip_without_typed_keys()
    tree = {"array": np.arange(3), "key": jax.random.wrap_key_data(DATA, impl="threefry2x32")}
    with use_flag(request.param == "orbax"), config.override(checksums="off"):
        checkpoints.save_checkpoint(tmp_path, tree, 1)
    changed = 0
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        before = file.read_bytes()
        file.write_bytes(before.replace(b"threefry2x32", b"theirown2x32"))
        changed += b"threefry2x32" in before
    assert changed
    return tmp_path


def _assert_rest(restored: Any) -> None:
    assert restored["array"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("target", [None, {"array": np.zeros(3, int), "key": np.zeros(2, np.uint32)}], ids=str)
def test_the_rest_restores_and_the_key_as_data(saved: Path, target: Any) -> None:
    """Without a target, or into raw data, nothing is lost; it is warned of."""
    with warnings_logged() as logged:
        restored = checkpoints.restore_checkpoint(saved, target)
    _assert_rest(restored)
    assert type(restored["key"]) is np.ndarray and restored["key"].dtype == np.uint32
    assert restored["key"].tolist() == DATA.tolist()
    assert sum("'key' is a PRNG key of the implementation 'theirown2x32'" in text for text in logged) == 1


def test_a_typed_target_is_an_error(saved: Path) -> None:
    """Nothing makes such a key here; the error names leaf, implementation and remedy, in both ways to restore."""
    target = {"array": np.zeros(3, int), "key": jax.random.key(0)}
    for restore in (checkpoints.restore_checkpoint, flax_ckpt_compat.restore):
        with pytest.raises(UnsupportedLeafError, match=r"'key'.*'theirown2x32'.*uint32 array") as caught:
            restore(saved, target)
        assert caught.value.leaf == "key"


def test_a_target_without_it_never_asks(saved: Path) -> None:
    """A key that nobody wants is nobody's problem."""
    with warnings_logged() as logged:
        _assert_rest(checkpoints.restore_checkpoint(saved, {"array": np.zeros(3, int)}))
    assert not any("theirown" in text for text in logged)


def test_a_view_reads_the_data(saved: Path) -> None:
    """So does looking into it."""
    with flax_ckpt_compat.open_checkpoint(saved) as view, warnings_logged():
        restored = view.read()
    _assert_rest(restored)
    assert np.asarray(restored["key"]).tolist() == DATA.tolist()
