"""What errors and warnings say about leaves that are missing or of another shape: all of them, in few lines."""

import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, config, plan_restore, restore, rules, save
from flax_ckpt_compat.errors import (
    CheckpointError,
    KindMismatchError,
    MissingLeavesError,
    ShapeMismatchError,
    UnusedLeavesError,
)
from flax_ckpt_compat.transforms import Transform
from tests.support.peers import skip_without_typed_keys
from tests.support.saves import save_items


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


def model(kind: str, count: int, value: float) -> Any:
    """A state with so many layers, named by this pattern or in a list, and Adam's moments of them."""
    one = {"attn": {"kernel": np.full((4, 4), value), "bias": np.full(4, value)}, "ln": {"scale": np.full(4, value)}}
    params: Any = {"layers": [one] * count} if kind == "list" else {kind % n: one for n in range(count)}
    params["head"] = {"kernel": np.full((4, 2), value)}
    return {"params": params, "opt": {"mu": params, "nu": params}, "step": 3}


# Leading zeros, too: a target with fewer cut such layers off in silence.
NUMBERED = ["layer_%d", "layer_%02d", "block%03d", "%02d"]


@pytest.mark.parametrize("kind", [*NUMBERED, "list"])
def test_more_layers(flag: bool, tmp_path: Path, kind: str) -> None:
    """Both numbers are told, in the plan too."""
    path = checkpoints.save_checkpoint(tmp_path, model(kind, 3, 1.0), 1)
    with pytest.raises(MissingLeavesError) as caught:
        restore(path, model(kind, 5, -1.0))
    plan = plan_restore(path, model(kind, 5, -1.0))
    assert "the target 5 of them. Build the model with 3" in plan.why
    assert plan.why in str(plan) and plan.why in str(caught.value)
    assert "rules.rename" not in str(caught.value) and "A guess" not in str(plan)


@pytest.mark.parametrize("kind", NUMBERED)
def test_fewer_layers(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """Numbered ones are an error with a remedy; Flax's function drops them with a warning."""
    path, target = tmp_path / "saved", model(kind, 2, -1.0)
    save(path, model(kind, 5, 1.0))
    with pytest.raises(UnusedLeavesError, match=r"\(5, .* the target 2 of them. Build the model with 5") as dropped:
        restore(path, target)
    assert "unused_leaves='ignore'" in str(dropped.value)
    assert plan_restore(path, target).raises == "UnusedLeavesError"
    restored = checkpoints.restore_checkpoint(path, target)
    jax.tree.map(np.testing.assert_array_equal, restored, model(kind, 2, 1.0))
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "dropped: params/" in caplog.text
    if kind == "layer_%d":
        assert "params/layer_{0..4} (5" in str(dropped.value) and "dropped: params/layer_{2..4}" in caplog.text
    with caplog.at_level(logging.WARNING, "flax_ckpt_compat"):
        caplog.clear()
        restored = restore(path, target, transforms=[rules.drop(r".*/(layer_|block)?0*[234]")])
    jax.tree.map(np.testing.assert_array_equal, restored, model(kind, 2, 1.0))
    assert "dropped" not in caplog.text


def layers(*numbers: int, size: int = 3) -> dict[str, Any]:
    """Layers of these numbers."""
    return {f"layer_{number}": {"w": np.ones(size), "b": np.ones(2)} for number in numbers}


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (layers(0, 1, 2), layers(1, 2, 3)),
        (layers(1, 2), layers(1, 2, 3)),
        (layers(1, 2), layers(0, 1, 2)),
        (layers(0, 1), layers(0, 1, 3)),
        (layers(0, 2), layers(0, 1, 2)),
        (layers(0, 1), layers(0, 1) | layers(2, size=4)),
        ({"layer_0": np.ones(3), "layer_1": np.ones(3)}, layers(0, 1, 2)),
    ],
)
def test_other_rows_are_no_more_layers(stored: Any, target: Any, tmp_path: Path) -> None:
    """Rows that do not begin at 0, or with gaps, and a layer unlike the others: to build fewer would not help."""
    with pytest.raises(CheckpointError) as caught:
        restore(save(tmp_path / "other", stored, format="msgpack"), target)
    assert "Build the model" not in str(caught.value)


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


STATE = {"params": {"d": {"kernel": np.arange(12.0).reshape(4, 3), "bias": np.ones(3)}}, "step": 7}
BOXED = {"params": {"d": {name: {"value": leaf} for name, leaf in STATE["params"]["d"].items()}}, "step": 7}
NORM = {"gn": {"scale": np.arange(6.0), "bias": np.ones(6)}, "w": np.ones((2, 3))}
WIDE = {"gn": {name: leaf.reshape(1, 1, 1, 6) for name, leaf in NORM["gn"].items()}, "w": np.ones((2, 3))}


@pytest.mark.parametrize(
    ("stored", "state", "rule"),
    [
        (jax.tree.map(lambda leaf: np.stack([leaf] * 8), STATE), STATE, "unreplicate()"),
        (BOXED, STATE, "rename("),
        (STATE, BOXED, "rename("),
        (WIDE, NORM, "reshape("),
    ],
    ids=["replicated", "boxed", "unboxed", "axes"],
)
def test_one_cause(stored: Any, state: Any, rule: str, format: Any, tmp_path: Path) -> None:
    """The error has the rules that the plan proposes, nothing that keeps the target's values, and these rules work."""
    path, target = save(tmp_path / "x", stored, format=format), jax.tree.map(lambda leaf: leaf * 0, state)
    with pytest.raises(CheckpointError) as caught:
        restore(path, target)
    plan = plan_restore(path, target)
    assert plan.raises == type(caught.value).__name__ and plan.suggestion is not None
    assert f"rules.{rule}" in str(caught.value) and str(plan.suggestion) in str(caught.value)
    assert str(plan).count(f"rules.{rule}") == 1 and "from_target" not in str(caught.value)
    jax.tree.map(np.testing.assert_array_equal, restore(path, target, transforms=plan.suggestion.rules), state)


def test_raw_keys_for_typed_ones(flag: bool, tmp_path: Path) -> None:
    """The shapes say keys, and the remedy is no other configuration."""
    skip_without_typed_keys()
    typed = jax.random.key(1)
    saved = {"rng": jax.random.key_data(typed), "ids": np.array([1, 2], np.uint32), "w": np.ones(2)}
    checkpoints.save_checkpoint(tmp_path, saved, 1)
    with pytest.raises(ShapeMismatchError, match=r"target typed keys of shape \(\)") as caught:
        restore(tmp_path, {**saved, "rng": typed})
    message = str(caught.value)
    assert "configuration" not in message
    suggestion = plan_restore(tmp_path, {**saved, "rng": typed}).suggestion
    assert suggestion is not None and str(suggestion) in message
    found = restore(tmp_path, {**saved, "rng": typed}, transforms=suggestion.rules)
    assert found["rng"] == typed and found["ids"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("stored", "target"),
    [("text", np.ones((4, 3))), ("text", 5), (5, np.ones(())), ([np.ones(2)] * 2, [np.ones(2)])],
    ids=["text", "text for a number", "a number", "longer"],
)
def test_rules_that_leave_another_kind(stored: Any, target: Any, tmp_path: Path) -> None:
    """They do not map the checkpoint: restored with them, it is the same error again."""
    path, wanted = save(tmp_path / "x", {**BOXED, "t": stored}, format="msgpack"), {**STATE, "t": target}
    with pytest.raises(KindMismatchError) as caught:
        restore(path, wanted)
    plan = plan_restore(path, wanted)
    assert plan.suggestion is not None and not plan.suggestion.confident
    told = f"{caught.value}{plan}"
    assert "would map it" not in told and ("(not t)" in told) == (plan.suggestion.remaining == ("t",))
    assert ("t",) in [plan.suggestion.remaining, *(path for step in plan.suggestion.steps for path in step.keeps)]
    with pytest.raises(KindMismatchError):
        restore(path, wanted, transforms=plan.suggestion.rules)


def test_a_plan_says_what_each_function_does(tmp_path: Path) -> None:
    """``restore`` raises where ``restore_checkpoint`` warns, and a success has a line, too."""
    layers = {str(n): {"w": np.ones((2, 3))} for n in range(3)}
    path = save(tmp_path / "x", {"a": np.ones((4, 4)), "layers": layers, "t": "text"}, format="msgpack")
    two = {number: layers[number] for number in "01"}
    transforms = {"b": Transform(use_fallback=True)}
    cases: list[tuple[Any, Any, str]] = [
        ({"a": np.ones(3)}, None, "ShapeMismatchError (restore_checkpoint would succeed)"),
        ({"t": np.ones(3)}, None, "KindMismatchError (restore_checkpoint would succeed)"),
        ({"layers": two}, None, "UnusedLeavesError (restore_checkpoint would succeed)"),
        ({"b": np.ones(3), "a": np.ones((4, 4)), "c": np.ones(2)}, transforms, "MissingLeavesError (restore_check"),
        ({"b": np.ones(3)}, None, "MissingLeavesError."),
        ({"a": np.ones((4, 4))}, None, ""),
    ]  # fmt: skip
    for target, given, verdict in cases:
        plan = plan_restore(path, target, transforms=given)
        try:
            checkpoints.restore_checkpoint(path, target, orbax_transforms=given)
        except CheckpointError:
            succeeds = False
        else:
            succeeds = True
        text = f"restore raises {verdict}" if verdict else "restore succeeds."
        assert text in str(plan)
        found = plan._report().value()
        assert (found["function"], found["flax_succeeds"]) == ("restore", succeeds and bool(verdict))
        assert plan.flax_succeeds == (succeeds and plan.raises is not None)
    mild = plan_restore(path, {"a": np.ones(3)}, shape_mismatch="warn")
    assert "restore succeeds. Where shapes differ, the result has the stored shape." in str(mild)


def dense(rows: int, columns: int, start: int) -> Any:
    """A layer whose values tell where it was."""
    kernel = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) + start
    return {"kernel": kernel, "bias": np.arange(columns, dtype=np.float32) - start}


def net(names: tuple[str, str, str], start: int = 0) -> Any:
    """Three layers that are told apart by their shapes."""
    layers = (dense(4, 8, start), dense(8, 8, start), dense(8, 3, start))
    return {"params": dict(zip(names, layers, strict=True)), "step": start}


def test_hints_are_of_the_same_shape_field_and_part(tmp_path: Path) -> None:
    """A moment is never the other one, nor a decoder's layer an encoder's; a folded row has that of its first leaf."""

    def state(name: str) -> Any:
        layers = {f"{name}{n}": dense(4 * n, 4 * n + 4, n) for n in (1, 2, 3)}
        params = {"encoder": layers, "decoder": layers}
        return {"params": params, "opt_state": {"0": {"mu": params, "nu": params}}}

    path = save(tmp_path / "x", state("fc"))
    with pytest.raises(MissingLeavesError) as caught:
        restore(path, state("dense_"))
    hints = re.findall(r"  (\S+)   \(stored: ([^,)]*)", str(caught.value))
    assert len(hints) == 12
    assert all(near == wanted.replace("dense_{1..3}", "fc1") for wanted, near in hints), hints
    with pytest.raises(MissingLeavesError) as caught:
        restore(path, {"model": state("fc")["params"], "acc_grads": state("fc")["params"]})
    hints = re.findall(r"stored: ([^)]*)", str(caught.value))
    assert len(hints) == 4 and "opt_state" not in "".join(hints)


OLD, NEW = ("Dense_0", "Dense_1", "Dense_2"), ("encoder", "Dense_0", "Dense_1")


@pytest.mark.parametrize(
    ("student", "teacher"), [(NEW, OLD), (OLD, NEW), (NEW, NEW)], ids=["student", "teacher", "both"]
)
def test_a_proposal_for_several_items(student: Any, teacher: Any, tmp_path: Path) -> None:
    """It names leaves as rules see them, and moves no layers of another item."""
    save_items(tmp_path, student=net(OLD), teacher=net(OLD, 1000))
    expected = {"student": net(student), "teacher": net(teacher, 1000)}
    target = jax.tree.map(np.zeros_like, expected)
    plan = plan_restore(tmp_path, target)
    assert plan.suggestion is not None
    assert plan.suggestion.confident, plan.suggestion.doubts
    with pytest.raises(MissingLeavesError, match="These rules would map it") as caught:
        restore(tmp_path, target)
    assert str(plan.suggestion) in str(caught.value)
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, target, transforms=plan.suggestion.rules), expected)


def test_items_with_other_names(tmp_path: Path) -> None:
    """Rules give items the target's names, although none of the stored names is one of them."""
    save_items(tmp_path, gen=net(OLD), disc={"params": dense(5, 2, 9)})
    expected = {"generator": net(OLD), "discriminator": {"params": dense(5, 2, 9)}}
    target = jax.tree.map(np.zeros_like, expected)
    with pytest.raises(KindMismatchError, match=r"several trees \(disc \(0 of 9 leaves"):
        restore(tmp_path, target)
    steps = [rules.rename("gen", "generator"), rules.rename("disc", "discriminator")]
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, target, transforms=steps), expected)
    assert plan_restore(tmp_path, target, transforms=steps).raises is None
