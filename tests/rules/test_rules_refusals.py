"""What rules refuse: an error that begins with the rule, names the leaf and says why; one table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.tree import KeyData
from flax_ckpt_compat._trees import state_dict
from tests.support.stored import count, stored

KEY = KeyData("threefry2x32", np.zeros(2, np.uint32))
STACK = rules.stack(r"layer_(\d+)", "layers")
SMALL = {"w": count((2, 3)), "n": count((3,), np.int32), "s": 1, "key": KEY, "v": count((5,)), "a.b": {"c/d": 1}}
NAMES = {"params": {"Dense_0": {"kernel": count((2, 3))}, "Dense_1": {"kernel": count((3, 1))}}, "step": 7}
TARGET = {"params": {"a": count((2,)), "head": {"kernel": count((3,))}}, "step": 0}


def layers(*all_layers: Any) -> dict[str, Any]:
    """Numbered siblings."""
    return {f"layer_{number}": layer for number, layer in enumerate(all_layers)}


REFUSED: list[tuple[Any, rules.Rule, str]] = [
    # Layers.
    (layers({"w": count((2,))}, {"w": count((3,))}, {"w": count((2,))}), STACK, r"layer_1/w is float32\[3\]"),
    (layers({"w": count((2,))}, {"w": count((2,), np.int32)}, {"w": count((2,))}), STACK, "layer_1/w is int32"),
    (layers({"w": count((2,))}, {"w": count((2,))}, {"v": count((2,))}), STACK, "layer_2/w is not there"),
    (layers({"w": count((2,))}, {"w": None}, {"w": count((2,))}), STACK, "layer_1/w is None"),
    (layers({"w": count((2,))}, {"w": {"a": count((2,))}}), STACK, "layer_1/w is a subtree of a, unlike layer_0/w"),
    (layers({"w": count((2, 3))}, {"w": count((2, 3), np.float16)}), STACK, r"float16\[2, 3\]"),
    (layers({"w": 1.0}, {"w": 2.0}), STACK, "layer_0/w is a stored float"),
    (layers({"w": KEY}, {"w": KEY}), STACK, "layer_0/w is a stored prng key"),
    (layers({"w": "a"}, {"w": "a"}), STACK, "layer_0/w is a stored str"),
    ({"layer_0": {"w": count((2,))}, "layer_2": {"w": count((2,))}}, STACK, "numbers 0, 2, expected consecutive"),
    ({"layer_1": {"w": count((2,))}}, STACK, "numbers 1, expected consecutive ones from first=0"),
    ({"layer_1": {"w": count((2,))}}, rules.stack(r"layer_(\d+)", "x", first=2), "from first=2 on"),
    ({"layer_0": {"w": count((2,))}, "layer_00": {"w": count((2,))}}, STACK, "numbers 0, 00, expected"),
    ({"a/b": {"layer_a": {"w": count((1,))}}}, rules.stack("layer_(.)", "x"), r"a\\/b/layer_a is one of a.*numbers a,"),
    (
        {f"layer_{'9' * 5000}": count((1,)), "layer_0": count((1,))},
        STACK,
        "layer_9+ is one of <root> .*match only one row",
    ),
    ({"layer_0": {"w": count((1,))}, "layer_a": {"w": count((1,))}}, rules.stack("layer_(.)", "x", first=-1), "0, a"),
    (layers({"w": count((1,))}, {"w": count(())}), rules.stack(r"layer_(\d)", "x", axis=1), "layer_1/w is .*no axis 1"),
    (SMALL, STACK, "matches nothing"),
    ({"x": {"a": count((2,)), "b": count((3,))}}, rules.unstack("x", "x_{}"), "x/a: 2, x/b: 3"),
    ({"x": {"a": count((2,)), "b": np.float32(1)}}, rules.unstack("x", "x_{}"), "x/b is .*no axis 0"),
    ({"x": {"a": count((2,)), "b": 1}}, rules.unstack("x", "x_{}"), "x/b is a stored int"),
    ({"x": {}}, rules.unstack("x", "x_{}"), "need one length on axis 0"),
    ({"x": {"a": count((2,)), "b": np.broadcast_to(np.int8(1), 10**7)}}, rules.unstack("x", "x_{}"), "need one length"),
    ({"x": count((0, 2))}, rules.unstack("x", "x_{}"), "need one length on axis 0"),
    (SMALL, rules.unstack("y", "y_{}"), "matches nothing"),
    ({"q": count((2, 3)), "k": count((2, 3), np.float16)}, rules.fuse(["q", "k"], "qk"), r"k is float16\[2, 3\]"),
    ({"q": count((2, 3)), "k": count((4, 3))}, rules.fuse(["q", "k"], "qk"), r"k is float32\[4, 3\], unlike q"),
    ({"q": count((2, 3))}, rules.fuse(["q", "v"], "qv"), "matches nothing"),
    ({"a/q": count((2,)), "a": {"q": 1, "k": count((2,))}}, rules.fuse(["a/q", "a/k"], "c"), "matches nothing"),
    (SMALL, rules.split("v", ["a", "b"]), "length 5 on the axis, which is not 2 equal parts"),
    (SMALL, rules.split("v", ["a", "b"], sizes=[2, 2]), r"parts of \[2, 2\]"),
    (SMALL, rules.split("v", ["a", "b"], sizes=[-1, 6]), r"parts of \[-1, 6\]"),
    (SMALL, rules.split("v", ["a", "b"], axis=2), "no axis 2"),
    # Arrays.
    (SMALL, rules.index("w", 2, 0), "w is .*no index 2"),
    (SMALL, rules.index("w", -3, 0), "w is .*no index -3"),
    (SMALL, rules.index("w", 0, 2), "w is .*no axis 2"),
    (SMALL, rules.pad("w", 1), "length 2 on axis 0 already; see cut"),
    (SMALL, rules.cut("w", 4), "length 2 on axis 0 only; see pad"),
    (SMALL, rules.pad("w", 4, axis=2), "no axis 2"),
    (SMALL, rules.cut("w", 1, axis=-3), "no axis -3"),
    (SMALL, rules.pad("s", 4), "matches no array"),
    (SMALL, rules.cut("x", 4), "matches no array"),
    (SMALL, rules.transpose("w", (0,)), r"\bw\b"),
    (SMALL, rules.transpose("w", (0, 0)), r"\bw\b"),
    (SMALL, rules.transpose("w", (0, 2)), r"\bw\b"),
    (SMALL, rules.reshape("w", (4, 2)), r"\bw\b"),
    (SMALL, rules.reshape("w", (4, -1)), r"\bw\b"),
    (SMALL, rules.reshape("x", (6,)), "matches no array"),
    (SMALL, rules.split_axis("w", (5, -1), axis=1), "w is .*cannot reshape array of size 3"),
    (SMALL, rules.merge_axes("w", axis=1), "w is .*no 2 axes from axis 1 on"),
    (
        {"pos": count((1, 17, 3))},
        rules.resize("pos", (4, 4), axis=1),
        "pos is .* 17 positions on axis 1 are not a grid",
    ),
    ({"pos": count((1, 17, 3))}, rules.resize("pos", (4, 4)), "pos is .* expected as many axes"),
    (SMALL, rules.resize("n", (4,)), "no array of floats"),
    (SMALL, rules.cast("n", "float16"), "matches no array of floats"),
    (SMALL, rules.cast("s", "float16"), "matches no array of floats"),
    (SMALL, rules.cast("key", "float16"), "matches no array of floats"),
    (SMALL, rules.cast("x", "float16"), "matches no array of floats"),
    (
        {"r": count((3,), np.uint32)},
        rules.wrap_key_data("r", "threefry2x32"),
        "r is .* not data of keys of threefry2x32",
    ),
    (SMALL, rules.wrap_key_data("w"), "matches no array of uint32"),
    (SMALL, rules.key_data("w"), "matches no PRNG key"),
    ({"w": count((4, 2)), "b": count((3,))}, rules.unreplicate(), r"b is .* 3 replicas on its first axis, of \[3, 4\]"),
    ({"w": count((4, 2)), "x": np.array(1.0)}, rules.unreplicate(), r"x is .* no replicas .* of \[0, 4\]"),
    ({"w": count((0, 2))}, rules.unreplicate(), "w is .* no replicas on its first axis"),
    ({"step": 3}, rules.unreplicate(), "matches no array"),
    # Names.
    (NAMES, rules.rename("Dense", "x"), "near it: params/Dense_1, params/Dense_0"),
    (NAMES, rules.rename({"step": "x", "d": "y"}), "'d' matches nothing that other patterns leave"),
    (NAMES, rules.rename({"Dense_0/kernel": "x", "params/Dense_0": "y"}), "'Dense_0/kernel' matches nothing that"),
    (NAMES, rules.rename("step", lambda _: None), "the function returns None for step, expected text"),  # type: ignore
    (NAMES, rules.move("params/Dense_2", "x"), "params/Dense_2"),
    (NAMES, rules.drop("params/Dense_2"), "params/Dense_2"),
    (NAMES, rules.drop("model/Dense_0/kernel"), "near it: params/Dense_0/kernel"),
    (NAMES, rules.copy("x", "y"), "at the top it has: params, step"),
    (NAMES, rules.wrap("x", at="params/Dense_2"), "params/Dense_2"),
    (NAMES, rules.unwrap("Dense_2", at="params"), "params has no Dense_2"),
    (NAMES, rules.wrap("x", at="step"), "step is a leaf"),
    (NAMES, rules.unwrap("step"), "step is a leaf"),
    (NAMES, rules.nest("."), "no name in the checkpoint has '.' in it"),
    ({"a": {"b": 1}, "a/b": 2}, rules.drop("a/b"), "means 2 things"),
    ({"w[0]": 1, "a+b": {"c": 2}}, rules.drop("a+b"), r"near it: a\+b"),
    (NAMES, rules.from_target("head"), "the target has no head; near it: params/head"),
    ({"params": count((2,))}, rules.from_target("params/head/kernel"), "params is a leaf"),
]


@pytest.mark.parametrize(("tree", "rule", "message"), REFUSED, ids=[f"{rule} {why}" for _, rule, why in REFUSED])
def test_what_does_not_fit(tree: Any, rule: rules.Rule, message: str) -> None:
    """It is refused when the rule is applied, by its name."""
    with pytest.raises(TransformError, match=message) as caught:
        rule.apply(stored(tree), state_dict.describe(TARGET))
    assert str(caught.value).startswith(rule.source.removeprefix("rules.") + ":")


@pytest.mark.parametrize(
    ("tree", "rule", "message"),
    [
        ({**layers({"w": count((2,))}), "layers": {"w": 1}}, STACK, "layers/w"),
        ({"l": count((2, 2)), "l_1": 3}, rules.unstack("l", "l_{}"), "l_1"),
        (NAMES, rules.rename(r"Dense_\d", "x"), "params/Dense_0/kernel and params/Dense_1/kernel"),
        (NAMES, rules.move("step", "params"), "params"),
        (NAMES, rules.move("params", "step"), "step"),
        (NAMES, rules.rename("step", "params/Dense_0"), "params/Dense_0"),
        (NAMES, rules.copy("params/Dense_0/kernel", "step"), "step"),
        ({"params": {"model": {"a": 1}, "a": 2}}, rules.unwrap("model", at="params"), "params/a"),
        ({"a.b": 1, "a": {"b": 2}}, rules.nest("."), "a/b"),
    ],
    ids=str,
)
def test_names_that_are_taken(tree: Any, rule: rules.Rule, message: str) -> None:
    """Two leaves never get one name, nor a leaf that of a subtree."""
    with pytest.raises(NameCollisionError, match=message) as caught:
        rule.apply(stored(tree), None)
    assert str(caught.value).startswith(rule.source.removeprefix("rules.") + ":")


SENSELESS: list[tuple[Any, str]] = [
    (lambda: rules.stack("layer", "x"), "exactly one group"),
    (lambda: rules.stack(r"(l)ayer_(\d)", "x"), "exactly one group"),
    (lambda: rules.stack("(", "x"), "not a regular expression"),
    (lambda: rules.unstack("x", "x"), "where the number goes"),
    (lambda: rules.fuse(["q", "q"], "x"), "matches nothing"),
    (lambda: rules.fuse("qk", "x"), "names is a list of text"),
    (lambda: rules.split("w", []), "list of names"),
    (lambda: rules.split("w", ["a"], sizes=[1, 2]), "list of names"),
    (lambda: rules.transpose("w", np.array([True, False])), "a list of whole numbers"),
    (lambda: rules.reshape("w", np.zeros((0, 2), int)), "a list of whole numbers"),
    (lambda: rules.reshape("w", (-1, -1)), "can only specify one unknown"),
    (lambda: rules.split_axis("w", (12,)), "expected two or more lengths"),
    (lambda: rules.merge_axes("w", count=1), "expected two or more axes"),
    (lambda: rules.pad("w", 4, value="zero"), "expected a number or 'target'"),
    (lambda: rules.pad("(", 1), "not a regular expression"),
    (lambda: rules.cut("w", -1), "negative"),
    (lambda: rules.cast("w", "bfloat17"), "cast"),
    (lambda: rules.cast("w", "str"), "cast"),
    (lambda: rules.cast("w", object), "cast"),
    (lambda: rules.resize("w", (0, 2)), "a shape of positive lengths"),
    (lambda: rules.resize("w", (2,), "bicubic"), "a shape of positive lengths"),
    (lambda: rules.resize("w", ()), "a shape of positive lengths"),
    (lambda: rules.resize("w", (2,), "linear", None, 1), "a shape of positive lengths"),
    (lambda: rules.rename("(", "x"), "rename"),
    (lambda: rules.rename("a", r"\1"), "rename"),
    (lambda: rules.rename("a", r"\g<x>"), "rename"),
    (lambda: rules.rename("a", "\\"), "rename"),
    (lambda: rules.rename({"a": "b"}, "c"), "rename"),
    (lambda: rules.rename("a"), "rename"),
    (lambda: rules.rename({}), "rename"),
    (lambda: rules.rename({"a": None}), "rename.*text or a function, found None"),
    (lambda: rules.drop("("), r"literally it is '\\\\\('"),
    (lambda: rules.from_target(), "at least one path"),
    (lambda: rules.from_target(""), "at least one path"),
    (lambda: rules.nest(""), "the separator is empty"),
    (lambda: rules.optimizer_state("a|(b"), r"optimizer_state.*: 'a\|\(b' is not a regular expression"),
    (lambda: rules.optimizer_state("a", "a|(b"), r"optimizer_state.*: 'a\|\(b' is not a regular expression"),
]


@pytest.mark.parametrize(("make", "message"), SENSELESS)
def test_senseless_arguments(make: Any, message: str) -> None:
    """They are errors at the latest when the rule is applied, before anything is read."""
    with pytest.raises(TransformError, match=message):
        make().apply(stored(SMALL), state_dict.describe(TARGET))
