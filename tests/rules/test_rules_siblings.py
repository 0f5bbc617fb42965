"""Several optimizers side by side: whose moments are whose is told by names, and by the order in chains only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import checkpoints as flax_checkpoints
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, rules
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import Branch
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Own
from tests.support.saves import use_flag
from tests.support.stored import stored, value_of

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
ADAM = optax.adam(1e-3)
WRAPPED = optax.MultiSteps(ADAM, 2)


def trained(number: float, optimizer: Any = ADAM, params: Any = PARAMS) -> Any:
    """An optimizer's state every leaf of which is this number, so that it tells whose it was."""
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, number), optimizer.init(params))


def fresh(optimizer: Any = ADAM, params: Any = PARAMS) -> Any:
    """A state that says of itself that it is the target's own."""
    return trained(0, optimizer, params)


def written(tree: Any, flag: bool, path: Path) -> Path:
    """A checkpoint that real Flax wrote."""
    with use_flag(flag):
        flax_checkpoints.save_checkpoint(path.absolute(), tree, 1)
    return path


def restored(path: Path, target: Any, *given_rules: rules.Rule) -> Any:
    """The target restored through rules."""
    return checkpoints.restore_checkpoint(path, target, orbax_transforms=list(given_rules))


def origins(tree: Any) -> Any:
    """The optimizer that each state in a dict or tuple came from, by its number; all its leaves must agree."""
    if isinstance(tree, dict):
        return {name: origins(one) for name, one in tree.items()}
    found = {float(value) for leaf in jax.tree.leaves(tree) for value in np.asarray(leaf).ravel()}
    assert len(found) == 1, found
    return found.pop()


GEN_DISC = {"gen": trained(1), "disc": trained(2)}
OTHER_NAMES = {
    "other names": {"discriminator": fresh(), "generator": fresh()},
    "short names": {"d": fresh(), "g": fresh()},
    "ranks": {"first": fresh(), "second": fresh()},
    "a tuple": (fresh(), fresh()),
    "one name of them": {"disc": fresh(), "generator": fresh()},
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_that_do_not_tell_are_refused(name: str, flag: bool, tmp_path: Path) -> None:
    """Named siblings are never paired by their order; the error has the lines that pair them, each of which works."""
    path = written({"opt": GEN_DISC}, flag, tmp_path)
    target = {"opt": OTHER_NAMES[name]}
    with pytest.raises(TransformError, match="fit equally well") as caught:
        restored(path, target, rules.optimizer_state("opt"))
    lines = re.findall(r"rules\.optimizer_state\('[^)]*\)", str(caught.value))
    assert len(lines) == 2
    at = lines[0].split("'")[1]
    others = [f"opt/{one}" for one in state_dict.describe(target).children["opt"].children if f"opt/{one}" != at]
    for line, number in zip(lines, (1, 2) if "gen'" in lines[0] else (2, 1), strict=True):
        found = restored(path, target, eval(line, {"rules": rules}), rules.from_target(*others))
        entry = found["opt"][int(at[4:])] if name == "a tuple" else found["opt"][at.removeprefix("opt/")]
        assert origins(entry) == number, line


def test_equal_names_tell(flag: bool, tmp_path: Path) -> None:
    """Each takes that of its own name, in any order, inside other wrappers than before, too."""
    path = written({"opt": {"gen": trained(1, WRAPPED), "disc": trained(2), "extra": trained(3)}}, flag, tmp_path)
    clipped = optax.chain(optax.clip(1.0), ADAM)
    found = restored(path, {"opt": {"disc": fresh(clipped), "gen": fresh(clipped)}}, rules.optimizer_state("opt"))
    assert origins(found["opt"]) == {"disc": 2, "gen": 1}


def test_names_of_wrappers_do_not_tell() -> None:
    """A wrapper that the other of two has had makes them no relatives."""
    old = {"gen": trained(1, WRAPPED), "disc": trained(2)}
    target = {"gen": fresh(), "disc": fresh(WRAPPED)}
    tree = rules.optimizer_state("opt").apply(stored(plain({"opt": old})), state_dict.describe({"opt": target}))
    new = tree.children["opt"].children
    assert value_of(new["gen"].children["0"].children["count"]) == 1
    inner = new["disc"].children["inner_opt_state"].children["0"].children
    assert (value_of(inner["count"]), value_of(inner["mu"].children["w"])[0, 0]) == (2, 2)


def test_its_own_name_before_more_leaves() -> None:
    """Where a parameter changed its shape, its optimizer is not taken for another that has all the shapes of today."""
    wide = {**PARAMS, "b": jnp.ones(4)}
    old = {"gen": trained(1), "disc": trained(2, params=wide)}
    tree = rules.optimizer_state("opt").apply(
        stored(plain({"opt": old})), state_dict.describe({"opt": {"gen": fresh(params=wide)}})
    )
    adam = tree.children["opt"].children["gen"].children["0"].children
    assert value_of(adam["mu"].children["w"])[0, 0] == 1
    assert adam["mu"].children["b"] is Own.KEEP_TARGET


def plain(tree: Any) -> Any:
    """Nested dicts of numpy arrays, as msgpack keeps them."""
    return jax.tree.map(np.asarray, serialization.to_state_dict(tree))


def shuffled(tree: Any, data: Any) -> Any:
    """The same dicts with their names in another order."""
    if not isinstance(tree, dict):
        return tree
    return {name: shuffled(tree[name], data) for name in data.draw(st.permutations(list(tree)))}


TREES = {
    "names": ({"gen": trained(1), "disc": trained(2)}, {"disc": fresh(), "gen": fresh()}),
    "labels": (
        trained(1, optax.multi_transform({"x": ADAM, "y": ADAM}, {"w": "x", "b": "y"})),
        fresh(),
    ),
    "two chains": (
        {"gen": (trained(1), trained(2)), "disc": (trained(3), trained(4))},
        {"disc": (optax.EmptyState(), fresh(), fresh()), "gen": (fresh(), fresh())},
    ),
    "a long chain": (tuple(trained(n) for n in range(11)), (optax.EmptyState(), *(fresh() for _ in range(11)))),
    "other names": (GEN_DISC, OTHER_NAMES["other names"]),
    "dropped": ((trained(1), trained(2)), (fresh(),)),
}


@given(st.sampled_from(list(TREES)), st.data())
def test_the_order_of_names_does_not_matter(name: str, data: Any) -> None:
    """However a format orders the stored names, the same leaves are taken, or the same error is raised."""
    old, new = TREES[name]
    target = state_dict.describe({"opt": new})

    def outcome(tree: Any) -> Any:
        try:
            return names_taken(rules.optimizer_state("opt").apply(stored(tree), target).children["opt"])
        except TransformError as error:
            return str(error)

    tree = plain({"opt": old})
    assert outcome(shuffled(tree, data)) == outcome(tree)


def names_taken(node: Any, path: str = "") -> Any:
    """For each leaf the name that it was stored under."""
    if isinstance(node, Branch):
        return {name: names_taken(child, f"{path}/{name}") for name, child in node.children.items()}
    return node if node is None or isinstance(node, Own) else node.path


def test_chains_are_in_order(flag: bool, tmp_path: Path) -> None:
    """Members of a chain keep their order, more than ten of them, too, and behind new ones."""
    old, new = TREES["a long chain"]
    found = restored(written({"opt": old}, flag, tmp_path), {"opt": new}, rules.optimizer_state("opt"))
    assert [origins(one) for one in found["opt"][1:]] == list(range(11))
    old, new = TREES["two chains"]
    found = restored(written({"opt": old}, flag, tmp_path / "2"), {"opt": new}, rules.optimizer_state("opt"))
    assert {name: [origins(one) for one in found["opt"][name][-2:]] for name in new} == {"gen": [1, 2], "disc": [3, 4]}


def test_numbers_that_are_names() -> None:
    """Keys of a dict that are numbers are names: they have to be equal."""
    old = plain({"opt": {"0": trained(1), "1": trained(2)}})
    same = rules.optimizer_state("opt").apply(stored(old), state_dict.describe({"opt": {1: fresh(), 0: fresh()}}))
    found = same.children["opt"].children
    assert [value_of(found[name].children["0"].children["count"]) for name in "01"] == [1, 2]
    with pytest.raises(TransformError, match="equally well"):
        rules.optimizer_state("opt").apply(stored(old), state_dict.describe({"opt": {1: fresh(), 2: fresh()}}))


def test_what_a_later_rule_may_read_is_not_lost(flag: bool, tmp_path: Path) -> None:
    """A state that another would replace is an error that tells how to swap two, which then works."""
    path = written({"opt": (trained(1), trained(2))}, flag, tmp_path)
    target = {"opt": (fresh(), fresh())}
    swap = [rules.optimizer_state("opt/0", "opt/1"), rules.optimizer_state("opt/1", "opt/0")]
    with pytest.raises(TransformError, match=r"has opt/0, too.*rules\.move\('opt', 'old'\)"):
        restored(path, target, *swap)
    given_rules = (
        rules.move("opt", "old"),
        rules.optimizer_state("opt/0", "old/1"),
        rules.optimizer_state("opt/1", "old/0"),
        rules.drop("old"),
    )
    assert [origins(one) for one in restored(path, target, *given_rules)["opt"]] == [2, 1]
    found = restored(
        path, target, rules.drop("opt/0"), rules.optimizer_state("opt/0", "opt/1"), rules.from_target("opt/1")
    )
    assert [origins(one) for one in found["opt"]] == [2, 0]


def old_layout(tree: Any) -> Any:
    """The state dict of a tree as flax before 0.3.6 wrote it: a namedtuple by its name, fields and values, numbered."""
    if isinstance(tree, tuple):
        values = {str(n): old_layout(child) for n, child in enumerate(tree)}
        if not hasattr(tree, "_fields"):
            return values
        return {
            "name": type(tree).__name__,
            "fields": {str(n): f for n, f in enumerate(tree._fields)},
            "values": values,
        }
    return {name: old_layout(child) for name, child in tree.items()} if isinstance(tree, dict) else np.asarray(tree)


def test_namedtuples_of_flax_before_0_3_6(tmp_path: Path) -> None:
    """Their fields are found: into the same optimizers as real Flax restores them, and into a chain."""
    (tmp_path / "checkpoint_1").write_bytes(serialization.msgpack_serialize(old_layout({"opt": GEN_DISC})))
    target = {"opt": {"disc": fresh(), "gen": fresh()}}
    with use_flag(False):
        expected = flax_checkpoints.restore_checkpoint(tmp_path, target)
    assert origins(expected["opt"]) == {"disc": 2, "gen": 1}
    found = restored(tmp_path, target, rules.optimizer_state("opt"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    clipped = optax.chain(optax.clip(1.0), ADAM)
    found = restored(tmp_path, {"opt": {"disc": fresh(clipped), "gen": fresh(WRAPPED)}}, rules.optimizer_state("opt"))
    assert origins(found["opt"]["disc"]) == 2
    assert origins(found["opt"]["gen"].inner_opt_state) == 1
    with pytest.raises(TransformError, match="equally well"):
        restored(tmp_path, {"opt": OTHER_NAMES["other names"]}, rules.optimizer_state("opt"))
