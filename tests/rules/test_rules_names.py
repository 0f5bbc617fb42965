"""Rules that give stored leaves other names: what moves where; what all rules say of themselves, and refuse."""

from __future__ import annotations

import re
from typing import Any

import cloudpickle
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, iter_leaves
from flax_ckpt_compat._trees import state_dict
from tests.support.stored import applied, count, flat, stored, values

TREE = {
    "params": {"Dense_0": {"kernel": count((2, 3)), "bias": count((3,))}, "Dense_1": {"kernel": count((3, 1))}},
    "opt_state": {"0": {"mu": {"Dense_0": {"kernel": count((2, 3), start=9)}}}, "1": {}},
    "step": 7,
}
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=5)
TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4), max_leaves=10
).filter(lambda tree: isinstance(tree, dict))


def renamed(tree: Any, function: Any) -> dict[str, Any]:
    """The values by names that a function makes of the names."""
    return {function(name): value for name, value in flat(tree).items()}


def check(tree: Any, rule: rules.Rule, expected: dict[str, Any]) -> None:
    """A rule gives these leaves, in any order."""
    found = applied(tree, rule)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])


AB = {"a": {"a": 1}, "b": {"a": 2}}
ABC = {"a": {"b": {"c": 1}}}
SWAP = {"a": {"b": 1}, "b": {"a": 2}, "c": 3}
LAYERS = {"layer_1": 1, "layer_2": 2}
HEADS = {"a": {"head": {"w": 1}, "x": 2}, "b": {"head": {"w": 3}, "headless": 4}, "head": 5}
NESTED = {"net": {"l1.conv.weight": 1, "l1.bias": 2, "step": 3}, "a.b": 4}
FEW = {"params": {"w": 1}, "step": 2}
T5X = {"layers_0": {"norm": 1, "attention": 2}, "layers_1": 3, "relpos_bias": {"rel_embedding": 4}}
T5X_NAMES = {
    "target": "params",
    r"target/(\w+)/relpos_bias/rel_embedding": r"params/\1/layers_0/attention/bias",
    r"layers_(\d+)": r"blocks_\1",
    r"layers_(\d+)/norm": r"layers_\1/attention/norm",
}
OURS = {"layers_0": {"attention": {"norm": 1, "bias": 4}}, "blocks_0": {"attention": 2}, "blocks_1": 3}
RENAMED: list[tuple[Any, rules.Rule, dict[str, Any]]] = [
    # Of overlapping names the longest is taken, whichever entry is given first.
    *(
        ({"target": {"encoder": T5X}}, rules.rename(dict(names)), flat({"params": {"encoder": OURS}}))
        for names in (T5X_NAMES.items(), reversed(T5X_NAMES.items()))
    ),
    # Wherever it occurs as a whole name, with groups, and at several levels at once.
    (TREE, rules.rename(r"Dense_(\d)", r"enc/l\1"), renamed(TREE, lambda name: name.replace("Dense_", "enc/l"))),
    (AB, rules.rename("^a", "z"), {"z/a": 1, "b/a": 2}),
    (AB, rules.rename("a$", "z"), {"a/z": 1, "b/z": 2}),
    (ABC, rules.rename("a/b", "x"), {"x/c": 1}),
    (ABC, rules.rename("b", ""), {"a/c": 1}),
    # A mapping is applied at once: names swap, and the first pattern that matches wins.
    (SWAP, rules.rename({"a": "b", "b": "a"}), {"b/a": 1, "a/b": 2, "c": 3}),
    (SWAP, rules.rename({"a/b": "x", "a|b": "y", "c": "z/z"}), {"x": 1, "y/y": 2, "z/z": 3}),
    # A replacement may be a function of the match, as in re.sub.
    (LAYERS, rules.rename(r"layer_(\d)", lambda match: f"block_{int(match[1]) - 1}"), {"block_0": 1, "block_1": 2}),
    (LAYERS, rules.move(r"layer_(\d)", lambda match: f"x/{match[1]}"), {"x/1": 1, "x/2": 2}),
    # A place is a regular expression of the whole key path: the subtree it matches is meant, with all below.
    (HEADS, rules.drop(".*/head"), {"a/x": 2, "b/headless": 4, "head": 5}),
    (HEADS, rules.drop("head"), {name: value for name, value in flat(HEADS).items() if name != "head"}),
    (HEADS, rules.drop("[ab]/head", "head"), {"a/x": 2, "b/headless": 4}),
    (
        HEADS,
        rules.move("(.*)/head", r"heads/\1"),
        {"heads/a/w": 1, "a/x": 2, "heads/b/w": 3, "b/headless": 4, "head": 5},
    ),
    (
        HEADS,
        rules.wrap("m", at="a|b"),
        {"a/m/head/w": 1, "a/m/x": 2, "b/m/head/w": 3, "b/m/headless": 4, "head": 5},
    ),
    (HEADS, rules.unwrap("head", at="a|b"), {"a/w": 1, "a/x": 2, "b/w": 3, "b/headless": 4, "head": 5}),
    # A subtree goes to a new place, or among the children of one that is there; so does a leaf. As the root it is all.
    (
        TREE,
        rules.move("params/Dense_0", "params/encoder/first"),
        renamed(TREE, lambda name: name.replace("params/Dense_0", "params/encoder/first")),
    ),
    (
        TREE,
        rules.move("step", "params/Dense_0/scale"),
        renamed(TREE, lambda name: name.replace("step", "params/Dense_0/scale")),
    ),
    ({"a": {"x": 1}, "b": {"y": 2}}, rules.move("a", "b"), {"b/x": 1, "b/y": 2}),
    (TREE, rules.move("params", ""), flat(TREE["params"])),
    (TREE, rules.move("step", ""), {"": 7}),
    # Every name becomes levels; below a place alone, where one is given.
    (NESTED, rules.nest("."), {"net/l1/conv/weight": 1, "net/l1/bias": 2, "net/step": 3, "a/b": 4}),
    (NESTED, rules.nest(".", at="net"), {"net/l1/conv/weight": 1, "net/l1/bias": 2, "net/step": 3, "a.b": 4}),
    ({"a__w_": {"kernel": 1}}, rules.nest("__"), {"a/w_/kernel": 1}),
    # A copy leaves the original.
    (FEW, rules.copy("params", "ema"), {"params/w": 1, "ema/w": 1, "step": 2}),
    (FEW, rules.copy("(params)/w", r"ema/\1/v"), {"params/w": 1, "ema/params/v": 1, "step": 2}),
]


@pytest.mark.parametrize(("tree", "rule", "expected"), RENAMED, ids=[str(rule) for _, rule, _ in RENAMED])
def test_what_moves_where(tree: Any, rule: rules.Rule, expected: dict[str, Any]) -> None:
    """Whole names are renamed, moved, copied and dropped, and nothing else changes."""
    check(tree, rule, expected)


@pytest.mark.parametrize("pattern", ["(?i)dense_0", "(?i)(?s)DENSE_0", "(?i:dense_0)", "(?x) Dense _0  # the first"])
def test_rename_with_flags(pattern: str) -> None:
    """Flags at the beginning hold for the pattern as they do in Python, and whole names it is still."""
    check(TREE, rules.rename(pattern, "enc"), renamed(TREE, lambda name: name.replace("Dense_0", "enc")))
    with pytest.raises(TransformError, match="matches nothing"):
        rules.rename("(?i)dense", "x").apply(stored(TREE), None)


def test_names_with_slashes() -> None:
    """A name that contains / stays one name, and can be renamed as a whole but not in part; or is one of the target."""
    tree = {"mlp/~/linear_0": {"w": 1}, "other": 2}
    for rule, paths in (
        (rules.rename("other", "x"), [("mlp/~/linear_0", "w"), ("x",)]),
        (rules.rename("mlp/~/linear_0", "Dense_0"), [("Dense_0", "w"), ("other",)]),
        (rules.move("other", "mlp/~/w"), [("mlp/~/linear_0", "w"), ("mlp/~", "w")]),
    ):
        assert [path for path, _ in iter_leaves(rule.apply(stored(tree), stored({"mlp/~": {"w": 2}})))] == paths
    with pytest.raises(TransformError):
        rules.rename("linear_0", "x").apply(stored(tree), None)


@given(TREES, NAMES, st.data())
def test_there_and_back(tree: Any, name: str, data: Any) -> None:
    """A tree that was renamed, wrapped or moved, and back, is what it was; no rule writes to the tree that it gets."""
    before = stored(tree)
    snapshot = [(path, id(leaf)) for path, leaf in iter_leaves(before)]
    there = rules.rename("^([^/]+)", r"new name/\1").apply(before, None)
    assert list(values(rules.rename("^new name", "").apply(there, None)).items()) == list(flat(tree).items())
    there = rules.wrap(name=name).apply(before, None)
    assert set(there.children) == {name}
    assert list(values(rules.unwrap(name=re.escape(name)).apply(there, None)).items()) == list(flat(tree).items())
    path = data.draw(st.sampled_from([path for path, _ in snapshot]))
    source = "/".join(path[: data.draw(st.integers(1, len(path)))])
    there = rules.move(re.escape(source), "somewhere else/far").apply(before, None)
    assert values(rules.move("somewhere else/far", source.replace("\\", r"\\")).apply(there, None)) == flat(tree)
    assert isinstance(rules.drop(re.escape(path[0])).apply(before, None), Branch)
    assert [(path, id(leaf)) for path, leaf in iter_leaves(before)] == snapshot


def test_containers_survive() -> None:
    """Lists stay lists when they move, when names around them change, and when a neighbour is dropped."""
    tree = {"a": {"layers": [1, 2]}, "b": 3}
    for rule, path in (
        (rules.rename("^a", "z"), ["z", "layers"]),
        (rules.move("a/layers", "l"), ["l"]),
        (rules.drop("b"), ["a", "layers"]),
        (rules.wrap("w"), ["w", "a", "layers"]),
    ):
        node = rule.apply(stored(tree), None)
        for name in path:
            node = node.children[name]
        assert node.container is Container.LIST, rule
    swapped = rules.rename({"a": "b", "b": "a"}).apply(stored({"a": [], "b": {"c": 1}}), None)
    assert swapped.children["b"].container is Container.LIST
    joined = rules.move("y/0/a", "x/0/a").apply(stored({"x": [None], "y": {"0": {"a": 1}, "1": 2}}), None)
    assert joined.children["x"].container is Container.LIST
    for rule, expected in (
        (rules.rename({"x/0": "y/0", "y/0": "x/0"}), Container.TUPLE),
        (rules.rename({"x": "y", "y": "x"}), Container.LIST),
        (rules.rename({"x": "y", "y": "x", "b": "c"}), Container.LIST),
    ):
        swapped = rule.apply(state_dict.describe({"x": [{"a": 1, "b": 2}, 2], "y": (3, {"b": 4})}), None)
        assert swapped.children["y"].container is expected, rule


def test_arguments_are_those_of_the_call() -> None:
    """A mapping or list that the caller changes later does not change the rule."""
    names, numbers = {"a": "x"}, [1, 0]
    renaming, transposing = rules.rename(names), rules.transpose("w", numbers)
    names["b"] = names.pop("a")
    numbers.reverse()
    check({"a": 1, "b": 2}, renaming, {"x": 1, "b": 2})
    assert transposing.apply(stored({"w": np.ones((2, 3))}), None).children["w"].shape == (3, 2)


@pytest.mark.parametrize(
    "wrong", [b"w", None, 3.5, [[1], 2], {}, np.array(2), object()], ids=lambda one: type(one).__name__
)
def test_arguments_of_wrong_types(wrong: Any) -> None:
    """Each rule names the argument, what it is and what was found, and none fails with an error of Python."""
    calls: dict[str, Any] = {
        "pattern": [rules.rename, rules.stack, rules.cut, rules.cast, rules.apply, rules.key_data, rules.unreplicate],
        "patterns": [rules.drop, rules.from_target],
        "source": [rules.move, rules.copy],
        "name": [rules.wrap, rules.unwrap],
        "at": [rules.optimizer_state, rules.pre_linen],
        "size": [lambda one: rules.pad("w", one), lambda one: rules.cut("w", one)],
        "number": [lambda one: rules.index("w", one)],
        "axis": [lambda one: rules.unstack("w", "w_{}", axis=one)],
        "axes": [lambda one: rules.transpose("w", one)],
        "shape": [lambda one: rules.reshape("w", one), lambda one: rules.resize("w", one)],
        "to": [lambda one: rules.move("w", one)],
        "into": [lambda one: rules.split("w", one), lambda one: rules.stack(r"w(\d)", one)],
        "function": [lambda one: rules.apply("w", one)],
    }
    more = {rules.rename: ["x"], rules.stack: ["x"], rules.cut: [2], rules.cast: ["f4"], rules.apply: [abs]}
    more |= {rules.move: ["x"], rules.copy: ["x"]}
    for name, made in calls.items():
        for make in made:
            if make is not rules.rename or wrong != {}:  # which takes a mapping
                with pytest.raises(TransformError, match=f": {name} is .*, found "):
                    make(wrong, *more.get(make, []))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
INTS = st.integers(-3, 9) | st.integers(-3, 9).map(np.int64) | st.integers(0, 9).map(np.uint8)
NUMBERS = (
    st.integers(-(2**70), 2**70)
    | st.floats()
    | st.complex_numbers()
    | st.booleans()
    | st.floats(width=32).map(np.float32)
    | st.floats(width=16).map(ml_dtypes.bfloat16)
    | st.complex_numbers().map(np.complex128)
    | st.floats(width=32).map(jnp.float32)
    | st.just(np.array(3.5))
)
DTYPES = st.sampled_from(
    ["bfloat16", "f4", np.float32, jnp.float16, jnp.bfloat16, ml_dtypes.int4, np.dtype(">i4"), float, int, ">f8"]
)
LISTS = st.lists(TEXTS, min_size=2, max_size=3, unique=True)
ESCAPED = TEXTS.map(re.escape)
NEW_NAMES = TEXTS.map(lambda text: text.replace("\\", "/"))
RULES = st.one_of(
    st.builds(rules.rename, ESCAPED, NEW_NAMES),
    st.builds(rules.rename, st.dictionaries(ESCAPED, NEW_NAMES, min_size=1)),
    st.builds(rules.copy, ESCAPED, NEW_NAMES),
    st.builds(rules.move, ESCAPED, NEW_NAMES),
    st.builds(rules.drop, ESCAPED, ESCAPED.map(np.str_)),
    st.builds(rules.wrap, TEXTS, at=ESCAPED),
    st.builds(rules.unwrap, ESCAPED, ESCAPED),
    st.builds(rules.stack, st.just(r"layer_(\d+)"), TEXTS, INTS),
    st.builds(rules.unstack, ESCAPED, st.just("l{}"), axis=INTS),
    st.builds(rules.fuse, LISTS | LISTS.map(tuple), TEXTS, INTS),
    st.builds(
        rules.split,
        ESCAPED,
        st.just(("a", "b")),
        axis=INTS,
        sizes=st.tuples(INTS, INTS).map(list) | st.none(),
    ),
    st.builds(rules.transpose, ESCAPED, st.permutations(range(3)) | st.just(np.array([1, 0]))),
    st.builds(rules.reshape, ESCAPED, st.just((2, np.int32(3), -1))),
    st.builds(rules.cast, ESCAPED, DTYPES),
    st.builds(rules.pad, ESCAPED, INTS, INTS, NUMBERS | st.just("target")),
    st.builds(rules.cut, ESCAPED, INTS.map(abs), INTS),
    st.builds(rules.from_target, ESCAPED, ESCAPED),
    st.builds(rules.optimizer_state, ESCAPED, ESCAPED | st.none()),
    st.builds(rules.pre_linen, ESCAPED),
    st.builds(rules.pre_optax),
)


@given(RULES)
@example(rules.pad("w", 1, value=complex(0.0, -0.0)))
@example(rules.pad("w", 1, value=complex(-0.0, 0.0)))
def test_a_rule_is_its_source_and_reaches_other_machines(rule: rules.Rule) -> None:
    """Whatever a rule was given, arrays and numpy's numbers too, its source needs only ``rules``; executors send it."""
    assert str(rule) == rule.source and eval(rule.source, {"rules": rules}) == rule
    again = cloudpickle.loads(cloudpickle.dumps(rule))
    assert again == rule and again.source == rule.source


KEY = KeyData("threefry2x32", np.zeros(2, np.uint32))
STACK = rules.stack(r"layer_(\d+)", "layers")
SMALL = {"w": count((2, 3)), "n": count((3,), np.int32), "s": 1, "key": KEY, "v": count((5,)), "a.b": {"c/d": 1}}
PAIR = {"params": {"Dense_0": {"kernel": count((2, 3))}, "Dense_1": {"kernel": count((3, 1))}}, "step": 7}
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
    (SMALL, rules.transpose("w", (0, 2)), r"\bw\b"),
    (SMALL, rules.reshape("w", (4, 2)), r"\bw\b"),
    (SMALL, rules.reshape("w", (4, -1)), r"\bw\b"),
    (SMALL, rules.split_axis("w", (5, -1), axis=1), "w is .*cannot reshape array of size 3"),
    (SMALL, rules.merge_axes("w", axis=1), "w is .*no 2 axes from axis 1 on"),
    ({"pos": count((1, 17, 3))}, rules.resize("pos", (4, 4), axis=1), "pos is .* 17 positions on axis 1 .* not a grid"),
    ({"pos": count((1, 17, 3))}, rules.resize("pos", (4, 4)), "pos is .* expected as many axes"),
    (SMALL, rules.resize("n", (4,)), "no array of floats"),
    (SMALL, rules.cast("n", "float16"), "matches no array of floats"),
    (SMALL, rules.cast("s", "float16"), "matches no array of floats"),
    (SMALL, rules.cast("key", "float16"), "matches no array of floats"),
    ({"r": count((3,), np.uint32)}, rules.wrap_key_data("r", "rbg"), r"r is .* not data of keys of rbg \(.*=\(3,\)\);"),
    (SMALL, rules.wrap_key_data("w"), "matches no array of uint32"),
    (SMALL, rules.key_data("w"), "matches no PRNG key"),
    ({"w": count((4, 2)), "b": count((3,))}, rules.unreplicate(), r"b is .* 3 replicas on its first axis, of \[3, 4\]"),
    ({"w": count((4, 2)), "x": np.array(1.0)}, rules.unreplicate(), r"x is .* no replicas .* of \[0, 4\]"),
    ({"w": count((0, 2))}, rules.unreplicate(), "w is .* no replicas on its first axis"),
    ({"step": 3}, rules.unreplicate(), "matches no array"),
    # Names.
    (PAIR, rules.rename("Dense", "x"), "near it: params/Dense_1, params/Dense_0"),
    (PAIR, rules.rename({"step": "x", "d": "y"}), "'d' matches nothing that other patterns leave"),
    (PAIR, rules.rename({"Dense_0/kernel": "x", "params/Dense_0": "y"}), "'Dense_0/kernel' matches nothing that"),
    (PAIR, rules.rename("step", lambda _: None), "the function returns None for step, expected text"),  # type: ignore
    (PAIR, rules.move("params/Dense_2", "x"), "params/Dense_2"),
    (PAIR, rules.drop("model/Dense_0/kernel"), "near it: params/Dense_0/kernel"),
    (PAIR, rules.copy("x", "y"), "at the top it has: params, step"),
    (PAIR, rules.unwrap("Dense_2", at="params"), "params has no Dense_2"),
    (PAIR, rules.wrap("x", at="step"), "step is a leaf"),
    (PAIR, rules.unwrap("step"), "step is a leaf"),
    (PAIR, rules.nest("."), "no name in the checkpoint has '.' in it"),
    ({"a": {"b": 1}, "a/b": 2}, rules.drop("a/b"), "means 2 things"),
    ({"w[0]": 1, "a+b": {"c": 2}}, rules.drop("a+b"), r"near it: a\+b"),
    (PAIR, rules.from_target("head"), "the target has no head; near it: params/head"),
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
        (PAIR, rules.rename(r"Dense_\d", "x"), "params/Dense_0/kernel and params/Dense_1/kernel"),
        (PAIR, rules.move("step", "params"), "params"),
        (PAIR, rules.move("params", "step"), "step"),
        (PAIR, rules.rename("step", "params/Dense_0"), "params/Dense_0"),
        (PAIR, rules.copy("params/Dense_0/kernel", "step"), "step"),
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
