"""One cause that explains all differences is named first, alike in plan and error, and its remedy works alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from flax_ckpt_compat import checkpoints, errors, plan_restore, restore, rules, save
from flax_ckpt_compat.transforms import Transform
from tests.support.peers import skip_without_typed_keys

PARAMS = {"d": {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.ones(3)}}
RAW = np.array([0, 7], np.uint32)


def told(path: str, target: Any, transforms: Any = None) -> str:
    """The error of a restore, whose remedy the plan names, too."""
    with pytest.raises(errors.CheckpointError) as caught:
        restore(path, target, transforms=transforms)
    message = str(caught.value)
    plan = plan_restore(path, target, transforms=transforms)
    assert plan.raises == type(caught.value).__name__
    named = [rule for rule in ("unreplicate(", "wrap_key_data(", "rename(", "reshape(") if rule in message]
    assert [rule for rule in ("unreplicate(", "wrap_key_data(", "rename(", "reshape(") if rule in str(plan)] == named
    return message


def same(found: Any, expected: Any) -> None:
    """The same values."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_replicated_state_for_a_step_that_is_a_number(format: str, tmp_path: Path) -> None:
    """The step's kind is part of it: no remedy that keeps the target's 0 for the stored 1000 is named."""
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3)).replace(step=1000)
    path = save(tmp_path / "x", jax.tree.map(lambda x: np.stack([np.asarray(x)] * 8), state), format=format)  # type: ignore[arg-type]
    message = told(path, state.replace(step=0))
    assert "rules.unreplicate()" in message and "from_target" not in message
    found = restore(path, state.replace(step=0), transforms=[rules.unreplicate()])
    assert found.step == 1000
    same(found.params, PARAMS)


def test_a_number_in_an_array_of_one(tmp_path: Path) -> None:
    """The rule that takes it is named, and not the one that keeps the target's 0."""
    path = save(tmp_path / "x", {"step": np.array([7]), "w": np.ones(3)}, format="msgpack")
    target = {"step": 0, "w": np.zeros(3)}
    message = told(path, target)
    assert "rules.reshape('^step$', [])" in message and "from_target" not in message
    assert restore(path, target, transforms=[rules.reshape("^step$", [])])["step"] == 7


def test_many_raw_keys(tmp_path: Path) -> None:
    """The pattern matches all of them, and no other array of integers."""
    skip_without_typed_keys()
    keys = {f"k{number}": np.array([number, 7], np.uint32) for number in range(9)}
    path = save(tmp_path / "x", {"keys": keys, "ids": np.array([1, 2], np.uint32)}, format="msgpack")
    target = {"keys": {name: jax.random.key(0) for name in keys}, "ids": np.zeros(2, np.uint32)}
    assert "rules.wrap_key_data('^keys/.*')" in told(path, target)
    found = restore(path, target, transforms=[rules.wrap_key_data("^keys/.*")])
    same({name: jax.random.key_data(key) for name, key in found["keys"].items()}, keys)
    same(found["ids"], np.array([1, 2], np.uint32))


def test_raw_keys_are_no_replicas(tmp_path: Path) -> None:
    """The two numbers of a key are not two devices, where the key is all there is and after the replicas are gone."""
    skip_without_typed_keys()
    target = {"rng": jax.random.key(0)}
    path = save(tmp_path / "key", {"rng": RAW}, format="msgpack")
    message = told(path, target)
    assert "rules.wrap_key_data('^" in message and "unreplicate" not in message
    many = {"rng": np.stack([RAW] * 8), "w": np.ones((8, 2, 3), np.float32)}
    path = save(tmp_path / "many", many, format="msgpack")
    target |= {"w": np.zeros((2, 3), np.float32)}
    message = told(path, target, [rules.unreplicate()])
    assert "rules.wrap_key_data('^" in message and "unreplicate" not in message.split("wrap_key_data")[1]


@pytest.mark.parametrize("key", [RAW, np.stack([RAW] * 8)], ids=["one key", "a key for each device"])
def test_replicas_and_raw_keys(key: Any, tmp_path: Path) -> None:
    """Both remedies are named, and work together."""
    skip_without_typed_keys()
    state = {"w": np.ones((2, 3), "f4"), "b": np.ones(3, "f4"), "step": np.array(3)}
    path = save(tmp_path / "x", {"rng": key, **{name: np.stack([leaf] * 8) for name, leaf in state.items()}})
    target = {"rng": jax.random.key(0), **{name: np.zeros_like(leaf) for name, leaf in state.items()}}
    suggestion = plan_restore(path, target).suggestion
    assert suggestion is not None and str(suggestion) in told(path, target)
    found = restore(path, target, transforms=suggestion.rules)
    np.testing.assert_equal({**found, "rng": jax.random.key_data(found["rng"])}, {"rng": RAW, **state})


@pytest.mark.parametrize("boxed", [("kernel", "bias"), ("kernel",)], ids=["all", "some"])
def test_arrays_without_boxes(boxed: tuple[str, ...], tmp_path: Path) -> None:
    """The rule that adds the level is named, with the moments."""
    tx = optax.adam(1e-3)
    old = {"params": PARAMS, "opt_state": tx.init(PARAMS), "step": 3}
    path = save(tmp_path / "x", old, format="msgpack")

    def box(name: str, leaf: Any) -> Any:
        return nn.Partitioned(leaf * 0, names=(None,) * leaf.ndim) if name in boxed else leaf * 0

    params = {"d": {name: box(name, leaf) for name, leaf in PARAMS["d"].items()}}
    target = {"params": params, "opt_state": tx.init(params), "step": 0}
    message = told(path, target)
    plan = plan_restore(path, target)
    assert plan.suggestion is not None
    assert str(plan.suggestion.rules[0]) in message
    found = restore(path, target, transforms=plan.suggestion.rules)
    same(nn.meta.unbox(found["params"]), PARAMS)


def test_axes_of_length_one(tmp_path: Path) -> None:
    """Scales of group norms, which some libraries store with four axes."""
    old = {"params": {"gn": {"scale": np.arange(6.0).reshape(1, 1, 1, 6), "bias": np.ones((1, 1, 1, 6))}, **PARAMS}}
    target = {"params": {"gn": {"scale": np.zeros(6), "bias": np.zeros(6)}, **PARAMS}}
    path = save(tmp_path / "x", old, format="msgpack")
    assert "rules.reshape('gn/bias|gn/scale', [-1])" in told(path, target)
    found = restore(path, target, transforms=[rules.reshape("gn/bias|gn/scale", [-1])])
    np.testing.assert_array_equal(found["params"]["gn"]["scale"], np.arange(6.0))


def test_a_transposed_kernel_is_told_as_such(tmp_path: Path) -> None:
    """The error proposes to transpose it, and says that this is a guess."""
    kernel = np.arange(12.0).reshape(3, 4)
    path = save(tmp_path / "x", {"fc": {"kernel": kernel, "bias": np.ones(3)}, "d": np.ones(5)}, format="msgpack")
    target = {"fc": {"kernel": np.zeros((4, 3)), "bias": np.zeros(3)}, "d": np.zeros(5)}
    with pytest.raises(errors.ShapeMismatchError, match=r"transposed(.|\n)*rules.transpose\('kernel', \[1, 0\]\)"):
        restore(path, target)


def test_what_is_new_is_no_mapping(tmp_path: Path) -> None:
    """Rules that only keep the target's values are not called ones that map it."""
    path = save(tmp_path / "x", {"a": np.ones((4, 4))}, format="msgpack")
    target = {"a": np.ones((4, 4)), "b": np.ones((5, 7))}
    with pytest.raises(errors.MissingLeavesError, match="Only where the target's own values are wanted") as caught:
        restore(path, target)
    assert "would map it" not in str(caught.value)
    plan = plan_restore(path, target)
    assert "Where the target's own values are wanted:" in str(plan) and "would map it" not in str(plan)


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
        except errors.CheckpointError:
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


OLD, NEW = ("Dense_0", "Dense_1", "Dense_2"), ("encoder", "Dense_0", "Dense_1")


@pytest.mark.parametrize(
    ("student", "teacher"), [(NEW, OLD), (OLD, NEW), (NEW, NEW)], ids=["student", "teacher", "both"]
)
def test_a_proposal_for_several_items(student: Any, teacher: Any, tmp_path: Path) -> None:
    """It names leaves as rules see them, and moves no layers of another item."""
    with ocp.CheckpointManager(tmp_path, item_names=("student", "teacher")) as manager:
        items = {"student": ocp.args.PyTreeSave(net(OLD)), "teacher": ocp.args.PyTreeSave(net(OLD, 1000))}
        manager.save(5, args=ocp.args.Composite(**items))
    expected = {"student": net(student), "teacher": net(teacher, 1000)}
    target = jax.tree.map(np.zeros_like, expected)
    plan = plan_restore(tmp_path, target)
    assert plan.suggestion is not None
    assert plan.suggestion.confident, plan.suggestion.doubts
    with pytest.raises(errors.MissingLeavesError, match="These rules would map it") as caught:
        restore(tmp_path, target)
    assert str(plan.suggestion) in str(caught.value)
    same(restore(tmp_path, target, transforms=plan.suggestion.rules), expected)


def test_items_with_other_names(tmp_path: Path) -> None:
    """The error names the rules that rename items, and these work, although no item has the target's names."""
    with ocp.CheckpointManager(tmp_path, item_names=("gen", "disc")) as manager:
        items = {"gen": ocp.args.PyTreeSave(net(OLD)), "disc": ocp.args.PyTreeSave({"params": dense(5, 2, 9)})}
        manager.save(5, args=ocp.args.Composite(**items))
    expected = {"generator": net(OLD), "discriminator": {"params": dense(5, 2, 9)}}
    target = jax.tree.map(np.zeros_like, expected)
    with pytest.raises(errors.KindMismatchError, match=r"rules.rename\('disc', 'discriminator'\)"):
        restore(tmp_path, target)
    steps = [rules.rename("gen", "generator"), rules.rename("disc", "discriminator")]
    same(restore(tmp_path, target, transforms=steps), expected)
    assert plan_restore(tmp_path, target, transforms=steps).raises is None
