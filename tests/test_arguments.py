"""Arguments of odd kinds: what Flax takes works as there, and all else is an error of ours that names the argument."""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import errors as flax_errors
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import (
    checkpoints,
    config,
    convert,
    diff,
    errors,
    iter_checkpoints,
    open_checkpoint,
    plan_restore,
    restore,
    save,
    verify,
)
from tests.support.saves import names, tree, use_flag

TWO = np.array([True, False])


def deleted() -> jax.Array:
    """An array that was donated."""
    array = jnp.array(1)
    array.delete()
    return array


@pytest.mark.parametrize(
    "arguments",
    [
        {"overwrite": np.array(True)},
        {"overwrite": np.array([True])},
        {"overwrite": jnp.array(True)},
        {"overwrite": jnp.array(False)},
        {"overwrite": None},
        {"keep": np.array(3)},
        {"keep": jnp.array(3)},
        {"keep": 10**400},
        {"keep_every_n_steps": np.array(2)},
        {"keep_every_n_steps": np.array([2.0])},
        {"keep_every_n_steps": jnp.array(2)},
        {"keep_every_n_steps": 10**400},
        {"keep_every_n_steps": False},
        {"async_manager": 0},
        {"async_manager": ()},
        {"orbax_checkpointer": 0},
    ],
    ids=repr,
)
def test_saves_take_what_flax_takes(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """The same steps stay, and a step that exists is replaced or refused alike."""
    outcomes = []
    for module in (flax_checkpoints, checkpoints):
        folder, refused = tmp_path / module.__name__, False
        with use_flag(False):
            for step in (1, 2, 3, 4, 5):
                module.save_checkpoint(folder, tree(step), step, **{"keep": 2, **arguments})
            try:
                module.save_checkpoint(folder, tree(4), 4, **{"keep": 2, **arguments})
            except flax_errors.InvalidCheckpointError:
                refused = True
        outcomes.append((names(folder), refused))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("options", [{}, *({"gda_manager": manager} for manager in (0, False, ()))], ids=repr)
def test_no_manager_of_arrays(tmp_path: Path, options: dict[str, Any], flag: bool) -> None:
    """One process needs none, and what is false is none, as in Flax."""
    for module in (flax_checkpoints, checkpoints):
        with use_flag(flag):
            saved = module.save_checkpoint_multiprocess(tmp_path / module.__name__, tree(1), 1, **options)
        assert saved == str(tmp_path / module.__name__ / "checkpoint_1")
    assert names(tmp_path / flax_checkpoints.__name__) == names(tmp_path / checkpoints.__name__) == ["checkpoint_1"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"parallel": TWO[0]},
        {"parallel": "no"},
        {"gda_manager": 3},
        {"gda_manager": False},
        {"allow_partial_mpa_restoration": 3},
        {"orbax_checkpointer": False},
        {"orbax_checkpointer": ()},
    ],
    ids=repr,
)
def test_restores_take_what_flax_takes(tmp_path: Path, flag: bool, arguments: dict[str, Any]) -> None:
    """What a checkpoint does not need is not looked at, and what is false is not given."""
    with use_flag(flag):
        flax_checkpoints.save_checkpoint(tmp_path, tree(1), 1)
    for module in (flax_checkpoints, checkpoints):
        found = module.restore_checkpoint(tmp_path, tree(), **arguments)
        np.testing.assert_array_equal(found["w"], tree(1)["w"])


@pytest.mark.parametrize(
    "step_type",
    [int, float, str, Fraction, Decimal, np.int32, bool, list, lambda text: text],
    ids=lambda of: of.__name__,
)
def test_types_of_steps_that_flax_takes(tmp_path: Path, step_type: Any) -> None:
    """Any function of text."""
    assert checkpoints.available_steps(tmp_path, step_type=3) == []  # type: ignore[arg-type]
    assert flax_checkpoints.available_steps(tmp_path, step_type=3) == []
    for step in (1, 12):
        checkpoints.save_checkpoint(tmp_path, tree(step), step, keep=9)
    found = checkpoints.available_steps(tmp_path, step_type=step_type)
    assert found == flax_checkpoints.available_steps(tmp_path, step_type=step_type)
    assert list(map(type, found)) == list(map(type, flax_checkpoints.available_steps(tmp_path, step_type=step_type)))


HALF: Any = SimpleNamespace(wait_previous_save=bool)  # a manager that cannot save
STEP, SETTING, CHECKPOINTER, TRANSFORM = (
    errors.ArgumentError, errors.SettingError, errors.CheckpointerError, errors.TransformError,
)  # fmt: skip
# What is called in a folder with step 1 → class of the error, and what its message says.
REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "save overwrite": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, overwrite=TWO), STEP, "overwrite must"),
    "save overwrite deleted": (lambda at: save(at, tree(), step=2, overwrite=deleted()), STEP, "cannot be read"),
    "keep": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, keep=TWO), STEP, r"keep must .* shape \(2,\)"),
    "save overwrite text": (lambda at: checkpoints.save_checkpoint(at, tree(), 1, overwrite="no"), STEP, "found 'no'"),
    "save overwrite list": (lambda at: save(at, tree(), step=1, overwrite=[]), STEP, "overwrite must be True or False"),
    "keep bool": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, keep=True), STEP, "keep must be a number"),
    "keep false": (lambda at: save(at, tree(), step=2, keep=np.bool_(False)), STEP, "keep must be a number"),
    "keep text": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, keep="3"), STEP, "found '3'"),
    "every true": (lambda at: save(at, tree(), step=2, keep_every_n_steps=True), STEP, "every_n_steps must"),
    "convert resume": (lambda at: convert(at, at.with_name("b"), "orbax", resume="no"), STEP, "resume must be True"),
    "keep deleted": (lambda at: save(at, tree(), step=2, keep=deleted()), STEP, "keep cannot be read"),
    "keep list": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, keep=[1]), STEP, r"keep must .* \[1\]"),
    "keep complex": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, keep=2j), STEP, "keep must be a number"),
    "keep half": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, keep=np.array(1.5)), STEP, "whole number"),
    "keep less": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, keep=-(10**400)), STEP, "0 .* or more"),
    "every": (lambda at: save(at, tree(), step=2, keep_every_n_steps=TWO), STEP, "every_n_steps must"),
    "every text": (
        lambda at: checkpoints.save_checkpoint(at, tree(), 2, keep_every_n_steps="two"), STEP, "every_n_steps must",
    ),
    "step array": (
        lambda at: checkpoints.save_checkpoint(at, tree(), TWO),
        STEP,
        r"step must be one number, or an array of equal ones, found an array of shape \(2,\)$",
    ),
    "step bool": (
        lambda at: checkpoints.save_checkpoint(at, tree(), np.bool_(True)),
        STEP,
        "step must be an int, a float or a 0-d array of them, found True",
    ),
    "step date": (lambda at: save(at, tree(), step=np.datetime64("2026-01-01")), STEP, "step must be an int"),
    "step none": (lambda at: save(at, tree(), step=np.array(None)), STEP, "step must be an int"),
    "step object": (lambda at: checkpoints.save_checkpoint(at, tree(), object()), STEP, "step must be an int"),
    "manager": (lambda at: checkpoints.save_checkpoint(at, tree(), 2, async_manager=3), CHECKPOINTER, "AsyncManager"),
    "manager class": (
        lambda at: checkpoints.save_checkpoint(at, tree(), 2, async_manager=checkpoints.AsyncManager), CHECKPOINTER,
        r"AsyncManager\(\)",
    ),
    "manager half": (lambda at: save(at, tree(), step=2, async_manager=HALF), CHECKPOINTER, "async_manager must"),
    "manager orbax": (
        lambda at: checkpoints.save_checkpoint_multiprocess(at, tree(), 2, async_manager=ocp.PyTreeCheckpointer()),
        CHECKPOINTER, "async_manager must",
    ),
    "gda manager": (
        lambda at: checkpoints.save_checkpoint_multiprocess(at, tree(), 2, gda_manager=3), CHECKPOINTER, "gda_manager",
    ),
    "checkpointer": (
        lambda at: checkpoints.save_checkpoint(at, tree(), 2, orbax_checkpointer=3), CHECKPOINTER, "orbax_checkpointer",
    ),
    "target": (lambda at: checkpoints.save_checkpoint(at, print, 2), errors.UnsupportedLeafError, "builtin_function"),
    "target class": (lambda at: save(at, dict, step=2), errors.UnsupportedLeafError, "<root>"),
    "target generator": (lambda at: save(at, iter([1]), step=2), errors.UnsupportedLeafError, "<root>"),
    "format": (lambda at: save(at, tree(), step=2, format=TWO), SETTING, "format takes"),
    "compression": (lambda at: save(at, tree(), step=2, compression=TWO), SETTING, "compression takes"),
    "restore step": (lambda at: checkpoints.restore_checkpoint(at, tree(), step=TWO), STEP, "step must be one number"),
    "restore transforms": (
        lambda at: checkpoints.restore_checkpoint(at, tree(), orbax_transforms=3), TRANSFORM, "transforms",
    ),
    "restore transforms array": (
        lambda at: checkpoints.restore_checkpoint(at, tree(), orbax_transforms=TWO), TRANSFORM, "transforms",
    ),
    "restore text": (lambda at: restore(at, tree(), transforms="n"), TRANSFORM, "transforms"),
    "original": (
        lambda at: restore(at, tree(), transforms={}, transforms_default_to_original=TWO), STEP, "default_to_original",
    ),
    "must_exist": (lambda at: restore(at, tree(), must_exist=TWO), SETTING, r"must_exist takes False, True; .*\(2,\)"),
    "must_exist deleted": (lambda at: restore(at, tree(), must_exist=deleted()), SETTING, "must_exist takes"),
    "dtype": (lambda at: plan_restore(at, tree(), dtype=np.array(["stored", "target"])), SETTING, "dtype takes"),
    "structure": (lambda at: restore(at, structure="x"), SETTING, "setting structure takes "),
    "missing": (lambda at: restore(at.with_name("nowhere"), missing_leaves="kepe"), SETTING, "missing_leaves takes "),
    "shape": (lambda at: restore(at.with_name("nowhere"), shape_mismatch="raise"), SETTING, "shape_mismatch takes "),
    "dtype class": (lambda at: plan_restore(at, tree(), dtype=np.float32), SETTING, "dtype takes"),
    "update": (lambda _: config.update("must_exist", TWO), SETTING, "must_exist takes"),
    "update seconds": (lambda _: config.update(coordination_timeout=TWO), SETTING, "coordination_timeout takes"),
    "update name": (lambda _: config.update(3, 4), SETTING, "a setting's name and its value"),
    "step type": (lambda at: checkpoints.available_steps(at, step_type=3), STEP, "pass step_type=float"),
    "step type none": (lambda at: checkpoints.available_steps(at, step_type=None), STEP, "pass step_type=float"),
    "open step": (lambda at: open_checkpoint(at, step=TWO), STEP, "step must be one number"),
    "read": (lambda at: open_checkpoint(at).read(3), STEP, "a leaf's path is text .* 3"),
    "read list": (lambda at: open_checkpoint(at).read(["n", 3]), STEP, "a leaf's path is text .* 3"),
    "read bytes": (lambda at: open_checkpoint(at).read(b"n"), STEP, "a leaf's path is text"),
    "read array": (lambda at: open_checkpoint(at).read(np.array(1)), STEP, "a leaf's path is text"),
    "diff": (lambda at: diff(at, at, rtol=TWO), SETTING, "rtol takes"),
    "diff endless": (lambda at: diff(at, at, atol=10**400), SETTING, "atol takes"),
    "diff step": (lambda at: diff(at, at, step=TWO), STEP, "step must be one number"),
    "verify progress": (lambda at: verify(at, progress=3), STEP, "progress must be a function"),
    "verify step": (lambda at: verify(at, step=TWO), STEP, "step must be one number"),
    "convert to": (lambda at: convert(at, at.with_name("b"), TWO), SETTING, "to takes"),
    "convert progress": (lambda at: convert(at, at.with_name("b"), "orbax", progress=3), STEP, "progress must be"),
    "convert executor": (lambda at: convert(at, at.with_name("b"), "orbax", executor=3), SETTING, "executor takes"),
    "convert flag": (lambda at: convert(at, at.with_name("b"), "orbax", dry_run=TWO), STEP, "dry_run must"),
    "convert step": (lambda at: convert(at, at.with_name("b"), "orbax", step=TWO), STEP, "step must be one number"),
    "convert target": (lambda at: convert(at, at.with_name("b"), "orbax", target="n"), SETTING, "is not module:name"),
    "list": (lambda at: list(iter_checkpoints(at, prefix=3)), STEP, "a prefix is text"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_takes(tmp_path: Path, name: str) -> None:
    """The error is ours, says what to pass, and nothing was written or removed."""
    checkpoints.save_checkpoint(tmp_path, tree(1), 1)
    call, kind, told = REFUSED[name]
    with pytest.raises(kind, match=re.compile(told)):
        call(tmp_path)
    assert names(tmp_path) == ["checkpoint_1"]


@pytest.mark.parametrize("given", [np.True_, np.array(True), jnp.array(True), 1], ids=repr)
def test_arrays_as_settings(given: Any) -> None:
    """An array of one value counts as it; what is in force is Python's."""
    with config.override(must_exist=given, coordination_timeout=np.float32(2.5), dtype=np.str_("target")) as settings:
        assert settings.must_exist is True
        assert (type(settings.coordination_timeout), settings.coordination_timeout) == (float, 2.5)
        assert type(settings.dtype) is str
