"""Rules, mappings and transforms through whole restores: of real state, of every place, of two checkpoints."""

import collections
import functools
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training import train_state

from flax_ckpt_compat import checkpoints, config, convert, errors, plan_restore, restore, rules, save
from flax_ckpt_compat.errors import MissingLeavesError, NameCollisionError, TransformError
from flax_ckpt_compat.transforms import RestoreTransform, Transform
from tests.support.peers import skip_without_typed_keys
from tests.support.samples import assert_apart, one_program
from tests.support.saves import save_items
from tests.support.stored import count

LAYERS = {f"layer_{n}": {"kernel": np.full((2, 3), n, np.float32), "bias": np.arange(3.0) + n} for n in range(4)}
STACKED = {
    "kernel": np.stack([layer["kernel"] for layer in LAYERS.values()]),
    "bias": np.stack([layer["bias"] for layer in LAYERS.values()]),
}


def create(params: Any, tx: Any = None) -> Any:
    """A TrainState with adam, or another optimizer."""
    return train_state.TrainState.create(apply_fn=None, params=params, tx=tx or optax.adam(0.1))


@functools.cache
def trained() -> Any:
    """One after a step, so that its moments are not zero."""
    params = {**{name: {key: jnp.asarray(value) for key, value in layer.items()} for name, layer in LAYERS.items()}}
    state = create({"body": {**params, "qkv": jnp.arange(12.0).reshape(2, 6)}}, one_program(optax.adam(0.1)))
    return state.apply_gradients(grads=jax.tree.map(lambda x: x + 1, state.params))


def zeros_like(tree: Any) -> Any:
    """The same shapes and dtypes."""
    return jax.tree.map(np.zeros_like, tree)


@pytest.fixture
def saved(flag: bool, tmp_path: Path) -> tuple[str, Any]:
    """A trained state, saved in each format."""
    state = trained()
    return checkpoints.save_checkpoint(tmp_path, state, 1), state


def test_rules_compose_on_a_train_state(saved: tuple[str, Any]) -> None:
    """Rename, stack and split in parameters and moments alike, with the values that numpy gives."""
    path, old = saved
    given = [
        rules.rename("body", "encoder"),
        rules.stack(r"layer_(\d+)", "layers"),
        rules.split("qkv", ["query", "key", "value"]),
    ]

    def new_of(body: Any) -> Any:
        layers = [body[f"layer_{n}"] for n in range(4)]
        query, key, value = np.split(np.asarray(body["qkv"]), 3, axis=-1)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
        return {"encoder": {"layers": stacked, "query": query, "key": key, "value": value}}

    params = new_of(old.params["body"])
    restored = checkpoints.restore_checkpoint(
        path, create(jax.tree.map(jnp.zeros_like, params)), orbax_transforms=given
    )
    adam = old.opt_state[0]
    for mine, expected in (
        (restored.params, params),
        (restored.opt_state[0].mu, new_of(adam.mu["body"])),
        (restored.opt_state[0].nu, new_of(adam.nu["body"])),
    ):
        jax.tree.map(np.testing.assert_array_equal, mine, expected)
    assert int(restored.opt_state[0].count) == 1 and int(restored.step) == 1


def test_results_are_memory_of_their_own(flag: bool, tmp_path: Path) -> None:
    """Pieces of one array are writable, in C order, and none shows in another, in the order of any writing."""
    path = save(tmp_path / "x", {"layers": STACKED, "qkv": np.arange(12.0).reshape(2, 6), "e": np.ones((5, 2))})
    given = [
        rules.unstack("layers", "layer_{}", axis=0),
        rules.split("qkv", ["q", "k", "v"]),
        rules.transpose("layer_1/kernel", (1, 0)),
        rules.reshape("layer_2/kernel", (6,)),
        rules.split("e", ["first", "rest"], axis=0, sizes=[2, 3]),
        rules.split("rest", ["second", "third"], axis=0, sizes=[1, 2]),
    ]
    restored = restore(path, None, transforms=given)
    assert len(jax.tree.leaves(restored)) == 8 + 3 + 3
    assert_apart(restored, jax.tree.map(np.array, restored))


def test_other_kinds_of_leaves_are_carried(flag: bool, tmp_path: Path) -> None:
    """Keys, text, bytes, Python numbers, numpy scalars and None survive a rename and a Transform."""
    tree = {"key": jax.random.key(3), "s": "text", "i": 3, "f": 2.5, "b": True, "z": None, "n": np.float32(2)}
    path = save(tmp_path / "x", {"old": tree, "bytes": b"\0\xff"})
    restored = restore(path, None, transforms=[rules.rename("old", "new")])
    given = {f"new/{name}": Transform(f"old/{name}") for name in tree if name != "z"}
    again = restore(path, {"new": tree}, transforms=given)
    for new in (restored["new"], again["new"]):
        assert jax.random.key_data(new["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
        assert {name: (type(new[name]), new[name]) for name in tree if name != "key"} == {
            name: (type(value), value) for name, value in tree.items() if name != "key"
        }
    assert restored["bytes"] == b"\0\xff"


class Bag:
    """A user's class that takes any state."""

    def __init__(self, state: dict[str, Any]):
        self.state = state


serialization.register_serialization_state(Bag, lambda bag: dict(bag.state), lambda _, state: Bag(state))


def test_a_dict_after_a_rule_gives_a_leaf_in_the_place_of_a_subtree(flag: bool, tmp_path: Path) -> None:
    """As the dict alone does: what is stored below the leaf, or above it, makes room."""
    kernel = np.arange(3.0)
    path = checkpoints.save_checkpoint(tmp_path, {"x": {"y": kernel}, "old": kernel + 1, "z": kernel}, 1)
    target = {"x": np.zeros(3), "z": {"w": np.zeros(3)}}
    takes = {"x": Transform(original_key="new"), "z/w": Transform(original_key="new")}
    found = restore(path, target, transforms=[rules.rename("old", "new"), takes])
    np.testing.assert_equal(found, {"x": kernel + 1, "z": {"w": kernel + 1}})


def test_a_list_of_dicts_alone_is_refused(tmp_path: Path) -> None:
    """Orbax reads it as transforms of a list's items, of which this target has none: it would do nothing."""
    path = save(tmp_path / "saved", {"a": np.ones(2)}, format="msgpack")
    for call in (restore, plan_restore):
        with pytest.raises(TransformError, match="give one dict"):
            call(path, {"b": np.zeros(2)}, transforms=[{"b": Transform(original_key="a")}])
    items = restore(path, [np.zeros(2)], transforms=[Transform(original_key="a")])
    np.testing.assert_equal(items, [np.ones(2)])
    path = save(tmp_path / "items", {str(n): {"a": np.full(2, n)} for n in range(2)}, format="msgpack")
    given = [{"b": Transform(original_key=f"{n}/a")} for n in range(2)]
    target = {str(n): {"b": np.zeros(2)} for n in range(2)}  # as flax's to_state_dict gives a list
    found = checkpoints.restore_checkpoint(path, target, orbax_transforms=given)
    np.testing.assert_equal(found, {str(n): {"b": np.full(2, n)} for n in range(2)})
    with pytest.raises(TransformError, match="give one dict"):
        checkpoints.restore_checkpoint(path, [{"c": np.zeros(2)}] * 2, orbax_transforms=given)


def test_a_type_of_its_own_that_keeps_a_part(flag: bool, tmp_path: Path) -> None:
    """An object that takes any state gets the target's own leaves where a rule keeps them, and no None."""
    checkpoints.save_checkpoint(tmp_path, {"bag": {"w": np.ones(3), "old": 1}}, 1)
    target = {"bag": Bag({"w": np.zeros(3), "head": {"b": np.arange(2.0), "n": 7}})}
    keep = [rules.from_target("bag/head")]
    bag = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=keep)["bag"]
    assert bag.state["w"].tolist() == [1, 1, 1] and bag.state["old"] == 1
    assert bag.state["head"]["b"].tolist() == [0, 1] and bag.state["head"]["n"] == 7


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (rules.move("params/a", "enc"), {"params": {"b": 2.0}, "opt": {"m": 3.0}, "enc": 1.0}),
        (rules.move("params", ""), {"a": 1.0, "b": 2.0}),
        (rules.rename("^opt", "optimizer"), {"params": {"a": 1.0, "b": 2.0}, "optimizer": {"m": 3.0}}),
        (rules.drop("opt"), {"params": {"a": 1.0, "b": 2.0}}),
        (rules.copy("opt", "params/old"), {"params": {"a": 1.0, "b": 2.0, "old": {"m": 3.0}}, "opt": {"m": 3.0}}),
        (rules.wrap("model"), {"model": {"params": {"a": 1.0, "b": 2.0}, "opt": {"m": 3.0}}}),
    ],
    ids=str,
)
def test_rules_give_items_other_names(tmp_path: Path, rule: Any, expected: dict[str, Any]) -> None:
    """Without a target, all that rules make of several items is restored, planned and converted, JSON as it is."""
    items: dict[str, Any] = {"params": {"a": 1.0, "b": 2.0}, "opt": {"m": 3.0}}
    save_items(tmp_path / "src", **items, notes=ocp.args.JsonSave({"n": 1}))
    expected = {"notes": {"n": 1}, **expected}
    assert restore(tmp_path / "src", transforms=[rule]) == expected
    planned = plan_restore(tmp_path / "src", None, transforms=[rule]).leaves
    assert {leaf.path for leaf in planned} == {"/".join(path) for path in _paths(expected)}
    assert {source for leaf in planned for source in leaf.sources} <= {"notes/n", "params/a", "params/b", "opt/m"}
    convert(tmp_path / "src", tmp_path / "flat", "orbax", transforms=[rule])
    trees = [name for name in expected if name != "notes"]
    assert restore(tmp_path / "flat", step=3) == (expected if len(trees) > 1 else expected[trees[0]])
    assert restore(tmp_path / "flat", step=3, item="notes") == {"n": 1}
    if "enc" not in expected and "a" not in expected:
        convert(tmp_path / "src", tmp_path / "dst", "manager", transforms=[rule])
        names = {path.name for path in (tmp_path / "dst" / "3").iterdir() if path.is_dir()}
        assert names == set(expected)


def _paths(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(tree, dict):
        return [path]
    return [found for name, child in tree.items() for found in _paths(child, (*path, name))]


@pytest.mark.parametrize("kind", [types.MappingProxyType, collections.UserDict, collections.ChainMap])
def test_a_mapping_that_is_no_tree_names_items(tmp_path: Path, kind: Any) -> None:
    """All items are given, with a warning, and none of them for the whole."""
    items = {"params": {"w": np.ones(2)}, "opt": {"m": np.zeros(2)}}
    save_items(tmp_path, **items)
    found = checkpoints.restore_checkpoint(tmp_path, kind({"params": {"w": np.zeros(2)}, "zz": np.ones(1)}))
    np.testing.assert_equal(found, items)


@pytest.mark.parametrize("names", [("params", "opt"), ("weights", "opt")])
def test_a_target_of_items_and_other_names(tmp_path: Path, names: tuple[str, str]) -> None:
    """What it names of several items is restored; only the rest is missing, kept, or given by rules."""
    first, second = names
    trees = {name: {"w": np.full(2, 1.0 + n)} for n, name in enumerate(names)}
    save_items(tmp_path, **trees, notes=ocp.args.JsonSave({"n": 1}))
    target: dict[str, Any] = {first: {"w": np.zeros(2)}, "new": {"w": np.full(2, 7.0)}, "notes": {"n": 0}}
    with pytest.raises(MissingLeavesError) as caught:
        restore(tmp_path, target)
    assert caught.value.missing == ("new/w",)
    for given, new in (({}, [7, 7]), ([rules.rename(f"^{second}", "new")], [2, 2])):
        restored = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=given)
        assert (restored[first]["w"].tolist(), restored["new"]["w"].tolist()) == ([1, 1], new)
        assert restored["notes"] == {"n": 1}
        found = {leaf.path: leaf.sources for leaf in plan_restore(tmp_path, target, transforms=given).leaves}
        assert found[f"{first}/w"] == (f"{first}/w",)


def test_a_state_whose_fields_are_items(tmp_path: Path) -> None:
    """An object gets what is stored of its fields, although they are items; with transforms it kept its own values."""
    state = train_state.TrainState.create(apply_fn=print, params={"w": np.ones(2)}, tx=optax.adam(1e-3))
    save_items(tmp_path, params=state.params, opt_state=state.opt_state)
    target = state.replace(params={"w": np.zeros(2)}, step=5)
    with pytest.raises(MissingLeavesError) as caught:
        restore(tmp_path, target)
    assert caught.value.missing == ("step",)
    restored = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms={})
    assert (type(restored), restored.params["w"].tolist(), restored.step) == (train_state.TrainState, [1, 1], 5)
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(state.opt_state)


def test_rules_that_make_one_leaf_of_several_items(tmp_path: Path) -> None:
    """A leaf that becomes the whole tree is the result; a name that a JSON item has is refused."""
    save_items(tmp_path, params={"x": np.ones(2)}, opt={"x": np.ones(2)}, notes=ocp.args.JsonSave({"n": 1}))
    assert restore(tmp_path, transforms=[rules.move("opt/x", "")]).tolist() == [1, 1]
    with pytest.raises(NameCollisionError, match="JSON item 'notes'"):
        restore(tmp_path, transforms=[rules.rename("^opt", "notes")])


def test_through_a_foreign_checkpointer(tmp_path: Path) -> None:
    """Rules and transforms apply to what the caller's checkpointer reads, which is not the other checkpoint."""
    skip_without_typed_keys()
    checkpointer = ocp.PyTreeCheckpointer()
    tree = {**LAYERS, "key": jax.random.key(1), "n": 3}
    checkpoints.save_checkpoint(tmp_path, tree, 1, orbax_checkpointer=checkpointer)
    other = rules.from_checkpoint(save(tmp_path / "other", {"n": 4}, format="msgpack"), "n")
    given = [rules.stack(r"layer_(\d+)", "layers"), rules.rename("key", "rng"), rules.cut("kernel", 2)]
    for taken, n in (([], 3), ([other], 4)):
        restored = checkpoints.restore_checkpoint(
            tmp_path, None, orbax_transforms=given + taken, orbax_checkpointer=checkpointer
        )
        assert restored["n"] == n
    np.testing.assert_array_equal(restored["layers"]["kernel"], STACKED["kernel"][:2])
    assert jax.random.key_data(restored["rng"]).tolist() == [0, 1]
    restored = checkpoints.restore_checkpoint(
        tmp_path,
        {"sum": np.zeros((2, 3)), "n": 0},
        orbax_transforms={"sum": Transform("layer_2/kernel", value_fn=lambda value: value + 1)},
        orbax_checkpointer=checkpointer,
    )
    assert restored["sum"].tolist() == [[3] * 3] * 2 and restored["n"] == 3


def test_values_that_do_not_fit_are_told(flag: bool, tmp_path: Path) -> None:
    """A cast that only the values forbid raises at reading, by the leaf's name."""
    path = save(tmp_path / "x", {"n": np.array([1, 300])})
    with pytest.raises(TransformError, match="n has 1 values that int8 cannot hold, such as 300"):
        restore(path, None, transforms=[rules.cast("n", np.int8)])


@pytest.mark.parametrize("by_step", [False, True])
def test_the_checkpoint_is_replaced_meanwhile(by_step: bool, tmp_path: Path) -> None:
    """After it was opened, with its texts, and before its arrays are read: what replaced it is restored, whole."""
    old, new = ({"w": np.full((300, 300), value, np.float32), "s": str(value)} for value in (1, 2))
    path, replaced = tmp_path / "checkpoint_1", list[bool]()
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))  # whose files have the same names

    def replace(stored: Any, _: Any) -> Any:
        if not replaced:
            replaced.append(True)
            checkpointer.save(path, new, force=True)
        return stored

    checkpointer.save(path, old)
    found = restore(tmp_path if by_step else path, old, transforms=[rules.Rule("replace", replace)])
    assert found["s"] == "2" and np.array_equal(found["w"], new["w"])


OLD = {"params": {"Dense_0": {"w": count((2, 3)), "b": count((3,), start=7)}, "head": {"w": count((3, 2))}}, "step": 5}
NEW = {"params": {"encoder": {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}}, "step": 0}
HEAD = {"head": {"w": np.zeros((3, 2), np.float32)}}
FORMATS = ("msgpack", "orbax")


@pytest.fixture(params=FORMATS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The old tree, in each format."""
    return save(tmp_path / "old", OLD, format=request.param)


def check(tree: Any, expected: Any) -> None:
    """The same structure, types and values."""
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def test_a_mapping_of_names(path: str) -> None:
    """New names to old ones, of subtrees or leaves, with groups; what is taken is not reported as unused."""
    expected = {"params": {"encoder": OLD["params"]["Dense_0"]}, "step": 5}
    for mapping in (
        {"params/encoder": "params/Dense_0"},
        {"params/encoder/w": "params/Dense_0/w", "params/encoder/b": "params/Dense_0/b"},
        {"params/encoder/(.)": r"params/Dense_0/\1"},
    ):
        plan = plan_restore(path, NEW, transforms=mapping)
        assert plan.raises is None and plan.unused == ("params/head/w",)
        check(restore(path, NEW, transforms=mapping), expected)
        check(checkpoints.restore_checkpoint(path, NEW, orbax_transforms=mapping), expected)
        check(restore(path, NEW, transforms=[mapping]), expected)


def test_a_mapping_swaps(tmp_path: Path) -> None:
    """All names are taken from the tree as it was; one may be taken twice."""
    path = save(tmp_path / "x", {"a": {"w": 1}, "b": {"w": 2}}, format="msgpack")
    target = {"a": {"w": 0}, "b": {"w": 0}, "c": {"w": 0}}
    check(
        restore(path, target, transforms={"a": "b", "b": "a", "c": "a"}), {"a": {"w": 2}, "b": {"w": 1}, "c": {"w": 1}}
    )


def test_a_mapping_is_strict(path: str) -> None:
    """Names that are not there are errors that name like ones, and so are missing leaves and no target."""
    for mapping, why in (
        ({"params/encoder": "params/Dense_1"}, "for the target's params/encoder, is not stored; near it"),
        ({"params/decoder": "params/Dense_0"}, "the target has no params/decoder; near it: params/encoder"),
        ({"params/(": "x"}, "not a regular expression"),
        (
            {"params/encoder": "params/Dense_0", "params/enc.*": "params/Dense_0"},
            "'params/encoder' matches only what later keys match, too",
        ),
    ):
        with pytest.raises(errors.TransformError, match=re.escape(why)) as caught:
            restore(path, NEW, transforms=mapping)
    assert caught.value.leaf == "params/encoder"
    with pytest.raises(errors.MissingLeavesError):
        checkpoints.restore_checkpoint(path, NEW, orbax_transforms={"params/encoder/w": "params/Dense_0/w"})
    with pytest.raises(errors.TransformError, match="maps names of a target, and there is none"):
        restore(path, transforms={"params/encoder": "params/Dense_0"})
    with pytest.raises(errors.TransformError, match="names and Transforms in one mapping; give two in a list"):
        restore(path, NEW, transforms={"step": "step", "params/encoder/w": Transform(use_fallback=True)})


def test_rules_and_transforms_in_one_list(path: str) -> None:
    """Each step sees what those before it made of the tree; transforms in a list leave nothing out silently."""
    target = {"params": {**NEW["params"], "mean": np.zeros(3, np.float32)}, "step": 0, "extra": 3}
    steps = [
        rules.rename("Dense_0", "hidden"),
        {r"params/encoder/(.*)": Transform(original_key=r"params/hidden/\1"), "extra": Transform(use_fallback=True)},
        {"step": Transform(original_key="step", value_fn=lambda step: step + 1)},
        {
            "params/mean": RestoreTransform(
                multi_value_fn=lambda _, tree, __: tree["params"]["head"]["w"].mean(axis=1),
                multi_value_fn_input_args={"params/head/w": None},
            )
        },
        rules.apply("params/mean", lambda value: -value),
    ]
    plan = plan_restore(path, target, transforms=steps)
    assert plan.raises is None
    mean = -OLD["params"]["head"]["w"].mean(axis=1)
    expected = {"params": {"encoder": OLD["params"]["Dense_0"], "mean": mean}, "step": 6, "extra": 3}
    check(restore(path, target, transforms=steps), expected)
    check(checkpoints.restore_checkpoint(path, target, orbax_transforms=steps), expected)
    with pytest.raises(errors.MissingLeavesError):
        checkpoints.restore_checkpoint(path, target, orbax_transforms=steps[:-2])
    with pytest.raises(errors.TransformError, match="match no leaf of the target: nothing"):
        restore(path, target, transforms=[*steps, {"nothing": Transform(use_fallback=True)}])
    with pytest.raises(errors.TransformError, match="found 3 in a list of rules"):
        restore(path, target, transforms=[*steps, 3])


@pytest.fixture(params=FORMATS)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Another checkpoint, in each format, as a step of a directory."""
    tree = {"params": {"head": {"w": count((3, 2), start=100)}, "Dense_0": {"w": count((2, 3), start=50)}}, "step": 9}
    save(tmp_path / "others", {"params": {}}, step=1, format=request.param)
    save(tmp_path / "others", tree, step=2, format=request.param)
    return str(tmp_path / "others")


def test_two_checkpoints_into_one(path: str, other: str) -> None:
    """A backbone from one and a head from another: one call, one plan, whatever the formats."""
    target = {"params": {**OLD["params"], **HEAD}, "step": 0}
    steps = [rules.from_checkpoint(other, "params/head")]
    plan = plan_restore(path, target, transforms=steps)
    assert plan.raises is None
    sources = {leaf.path: leaf.sources for leaf in plan.leaves}
    assert sources["params/Dense_0/w"] == ("params/Dense_0/w",)
    (shown,) = sources["params/head/w"]
    assert shown.startswith(other) and shown.endswith("_2/params/head/w")
    for restored in (
        restore(path, target, transforms=steps),
        checkpoints.restore_checkpoint(path, target, orbax_transforms=steps),
        restore(path, transforms=steps),
    ):
        check(restored["params"]["Dense_0"], OLD["params"]["Dense_0"])
        np.testing.assert_array_equal(restored["params"]["head"]["w"], count((3, 2), start=100))
        assert restored["step"] == 5


def test_rules_for_the_other_checkpoint(path: str, other: str) -> None:
    """The other checkpoint has rules of its own, which are refused where they are written if they are no list of rules.

    Rules that follow see what was taken."""
    for given in (rules.rename("a", "b"), [{"a": "b"}], {"a": "b"}, [3]):
        with pytest.raises(errors.TransformError, match="transforms is a list of rules"):
            rules.from_checkpoint(other, "params/head", transforms=given)  # type: ignore[arg-type]
    target = {"params": {"first": {"w": np.zeros((2, 6), np.float32)}}, "step": 0}
    first = rules.from_checkpoint(other, "params/first", transforms=[rules.rename("Dense_0", "first")], step=2)
    restored = restore(path, target, transforms=[first, rules.pad("first/w", 6, axis=1)])
    np.testing.assert_array_equal(restored["params"]["first"]["w"][:, :3], count((2, 3), start=50))
    assert first.source == (
        f"rules.from_checkpoint({other!r}, 'params/first', step=2, transforms=[rules.rename('Dense_0', 'first')])"
    )


def test_what_the_other_checkpoint_lacks(path: str, other: str, tmp_path: Path) -> None:
    """A subtree that it lacks is an error, and a leaf within is missing: nothing comes from the first instead."""
    target = {"params": OLD["params"], "step": 0}
    with pytest.raises(errors.MissingLeavesError, match="params/Dense_0/b"):
        restore(path, target, transforms=[rules.from_checkpoint(other, "params/Dense_0")])
    with pytest.raises(errors.TransformError, match="has no params/Dense_0/b; near it"):
        restore(path, target, transforms=[rules.from_checkpoint(other, "params/Dense_0/b")])
    with pytest.raises(errors.TransformError, match="the target has no params/nothing"):
        restore(path, target, transforms=[rules.from_checkpoint(other, "params/nothing")])
    alike = save(tmp_path / "alike", {"a/b": {"c": np.ones(2)}, "a": {"b": {"c": np.zeros(2)}}}, format="msgpack")
    taken = [rules.from_checkpoint(alike, "a/b/c")]
    assert restore(path, {"a/b": {"c": np.zeros(2)}}, transforms=taken)["a/b"]["c"].tolist() == [1, 1]
    with pytest.raises(errors.TransformError, match="whose names contain /; match what is above"):
        restore(path, {"a": {"b/c": np.zeros(2)}}, transforms=taken)
    for step, where in ((3, other), (None, tmp_path / "nowhere")):
        with pytest.raises(errors.CheckpointNotFoundError):
            restore(path, target, transforms=[rules.from_checkpoint(where, "params/head", step=step)])


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_the_other_checkpoint_is_replaced_meanwhile(path: str, tmp_path: Path, use_ocdbt: bool) -> None:
    """Leaves of two states are never mixed: what was replaced after it was opened is an error that names it."""
    old, new = ({"w": np.full((300, 300), value, np.float32), "n": value} for value in (1, 2))
    other, checkpointer = str(tmp_path / "other"), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt))
    checkpointer.save(other, old)

    def replace(stored: Any, _: Any) -> Any:
        checkpointer.save(other, new, force=True)
        return stored

    taken = [rules.from_checkpoint(other, "w", "n"), rules.Rule("replace", replace)]
    with pytest.raises(errors.ReplacedError, match="was replaced while it was read") as caught:
        restore(path, {"w": old["w"], "n": 0}, transforms=taken)
    assert caught.value.path == other


def test_containers_around_what_is_taken_stay(tmp_path: Path) -> None:
    """Without a target, a list remains a list, and int keys remain ints, where an entry is another checkpoint's."""
    here, there = (
        save(tmp_path / name, {"layers": [{"w": n}, {"w": n + 1}], "by": {3: n, 4: n + 1}}, format="orbax")
        for name, n in (("a", 0), ("b", 10))
    )
    found = restore(here, transforms=[rules.from_checkpoint(there, "layers/1", "by/3")])
    assert found == {"layers": [{"w": 0}, {"w": 11}], "by": {3: 10, 4: 1}}


def test_damage_of_the_other_checkpoint(path: str, tmp_path: Path) -> None:
    """Its checksums are verified as those of the first one are."""
    values = np.random.default_rng(0).random(2000)
    other = save(tmp_path / "damaged", {"head": values}, format="orbax")
    (file,) = (one for one in (tmp_path / "damaged" / "d").iterdir() if values.tobytes() in one.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(values.tobytes()) + 1000] ^= 1
    file.write_bytes(data)
    target, taken = {**OLD, "head": np.zeros(2000)}, [rules.from_checkpoint(other, "head")]
    with pytest.raises(errors.ChecksumError, match="head"):
        restore(path, target, transforms=taken)
    with config.override(checksums="off"):
        assert np.sum(restore(path, target, transforms=taken)["head"] != values) == 1
