"""Mappings of names, rules and transforms in one list, and two checkpoints restored into one state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat import checkpoints, config, errors, plan_restore, restore, rules, save
from flax_ckpt_compat.transforms import RestoreTransform, Transform
from tests.support.stored import count

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
    """The other checkpoint has rules of its own, and rules that follow see what was taken."""
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


def test_bad_transforms_of_another_checkpoint(other: str) -> None:
    """What is not a list of rules is refused where it is written."""
    for given in (rules.rename("a", "b"), [{"a": "b"}], {"a": "b"}, [3]):
        with pytest.raises(errors.TransformError, match="transforms= is a list of rules"):
            rules.from_checkpoint(other, "params/head", transforms=given)  # type: ignore[arg-type]


def test_shards_and_keys_of_the_other_checkpoint(other: str, tmp_path: Path) -> None:
    """Leaves of the other checkpoint are placed as the target says."""
    path = save(tmp_path / "first", {"params": {}, "step": 1}, format="orbax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    target = {"params": {"head": {"w": jax.ShapeDtypeStruct((3, 2), jnp.float32, sharding=sharding)}}, "step": 0}
    restored = restore(path, target, transforms=[rules.from_checkpoint(other, "params/head")])
    assert restored["params"]["head"]["w"].sharding == sharding
    np.testing.assert_array_equal(restored["params"]["head"]["w"], count((3, 2), start=100))


def test_with_a_checkpointer(other: str, tmp_path: Path) -> None:
    """A given checkpointer reads the first checkpoint, and not the other."""
    path = checkpoints.save_checkpoint(
        tmp_path / "orbax", OLD, 1, orbax_checkpointer=ocp.PyTreeCheckpointer(), overwrite=True
    )
    target = {"params": {**OLD["params"], **HEAD}, "step": 0}
    restored = checkpoints.restore_checkpoint(
        path,
        target,
        orbax_transforms=[rules.from_checkpoint(other, "params/head")],
        orbax_checkpointer=ocp.PyTreeCheckpointer(),
    )
    check(restored["params"]["Dense_0"], OLD["params"]["Dense_0"])
    np.testing.assert_array_equal(restored["params"]["head"]["w"], count((3, 2), start=100))


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
    (file,) = (tmp_path / "damaged" / "d").iterdir()
    data = bytearray(file.read_bytes())
    data[data.index(values.tobytes()) + 1000] ^= 1
    file.write_bytes(data)
    target, taken = {**OLD, "head": np.zeros(2000)}, [rules.from_checkpoint(other, "head")]
    with pytest.raises(errors.ChecksumError, match="head"):
        restore(path, target, transforms=taken)
    with config.override(checksums="off"):
        assert np.sum(restore(path, target, transforms=taken)["head"] != values) == 1
