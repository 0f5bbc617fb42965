"""Where checkpoint and target differ: every policy of the contract, and stored leaves that a restore does not give."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import train_state

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, errors, plan_restore, restore, rules
from flax_ckpt_compat.errors import (
    CheckpointError,
    KindMismatchError,
    MissingLeavesError,
    ShapeMismatchError,
    UnsupportedLeafError,
)
from flax_ckpt_compat.transforms import Transform
from tests.support.logs import warnings_logged
from tests.support.peers import skip_without_typed_keys
from tests.support.samples import Fields, Pair, Serialized, fingerprint
from tests.support.saves import Save, use_flag


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the library logs, info included."""
    caplog.set_level(logging.INFO, "flax_ckpt_compat")
    return caplog


def lines(log: pytest.LogCaptureFixture, level: int) -> list[str]:
    """The messages of our logger at a level."""
    return [r.getMessage() for r in log.records if r.name == "flax_ckpt_compat" and r.levelno == level]


KEYS = jax.random.split(jax.random.key(0), 3)
DENSE = {"kernel": np.ones(2), "bias": np.zeros(2)}
MORE = {"Dense_0": {"kernel": np.ones(2), "scale": np.full(2, 9.0)}, "Dense_1": {"bias": np.ones(2)}}
SHAPES = {"a": np.arange(3), "b": {"c": jnp.ones((2, 2))}, "same": np.ones(1), "k": KEYS, "one": KEYS[0]}
# Policy → the error, what is stored, the target, what is restored on request, and what error and warning say.
DIFFERENCES: dict[str, tuple[type[Exception], Any, Any, Any, list[str]]] = {
    "missing_leaves": (
        MissingLeavesError,
        {"params": {"Dense_0": DENSE}, "step": 3},
        {"params": jax.tree.map(np.copy, MORE) | {"Dense_0": {"kernel": np.zeros(2), "scale": np.full(2, 9.0)}}},
        {"params": MORE},
        ["params/Dense_0/scale", "params/Dense_1/bias"],
    ),
    "shape_mismatch": (
        ShapeMismatchError,
        SHAPES,
        SHAPES | {"a": np.zeros(5, int), "b": {"c": jnp.zeros(1)}, "k": KEYS[:2]},
        SHAPES,
        ["a: stored (3,), target (5,)", "b/c: stored (2, 2), target (1,)", "k: stored"],
    ),
    "kind_mismatch": (
        KindMismatchError,
        {"i": 1, "z": jnp.ones(()), "t": "text"},
        {"i": np.zeros(3), "z": 0, "t": np.zeros(2)},
        {"i": 1, "z": jnp.ones(()), "t": "text"},
        ["i: stored a number (int), target an array (3,) float64", "t: stored text"],
    ),
}


@pytest.mark.parametrize("policy", DIFFERENCES)
def test_policies(policy: str, save: Save, flag: bool, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """What differs is an error that names it and the remedy, a warning, or nothing, as the argument or setting says.

    By default `restore` raises, and Flax's function does for missing leaves alone. Shapes are never padded or cut."""
    kind, stored, target, expected, texts = DIFFERENCES[policy]
    # Flax saves no typed keys, and real Orbax numbers as arrays.
    path = (save if policy == "missing_leaves" else checkpoints.save_checkpoint)(tmp_path, stored, 1)

    def as_set(**given: Any) -> Any:
        with config.override(**given):
            return checkpoints.restore_checkpoint(tmp_path, target)

    def as_asked(**given: Any) -> Any:
        return restore(tmp_path, target, **given)

    for call in (as_asked, as_set):
        defaults: list[dict[str, Any]] = [{}] if call is as_asked or policy == "missing_leaves" else []
        for given in [*defaults, {policy: "error"}]:
            with pytest.raises(kind) as caught:
                call(**given)
            assert all(text in str(caught.value) for text in [path, *texts])
            assert "returned" not in str(caught.value) and f"{policy}='" in str(caught.value)
        for given in [*([{}] if not defaults else []), {policy: "warn"}, {policy: "ignore"}]:
            log.clear()
            assert fingerprint(call(**given)) == fingerprint(expected)
            warnings = [line for line in lines(log, logging.WARNING) if texts[0] in line]
            assert len(warnings) == (given.get(policy) != "ignore")
            assert all(text in warning and "same" not in warning for warning in warnings for text in texts)
    plan = plan_restore(tmp_path, target)
    assert plan.raises == kind.__name__ and plan_restore(tmp_path, target, **{policy: "ignore"}).raises is None
    assert config.current() == config.Settings()


@pytest.mark.parametrize("target_tx", [optax.sgd(0.1, momentum=0.9), optax.chain(optax.clip(1.0), optax.adam(1e-3))])
def test_another_optimizer_is_an_error(target_tx: Any, save: Save, flag: bool, tmp_path: Path) -> None:
    """An Adam checkpoint does not restore into another optimizer's state by keeping its zeros."""

    def state(tx: Any) -> Any:
        return train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)

    adam = state(optax.adam(1e-3)).apply_gradients(grads={"w": jnp.ones(2)})
    save(tmp_path, adam, 1)
    with pytest.raises(MissingLeavesError, match="opt_state"):
        checkpoints.restore_checkpoint(tmp_path, state(target_tx))
    restored = checkpoints.restore_checkpoint(tmp_path, state(optax.adam(1e-3)))
    np.testing.assert_array_equal(restored.opt_state[0].mu["w"], adam.opt_state[0].mu["w"])


@pytest.mark.parametrize("container", [dict, Fields, Pair, list, tuple])
def test_extra_leaves_are_dropped(
    container: Any, save: Save, flag: bool, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Stored leaves that the target lacks are dropped, whatever container it is, with one info line naming them.

    Restore refuses, and restore_checkpoint warns, where the end of a sequence or a field of another type is lost.
    """
    make = {dict: lambda *v: dict(zip("abc", v, strict=False)), list: lambda *v: list(v), tuple: lambda *v: v}
    if container in make:
        save(tmp_path, {"x": make[container](1, 2, 3), "more": {"y": 4}}, 1)
        target = {"x": make[container](0, 0)}
        expected = {"x": make[container](1, 2)}
    else:
        names = ("first", "second") if container is Fields else ("left", "right")
        save(tmp_path, {"x": {names[0]: 1, names[1]: 2, "z": 3}, "more": {"y": 4}}, 1)
        target, expected = {"x": container(0, 0)}, {"x": container(1, 2)}
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path, target)) == fingerprint(expected)
    dropped = [line for line in lines(log, logging.INFO) if ": not in the target, dropped: " in line]
    assert len(dropped) == 1 and "more/y" in dropped[0]
    warnings = lines(log, logging.WARNING)
    named = container in (Fields, Pair)
    told = "target one without z" if named else "target one of 2, which drops the last entry"
    assert [told in text for text in warnings] == ([] if container is dict else [True])
    if container is not dict:
        with pytest.raises(KindMismatchError, match=told):
            restore(tmp_path, target)
        taken = {"y": Transform(original_key="x/z" if named else "x/2")}
        assert restore(tmp_path, {**target, "y": 0}, transforms=taken)["y"] == 3


NONES = dict.fromkeys("anc")
RAW = {"a": {"b": {"0": np.ones(2), "1": 1}}, "n": None, "c": 5}
NAMEDTUPLE = {"name": "Pair", "fields": {"0": "left", "1": "right"}, "values": {"0": np.ones(2), "1": 5}}
# What is stored, the target, what is restored, or the leaf that is missing; and the same with orbax_transforms={}.
OVER: dict[str, tuple[Any, ...]] = {
    "None takes what is stored": ({**RAW, "a": {"b": [np.ones(2), 1]}}, NONES, RAW, NONES),
    "a stored None": ({"a": None, "b": 1}, {"a": 5, "b": 0}, {"a": None, "b": 1}, {"a": 5, "b": 1}),
    "None over a subtree": ({"a": None}, {"a": {"x": np.ones(2)}}, "a/x", {"a": {"x": np.ones(2)}}),
    "an array over a subtree": ({"a": np.ones(2)}, {"a": {"x": 1}}, "a/x", {"a": {"x": 1}}),
    "a type's own rules": (
        {"s": {"v": {"0": 1, "1": 2}}},
        {"s": Serialized(None)},
        {"s": Serialized({"0": 1, "1": 2})},
    ),
    # The type refuses what is stored; then leaf by leaf.
    "a type of another structure": ({"s": {"v": {"0": 1, "1": 2}}}, {"s": Serialized([0])}, {"s": Serialized([1])}),
    "a type that does not read it": ({"s": {"other": 1}}, {"s": Serialized(1)}, "s/v", {"s": Serialized(1)}),
    "a namedtuple of Flax before 0.3.6": ({"p": NAMEDTUPLE}, {"p": Pair(np.zeros(2), 0)}, {"p": Pair(np.ones(2), 5)}),
}


@pytest.mark.parametrize("name", OVER)
def test_what_is_stored_over_something_else(name: str, save: Save, flag: bool, tmp_path: Path) -> None:
    """The raw stored value, or what Flax's own functions make of it; leaves below a leaf are missing."""
    stored, target, *both = OVER[name]
    save(tmp_path, stored, 1)
    for expected, transforms in zip(both, (None, {}), strict=False):
        if isinstance(expected, str):
            with pytest.raises(MissingLeavesError, match=expected):
                checkpoints.restore_checkpoint(tmp_path, target)
        else:
            found = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=transforms)
            assert fingerprint(found) == fingerprint(expected)


def test_an_array_for_a_tree_is_an_error(flag: bool, tmp_path: Path) -> None:
    """A checkpoint of one array restores into no tree of names, and no rule is proposed that would make one."""
    checkpoints.save_checkpoint(tmp_path, np.arange(3), 1)
    with pytest.raises(CheckpointError, match="a/b") as caught:
        checkpoints.restore_checkpoint(tmp_path, {"a": {"b": 1}})
    assert "transforms = [" not in str(caught.value)


def test_dtypes(save: Save, flag: bool, tmp_path: Path) -> None:
    """The stored dtype comes back, whatever the target's; the setting dtype=target casts."""
    save(tmp_path, {"a": np.array([1.5, 300.0], np.float32), "j": jnp.arange(3)}, 1)
    target = {"a": np.zeros(2, np.float16), "j": jnp.zeros(3, jnp.bfloat16)}
    for function in (checkpoints.restore_checkpoint, restore):
        restored = function(tmp_path, target)
        assert restored["a"].dtype == np.float32 and restored["j"].dtype == np.int32
    with config.override(dtype="target"):
        cast = checkpoints.restore_checkpoint(tmp_path, target)
    assert fingerprint(cast) == fingerprint(restore(tmp_path, target, dtype="target"))
    assert cast["a"].dtype == np.float16 and cast["j"].dtype == jnp.bfloat16
    assert cast["a"].tolist() == [1.5, 300.0] and cast["j"].tolist() == [0, 1, 2]
    assert cast["a"].flags.writeable


def test_abstract_targets_tell_what_they_may_lose(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cast to an abstract target's narrower dtype is named in one warning; a lossless or ordered one is not."""
    value = {"wide": np.array([0.1, 1e300]), "same": np.zeros(2, np.float32), "up": np.zeros(2, np.float32)}
    checkpoints.save_checkpoint(tmp_path, value, 1)
    dtypes = {"wide": np.float32, "same": np.float32, "up": np.float64}
    target = {name: jax.ShapeDtypeStruct((2,), dtype) for name, dtype in dtypes.items()}
    with np.errstate(over="ignore"), caplog.at_level("WARNING", "flax_ckpt_compat"):
        restored = checkpoints.restore_checkpoint(tmp_path, target)
    assert {name: leaf.dtype for name, leaf in restored.items()} == {name: np.dtype(d) for name, d in dtypes.items()}
    (record,) = caplog.records
    assert "wide: float64 to float32" in record.getMessage() and "up" not in record.getMessage()
    caplog.clear()
    with config.override(dtype="target"), caplog.at_level("WARNING", "flax_ckpt_compat"):
        checkpoints.restore_checkpoint(tmp_path, {**target, "wide": jax.ShapeDtypeStruct((2,), np.float64)})
        assert not caplog.records
        checkpoints.restore_checkpoint(tmp_path, target)
    (record,) = caplog.records  # the setting asks for the cast, so only values that it loses are told: 1e300
    assert record.getMessage().endswith("does not hold all values: wide")
    caplog.clear()
    with config.override(dtype="target"), caplog.at_level("WARNING", "flax_ckpt_compat"):
        checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=[rules.apply("wide", np.positive)])
    (record,) = caplog.records  # of what a function made, too
    assert record.getMessage().endswith("does not hold all values: wide (positive of wide)")


LOGGER = "flax_ckpt_compat"
TREE = {
    "params": {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)},
    "opt": {"mu": np.ones(2)},
    "step": 3,
    "none": None,  # nothing to lose
    "empty": {},
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
            found = restore(path, PART, unused_leaves=policy)
        assert found["step"] == 3 and np.array_equal(found["params"]["w"], TREE["params"]["w"])
        (line,) = [record for record in caplog.records if "not in the target, dropped" in record.message]
        assert "params/b" in line.message and "opt/mu" in line.message
        assert line.levelno == (logging.WARNING if policy == "warn" else logging.INFO)
        assert plan_restore(path, PART, unused_leaves=policy).raises is None
    with pytest.raises(errors.UnusedLeavesError, match="2 leaves that the target lacks") as caught:
        restore(path, PART, unused_leaves="error")
    message = str(caught.value)
    assert "params/b" in message and "opt/mu" in message and "unused_leaves='ignore'" in message
    assert plan_restore(path, PART, unused_leaves="error").raises == "UnusedLeavesError"
    dropped = [rules.drop("params/b", "opt")]  # as the message says
    assert "rules.drop(" in message
    assert restore(path, PART, unused_leaves="error", transforms=dropped)["step"] == 3


def test_the_setting_is_of_both_functions(path: Path) -> None:
    """Flax's function raises, too, if it is told to; a whole target, and none, are no error."""
    with config.override(unused_leaves="error"):
        for function in (restore, checkpoints.restore_checkpoint):
            with pytest.raises(errors.UnusedLeavesError):
                function(path, PART)
            assert function(path, TREE)["step"] == 3
            assert function(path, None)["step"] == 3
    with pytest.raises(errors.SettingError, match="unused_leaves takes 'auto', 'error', 'warn', 'ignore'"):
        restore(path, PART, unused_leaves="keep")  # type: ignore[arg-type]


def test_a_count_of_a_schedule_is_named_when_it_is_dropped(
    tmp_path: Path, format: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A constant rate in place of a schedule loses the step of the schedule, and says so, in either function."""
    params = {"w": jnp.ones(3)}
    saved = optax.sgd(optax.linear_schedule(1.0, 0.1, 10)).init(params)
    target = optax.sgd(0.1).init(params)
    flax_ckpt_compat.save(tmp_path / "saved", {"params": params, "opt": saved}, format=format)
    for function in (restore, checkpoints.restore_checkpoint):
        caplog.clear()
        with caplog.at_level(logging.WARNING, LOGGER):
            function(tmp_path / "saved", {"params": params, "opt": target})
        assert "the step of a schedule, which is dropped: opt/1/count" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, LOGGER):
        restore(tmp_path / "saved", {"params": params})  # without an optimizer, there is no schedule
        restore(tmp_path / "saved", {"params": params, "opt": target}, unused_leaves="ignore")
    assert not caplog.records


def test_an_ellipsis_leaves_what_is_there_unread(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a leaf, a subtree, and what is not stored; it comes back as it is. The plan reads nothing for it.

    Real Orbax takes it so, too. Rules give it nothing."""
    assert getattr(ocp, "PLACEHOLDER", ...) is ...
    target = {**TREE, "params": {"w": np.zeros((2, 3), np.float32), "b": ...}, "opt": ..., "step": 0, "new": ...}
    for restores in (restore, checkpoints.restore_checkpoint):
        with caplog.at_level(logging.INFO, LOGGER), config.override(unused_leaves="error"):
            found = restores(path, target)
        assert found["params"]["b"] is ... and found["opt"] is ... and found["new"] is ...
        assert (found["step"], found["params"]["w"].sum()) == (3, 6)
        assert "dropped" not in caplog.text
        assert restores(path, ...) is ...
    plan = plan_restore(path, target)
    assert plan.raises is None and plan.unused == ()
    read = {leaf.path for leaf in plan.leaves if leaf.origin in ("stored", "checkpoint")}
    assert read <= {"params/w", "step", "none"}
    found = restore(path, target, transforms=[rules.cast("params", "float16")])
    assert found["params"]["b"] is ... and found["params"]["w"].dtype == np.float16
    if hasattr(ocp, "PLACEHOLDER") and path.is_dir():
        with ocp.PyTreeCheckpointer() as checkpointer:
            theirs = checkpointer.restore(path, args=ocp.args.PyTreeRestore({**TREE, "opt": {"mu": ...}}))
        assert theirs["opt"]["mu"] is ... and theirs["step"] == 3


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


def test_a_key_of_somebodys_own(saved: Path) -> None:
    """The rest restores, and the key as data, which is warned of, unless nobody asks for it.

    Nothing makes such a typed key here; the error names leaf, implementation and remedy, in both ways to restore."""
    rest = {"array": np.zeros(3, int)}
    for target, warnings in ((None, 1), ({**rest, "key": np.zeros(2, np.uint32)}, 1), (rest, 0)):
        with warnings_logged() as logged:
            restored = checkpoints.restore_checkpoint(saved, target)
        assert fingerprint(restored) == fingerprint({"array": np.arange(3), **({"key": DATA} if warnings else {})})
        told = ["'key' is a PRNG key of the implementation 'theirown2x32'" in text for text in logged]
        assert told == [True] * warnings
    for function in (checkpoints.restore_checkpoint, restore):
        with pytest.raises(UnsupportedLeafError, match=r"'key'.*'theirown2x32'.*uint32 array") as caught:
            function(saved, {**rest, "key": jax.random.key(0)})
        assert caught.value.leaf == "key"
