"""What errors and warnings say about leaves that are missing or of another shape: all of them, in few lines."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization, traverse_util

from flax_ckpt_compat import checkpoints, config, plan_restore, restore, rules, save
from flax_ckpt_compat._restore import common_causes, messages
from flax_ckpt_compat.errors import KindMismatchError, MissingLeavesError, ShapeMismatchError, UnusedLeavesError
from flax_ckpt_compat.transforms import Transform
from tests.restore.test_matching import match


def missing(stored: Any, target: Any) -> list[str]:
    """The lines of the message without remedies."""
    return messages.missing_leaves(match(stored, target)).splitlines()


def test_every_missing_leaf_is_named() -> None:
    """With the nearest stored names, those with the same last part first."""
    stored = {"encoder": {"layer_0": {"kernel": 1}}, "bias": 2}
    assert missing(stored, {"enc": {"layer_0": {"kernel": 0}}, "zzz": 0}) == [
        "/p lacks 2 of the leaves that the target asks for:",
        "  enc/layer_0/kernel   (stored: encoder/layer_0/kernel)",
        "  zzz",
    ]
    assert "<root>" in messages.missing_leaves(match({}, 5, lenient=True))


def test_near_names_have_the_shape(tmp_path: Path) -> None:
    """An array of another shape is no hint, however much it is called alike."""
    kernel = np.ones((4, 8))
    path = save(tmp_path / "saved", {"nu": {"Dense_0": {"kernel": kernel}, "Dense_1": {"kernel": kernel.T}}})
    with pytest.raises(MissingLeavesError, match=r"\(stored: nu/Dense_0/kernel\)\n") as caught:
        restore(path, {"nu_max": {"Dense_0": {"kernel": kernel}, "Dense_1": {"kernel": np.ones(3)}}})
    assert "  nu_max/Dense_1/kernel\n" in str(caught.value)


def test_stored_names_where_none_is_similar() -> None:
    """Where nothing stored resembles what is missing, the stored top-level names are told."""
    stored, target = {"encoder": {"w": 1}, "opt": {"m": 2}}, {"qq": dict.fromkeys(map(str, range(30)), 0)}
    assert missing(stored, target)[1:] == [
        "  qq/{0..29}   (30 leaves)",
        "None of the stored names is similar. At the top level the checkpoint holds: encoder, opt",
    ]
    for bare, word in ((5, "single value"), ({}, "no names")):
        assert word in missing(bare, target)[-1]


def test_empty_nodes_are_marked() -> None:
    """A missing container without children, such as optax.EmptyState, is told to hold no values; others are not."""
    lines = missing({"w": 1}, {"opt_state": (optax.EmptyState(), 3), "n": None})
    assert lines[1:4] == ["  opt_state/0   (empty: holds no values)", "  opt_state/1", "  n"]


def test_layers_are_folded_and_the_rest_counted(flag: bool, tmp_path: Path) -> None:
    """A model of hundreds of layers takes a line for each leaf of a layer, one of hundreds of names about thirty."""
    leaves = {name: np.ones(2) for name in ("kernel", "bias")}
    stored = {f"block_{n}": leaves for n in range(40)}
    checkpoints.save_checkpoint(tmp_path, stored, 1)
    with pytest.raises(MissingLeavesError) as caught:
        checkpoints.restore_checkpoint(tmp_path, {"net": {f"layer_{n}": leaves for n in range(40)}, "x": 0})
    lines = str(caught.value).splitlines()
    assert any(line == "  net/layer_{0..39}/kernel   (40 leaves)" for line in lines)
    assert len(caught.value.missing) == 81 and len(lines) < 20
    words = {"".join("abcdefgh"[int(digit)] for digit in f"{n:04o}"): 0 for n in range(500)}
    with pytest.raises(MissingLeavesError) as caught:
        checkpoints.restore_checkpoint(tmp_path, words)
    lines = str(caught.value).splitlines()
    assert len(caught.value.missing) == 500 and len(lines) < 40
    assert any("and 480 more" in line and "plan_restore" in line for line in lines)


def test_remedies_come_from_the_safest_on(flag: bool, tmp_path: Path) -> None:
    """Rules for what was renamed first; then, named leaf by leaf, what the target shall keep; all of it last."""
    old = {"Dense_0": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "step": 1}
    checkpoints.save_checkpoint(tmp_path, old, 1)
    with pytest.raises(MissingLeavesError) as caught:
        checkpoints.restore_checkpoint(tmp_path, {"enc": old["Dense_0"], "step": 0})
    *_, last = lines = str(caught.value).splitlines()
    assert any("rules.rename" in line for line in lines[:-1])
    assert "missing_leaves='ignore'" in last and "ignore'" not in "".join(lines[:-1])
    with pytest.raises(MissingLeavesError) as caught:
        checkpoints.restore_checkpoint(tmp_path, {**old, "head": {"w": np.ones(5)}})
    *_, last = str(caught.value).splitlines()
    at = last.index("orbax_transforms=[rules.from_target('head')]")
    assert at < last.index("orbax_transforms={}") < last.index("missing_leaves='ignore'")
    with config.override(missing_leaves="warn"):
        given = [rules.from_target("head")]
        assert checkpoints.restore_checkpoint(tmp_path, {**old, "head": 7}, orbax_transforms=given)["head"] == 7


def shapes(stored: Any, target: Any, path: Path) -> str:
    """The error's message for a target of other shapes."""
    checkpoints.save_checkpoint(path, stored, 1)
    with pytest.raises(ShapeMismatchError) as caught:
        restore(path, target)
    return str(caught.value)


def test_shapes_have_a_line_each(flag: bool, tmp_path: Path) -> None:
    """One leaf a line, rows of layers folded if there are many; the error names the setting last."""
    target = {f"k{n:02}": np.zeros(2) for n in range(25)}
    lines = shapes({name: np.zeros(3) for name in target}, target, tmp_path).splitlines()
    assert lines[0].endswith(": 25 of the stored arrays have another shape than the target's:")
    assert lines[1] == "  k{00..24}: stored (3,), target (2,)   (25 leaves)"
    assert "model's configuration" in lines[2] and "shape_mismatch='warn'" in lines[3] and len(lines) == 4


def test_shapes_of_a_new_head(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rule that leaves the head to the target is named after the configuration, and it works."""
    body = {"kernel": np.ones((4, 4)), "bias": np.ones(4)}
    saved = {"body": body, "head": {"kernel": np.ones((4, 10)), "bias": np.ones(10)}}
    target = {"body": body, "head": {"kernel": np.zeros((4, 3)), "bias": np.zeros(3)}}
    message = shapes(saved, target, tmp_path)
    assert message.index("configuration") < message.index("rules.from_target('head')")
    assert restore(tmp_path, target, transforms=[rules.from_target("head")])["head"] is not None
    with caplog.at_level(logging.WARNING, "flax_ckpt_compat"):
        checkpoints.restore_checkpoint(tmp_path, target)
    assert "they are returned as stored" in caplog.text and "rules.from_target('head')" in caplog.text


def test_shapes_of_a_replicated_state(flag: bool, tmp_path: Path) -> None:
    """A leading axis on every array of one side is told as what it is, and the remedy works."""
    plain = {"params": {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3)}, "step": np.array(3)}
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 8), plain)
    message = shapes(plain, stacked, tmp_path / "plain")
    assert "leading axis of 8" in message and "unreplicate(target)" in message and "configuration" not in message
    message = shapes(stacked, plain, tmp_path / "stacked")
    assert "Every stored array has a leading axis of 8" in message and "configuration" not in message
    assert "add rules.unreplicate() to the transforms" in message
    restored = restore(tmp_path / "stacked", plain, transforms=[rules.unreplicate()])
    jax.tree.map(np.testing.assert_array_equal, restored, plain)
    some = {**plain, "step": stacked["step"]}
    assert "leading axis" not in shapes(plain, some, tmp_path / "some")


def test_shapes_of_a_state_replicated_for_other_devices(flag: bool, tmp_path: Path) -> None:
    """Another length of the leading axis of all arrays, the step's included, is another number of devices."""
    plain = {"params": {"w": np.arange(6.0).reshape(2, 3)}, "step": np.array(3)}
    eight, four = (jax.tree.map(lambda leaf, n=n: np.stack([leaf] * n), plain) for n in (8, 4))
    message = shapes(eight, four, tmp_path)
    assert "leading axis of 8, the target's of 4" in message and "configuration" not in message
    restored = restore(tmp_path, plain, transforms=[rules.unreplicate()])
    jax.tree.map(np.testing.assert_array_equal, restored, plain)


def model(kind: str, count: int, value: float) -> Any:
    """A state with so many layers, stacked as by nn.scan, numbered, or in a list, and Adam's moments of them."""
    stack = (count,) if kind == "stacked" else ()
    shapes = {"attn": {"kernel": (4, 4), "bias": (4,)}, "ln": {"scale": (4,)}}
    one = jax.tree.map(lambda shape: np.full(stack + shape, value), shapes, is_leaf=lambda x: isinstance(x, tuple))
    layers = {"stacked": one, "list": [one] * count, "numbered": None}[kind]
    params = {f"layer_{n}": one for n in range(count)} if layers is None else {"layers": layers}
    params["head"] = {"kernel": np.full((4, 2), value)}
    return {"params": params, "opt": {"mu": params, "nu": params}, "step": 3}


def ruled(message: str) -> Any:
    """The rule that a message names."""
    (source,) = re.findall(r"rules\.(?:pad|cut|from_target)\([^\n]*?\)(?=\.(?:\n|$))", message)
    return eval(source, {"rules": rules})


def test_layers_that_are_numbered_from_one(tmp_path: Path) -> None:
    """They are as many as stored: the error told of one more, and its rule gave each layer the values of the next."""
    layers = [{"kernel": np.full((4, 4), float(n))} for n in range(3)]
    checkpoints.save_checkpoint(tmp_path, {f"Dense_{n}": layer for n, layer in enumerate(layers)}, 1)
    target = {f"Dense_{n + 1}": {"kernel": np.zeros((4, 4))} for n in range(3)}
    with pytest.raises(MissingLeavesError) as caught:
        restore(tmp_path, target)
    assert "Build the model" not in str(caught.value) and "Dense_(3)" not in str(caught.value)


def test_arrays_in_boxes_for_a_target_without_them(flag: bool, tmp_path: Path) -> None:
    """As of an nnx.State, or of nn.with_partitioning: the error advised to keep the target's initial values."""
    dense = {"kernel": {"value": np.full((4, 4), 3.0)}, "bias": {"value": np.full(4, 2.0)}}
    saved = {"params": {"Dense_0": dense, "attn": {"value": {"kernel": {"value": np.ones((2, 2))}}}}}
    target = {"params": {"Dense_0": {"kernel": np.zeros((4, 4)), "bias": np.zeros(4)}, "attn": {}}}
    target["params"]["attn"] = {"value": {"kernel": np.zeros((2, 2))}}  # a module of attention, and no box
    path = checkpoints.save_checkpoint(tmp_path, saved, 1)
    with pytest.raises(KindMismatchError) as caught:
        restore(path, target)
    assert "from_target" not in str(caught.value)
    (source,) = re.findall(r"rules\.rename\(.*\)(?=\.\n)", str(caught.value))
    restored = restore(path, target, transforms=[eval(source, {"rules": rules})])["params"]
    assert np.all(restored["Dense_0"]["kernel"] == 3) and np.all(restored["Dense_0"]["bias"] == 2)
    assert np.all(restored["attn"]["value"]["kernel"] == 1)


@pytest.mark.parametrize("kind", ["stacked", "numbered", "list"])
def test_more_layers(flag: bool, tmp_path: Path, kind: str) -> None:
    """Both numbers are told, and the rule that is named keeps the stored layers before those of the target."""
    saved, target = model(kind, 3, 1.0), model(kind, 5, -1.0)
    path = checkpoints.save_checkpoint(tmp_path, saved, 1)
    with pytest.raises((ShapeMismatchError, MissingLeavesError)) as caught:
        restore(path, target)
    assert "model with 3" in str(caught.value) and "rules.rename" not in str(caught.value)
    assert "3 stored and 5 in the target" in str(caught.value) or "the target 5 of them" in str(caught.value)
    plan = plan_restore(path, target)
    assert "model with 3" in plan.why and plan.why in str(plan) and "A guess" not in str(plan)
    restored = restore(path, target, transforms=[ruled(plan.why)])
    ours, own, found = (
        traverse_util.flatten_dict(serialization.to_state_dict(one)) for one in (model(kind, 5, 1.0), target, restored)
    )
    for name, leaf in found.items():
        is_new = any(part in ("3", "4", "layer_3", "layer_4") for part in name)
        expected = own[name] if is_new else ours[name]
        if kind == "stacked" and "layers" in name:
            expected = np.concatenate([ours[name][:3], own[name][3:]])
        np.testing.assert_array_equal(leaf, expected, err_msg=str(name))


def test_fewer_layers(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stacked and numbered ones are an error with a remedy; Flax's function drops numbered ones with a warning."""
    for kind in ("stacked", "numbered"):
        path, target = tmp_path / kind, model(kind, 2, -1.0)
        save(path, model(kind, 5, 1.0))
        rule = []
        if kind == "stacked":
            with pytest.raises(ShapeMismatchError, match="5 stored and 2 in the target") as caught:
                restore(path, target)
            rule = [ruled(str(caught.value))]
        else:
            with pytest.raises(
                UnusedLeavesError, match=r"params/layer_\{0\.\.4\} \(5, .* the target 2 of them"
            ) as dropped:
                restore(path, target)
            assert "unused_leaves='ignore'" in str(dropped.value)
            assert plan_restore(path, target).raises == "UnusedLeavesError"
            rule = [rules.drop(r".*/layer_[234]")]
            restored = checkpoints.restore_checkpoint(path, target)
            jax.tree.map(np.testing.assert_array_equal, restored, model(kind, 2, 1.0))
            assert "dropped: params/layer_{2..4}" in caplog.text
        with caplog.at_level(logging.WARNING, "flax_ckpt_compat"):
            caplog.clear()
            jax.tree.map(np.testing.assert_array_equal, restore(path, target, transforms=rule), model(kind, 2, 1.0))
        assert "dropped" not in caplog.text


@pytest.mark.parametrize(
    "wrapped",
    [
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.inject_hyperparams(optax.adam)(1e-3),
        optax.adam(optax.linear_schedule(1.0, 0.0, 10)),
        optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    ],
    ids=["MultiSteps", "inject_hyperparams", "schedule", "ema"],
)
def test_an_optimizer_that_was_wrapped(flag: bool, tmp_path: Path, wrapped: Any) -> None:
    """The error names the rule that carries over the moments, and what begins anew; it told of other names."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    saved = {"params": params, "opt_state": jax.tree.map(lambda leaf: leaf + 7, optax.adam(1e-3).init(params))}
    path = checkpoints.save_checkpoint(tmp_path, saved, 1)
    target = {"params": params, "opt_state": wrapped.init(params)}
    with pytest.raises(MissingLeavesError, match=r"anew.*schedule") as caught:
        checkpoints.restore_checkpoint(path, target)
    assert "rules.optimizer_state('opt_state') carries over" in str(caught.value)
    assert "other names" not in str(caught.value)
    restored = restore(path, target, transforms=[rules.optimizer_state("opt_state")])
    found = optax.tree_utils.tree_get(restored, "mu", filtering=lambda path, leaf: isinstance(leaf, dict))
    jax.tree.map(np.testing.assert_array_equal, found, saved["opt_state"][0].mu)


def test_averages_that_are_new(flag: bool, tmp_path: Path) -> None:
    """Where a collection is missing that has the leaves of another one, the rule for a copy is named, and works."""
    params = {"w": np.ones((2, 3)), "b": np.full(3, 2.0)}
    path, target = checkpoints.save_checkpoint(tmp_path, {"params": params}, 1), jax.tree.map(np.zeros_like, params)
    with pytest.raises(MissingLeavesError, match=r"(?s)a copy of params: check.*rules.copy\('params', 'ema_params'\)"):
        checkpoints.restore_checkpoint(path, {"params": target, "ema_params": target})
    rule = rules.copy("params", "ema_params")
    restored = restore(path, {"params": target, "ema_params": target}, transforms=[rule])
    jax.tree.map(np.testing.assert_array_equal, restored, {"params": params, "ema_params": params})
    with pytest.raises(MissingLeavesError) as caught:
        checkpoints.restore_checkpoint(path, {"params": target, "other": {"w": np.ones(1), "b": np.ones(3)}})
    assert "rules.copy" not in str(caught.value)


def test_what_is_no_number_of_layers(tmp_path: Path) -> None:
    """A larger vocabulary, a wider norm, other classes and a longer chain of optimizers are not told as layers."""
    embedding, norm = {"embedding": np.ones((5, 2))}, {"scale": np.ones(3), "bias": np.ones(3)}
    head = {"kernel": np.ones((4, 3)), "bias": np.ones(3)}
    saved = {"a": embedding, "b": norm, "c": head, "d": np.ones(7), "opt": ({"mu": np.ones(2)}, {"nu": np.ones(3)})}
    save(tmp_path / "saved", saved, format="msgpack")
    longer = {
        "a": {"embedding": np.ones((6, 2))},
        "b": {"scale": np.ones(4), "bias": np.ones(4)},
        "c": {"kernel": np.ones((4, 5)), "bias": np.ones(5)},
        "opt": (*saved["opt"], {"trace": np.ones(2)}),
    }
    for name, part in longer.items():
        plan = plan_restore(tmp_path / "saved", {**saved, name: part})
        assert plan.raises and not plan.why, name


def layers(*numbers: int, size: int = 3) -> dict[str, Any]:
    """Layers of these numbers."""
    return {f"layer_{number}": {"w": np.ones(size), "b": np.ones(2)} for number in numbers}


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (layers(1, 2), layers(1, 2, 3)),
        (layers(1, 2), layers(0, 1, 2)),
        (layers(0, 1), layers(0, 1, 3)),
        (layers(0, 2), layers(0, 1, 2)),
        (layers(0, 1), layers(0, 1) | layers(2, size=4)),
        ({"layer_0": np.ones(3), "layer_1": np.ones(3)}, layers(0, 1, 2)),
    ],
)
def test_other_rows_are_no_more_layers(stored: Any, target: Any) -> None:
    """Rows that do not begin at 0, or with gaps, and a layer unlike the others: to build fewer would not help."""
    assert common_causes.of_layers(match(stored, target)) == ""
    assert "layer_{0,1} (2)" in common_causes.of_layers(match(layers(0, 1), layers(0, 1, 2)))


def test_one_leaf_is_not_every_array(flag: bool, tmp_path: Path) -> None:
    """A numpy scalar or a typed key that differs beside an array that does not is not a replicated state."""
    key = jax.random.key(1)
    for name, saved, own in (("n", np.float32(1), np.ones(3)), ("k", key, jax.random.split(key, 3))):
        message = shapes({"w": np.ones(2), name: saved}, {"w": np.ones(2), name: own}, tmp_path / name)
        assert "replicate" not in message and f"rules.from_target({name!r})" in message


def test_raw_keys_of_another_implementation(flag: bool, tmp_path: Path) -> None:
    """By their length and dtype; both ways, and no other uint32."""
    two, four = np.ones((3, 2), np.uint32), np.ones((3, 4), np.uint32)
    for number, (saved, own) in enumerate(((two, four), (four, two))):
        message = shapes({"w": np.ones(2), "k": saved}, {"w": np.ones(2), "k": own}, tmp_path / str(number))
        assert "another implementation" in message and "rules.from_target('k')" in message
    other = shapes({"k": two, "w": 1}, {"k": np.ones((3, 4), np.int32), "w": 1}, tmp_path / "other")
    assert "implementation" not in other


def test_raw_keys_for_typed_ones(flag: bool, tmp_path: Path) -> None:
    """Another kind of key is no other configuration."""
    typed = jax.random.key(1)
    raw = jax.random.key_data(typed)
    message = shapes({"rng": raw, "w": np.ones(2)}, {"rng": typed, "w": np.ones(2)}, tmp_path)
    assert "raw data (2,), target typed keys of shape ()" in message and "configuration" not in message
    restored = restore(tmp_path, {"rng": raw, "w": np.ones(2)})
    assert jax.random.wrap_key_data(jnp.asarray(restored["rng"])) == typed


def test_a_reversed_transform(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says that it does nothing, which leaves kept their values, and what keys are."""
    checkpoints.save_checkpoint(tmp_path, {"Dense_0": {"kernel": np.ones(2)}, "step": 3}, 1)
    target = {"encoder": {"kernel": np.zeros(2)}, "step": 0}
    for turned in (
        {"Dense_0/kernel": Transform(original_key="encoder/kernel")},
        {r"Dense_0/(.*)": Transform(original_key=r"encoder/\1")},
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "flax_ckpt_compat"):
            restored = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=turned)
        assert restored["encoder"]["kernel"].tolist() == [0, 0] and restored["step"] == 3
        (told,) = [record.getMessage() for record in caplog.records]
        assert "kept the target's own values: encoder/kernel" in told
        assert "keys are names of the target" in told and "reversed" in told


def test_names_of_thousands_of_digits(tmp_path: Path) -> None:
    """They are not numbers of layers: Python converts none that long."""
    many = "1" * 5000
    layers = {"kernel": np.ones(3), "bias": np.ones(2)}
    save(tmp_path / "c", {f"layer_{many}": layers, "layer_0": layers}, format="msgpack")
    with pytest.raises(MissingLeavesError, match="lacks 2 of the leaves"):
        restore(tmp_path / "c", {f"layer_{many}": layers, f"layer_{many}2": layers, "layer_0": layers})
