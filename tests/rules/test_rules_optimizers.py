"""Optimizer states and the target's own values, with real optax: whose moments are whose, by names or in chains."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training import checkpoints as flax_checkpoints
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, rules
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Branch, iter_leaves
from flax_ckpt_compat._discovery import opening
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Own
from tests.support.saves import use_flag
from tests.support.stored import stored, value_of

PARAMS = {
    "Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "head": {"kernel": jnp.ones((3, 4)), "scale": jnp.float32(1)},
}
ADAM = optax.adam(1e-3)
SGD = optax.sgd(0.1, momentum=0.9)
_compiled = functools.cache(jax.jit)  # else each use of an optimizer traces it anew


def trained(optimizer: Any, params: Any = PARAMS, seed: int = 0) -> Any:
    """An optimizer's state after three steps, every array of it different."""
    opt_state, update = optimizer.init(params), _compiled(optimizer.update)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        grads = jax.tree.map(lambda leaf: np.asarray(rng.normal(size=leaf.shape), np.float32), params)
        _, opt_state = update(grads, opt_state, params)
    return opt_state


def saved(opt_state: Any, flag: bool, tmp_path: Path) -> Any:
    """The tree of a checkpoint that real Flax wrote in the format that the flag says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flax_checkpoints.save_checkpoint(tmp_path.absolute(), {"opt_state": opt_state, "step": 3}, 3)
    path = checkpoints.latest_checkpoint(str(tmp_path))
    assert path is not None, flag
    opened = opening.Opened(location_of(path), verify=True)
    return opened.reader(opened.parts[0]).tree


def leaves_of(node: Any) -> dict[str, Any]:
    """Leaves of a neutral tree by their names."""
    return {"/".join(path): leaf for path, leaf in iter_leaves(node) if not isinstance(leaf, Branch)}


def flat(tree: Any) -> dict[str, Any]:
    """Leaves of a user's tree by their names."""
    return leaves_of(state_dict.describe(tree))


def plain(tree: Any) -> Any:
    """Nested dicts of numpy arrays, as msgpack keeps them."""
    return jax.tree.map(np.asarray, serialization.to_state_dict(tree))


def migrate(old: Any, new: Any, *before: rules.Rule, optimizer: Any = None) -> dict[str, Any]:
    """The new optimizer's leaves: a stored value, or `Own.KEEP_TARGET`."""
    tree, target = old, state_dict.describe({"opt_state": new, "step": 0})
    for rule in (*before, optimizer or rules.optimizer_state()):
        tree = rule.apply(tree, target)
    found = leaves_of(tree.children["opt_state"])
    assert found.keys() == flat(new).keys()
    return found


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The leaves taken are those expected, bit for bit, and all others are the target's own."""
    values = {name: value_of(leaf) for name, leaf in found.items() if leaf is not Own.KEEP_TARGET}
    assert values.keys() == expected.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


WRAPPED = {
    "the same": (ADAM, "0/"),
    "chain": (optax.chain(optax.clip(1.0), ADAM), "1/0/"),
    "chain of chains": (optax.chain(optax.clip(1.0), optax.chain(optax.add_decayed_weights(0.1), ADAM)), "1/1/0/"),
    "MultiSteps": (optax.MultiSteps(ADAM, 2), "inner_opt_state/0/"),
    "inject_hyperparams": (optax.inject_hyperparams(optax.adam)(1e-3), "inner_state/0/"),
    "apply_if_finite": (optax.apply_if_finite(ADAM, 3), "inner_state/0/"),
    "adamw with a schedule": (optax.adamw(optax.constant_schedule(1e-3)), "0/"),
    "masked, all true": (optax.masked(ADAM, True), "inner_state/0/"),
}


LABELS = {"Dense_0": "a", "head": "b"}
BOTH_ADAM = optax.multi_transform({"a": optax.adam(1e-3), "b": optax.adam(1e-4)}, LABELS)
OTHER_LABELS = optax.multi_transform({"z": optax.adam(1e-3), "b": optax.adam(1e-4)}, {"Dense_0": "z", "head": "b"})
MASKED = optax.masked(ADAM, {"Dense_0": True, "head": False})
LIKE_ADAM = optax.scale_by_adam()
CLIP = optax.clip(1.0)
CHANGED = {"Dense_0": PARAMS["Dense_0"], "head": {"kernel": jnp.ones((3, 100))}, "extra": {"kernel": jnp.ones(5)}}
RENAMED = {"encoder": PARAMS["Dense_0"], "head": PARAMS["head"]}
SAME = [
    optax.MultiSteps(optax.inject_hyperparams(optax.adamw)(1e-3), 2),
    optax.chain(CLIP, optax.adafactor(1e-3)),
    optax.chain(optax.ema(0.9), SGD, optax.scale_by_schedule(optax.constant_schedule(1.0))),
    optax.multi_transform({"a": ADAM, "b": SGD}, LABELS),
]


def divided(name: str) -> list[str]:
    """The names of Adam's leaf in `BOTH_ADAM`: each has its moments, and the count."""
    labels = (label for module, label in LABELS.items() if module in name or "count" in name)
    return [f"inner_states/{label}/inner_state/{name}" for label in labels]


# The old optimizer, the new state, and the new names of an old leaf, of which there may be none.
MIGRATIONS: dict[str, tuple[Any, Any, Callable[[str], list[str]]]] = {
    "new, gone and changed parameters": (ADAM, ADAM.init(CHANGED), lambda name: [name] * ("head" not in name)),
    "one optimizer divided among several": (ADAM, BOTH_ADAM.init(PARAMS), divided),
    "several become one": (BOTH_ADAM, ADAM.init(PARAMS), lambda name: [name.rpartition("inner_state/")[2]]),
    "labels in another order": (BOTH_ADAM, OTHER_LABELS.init(PARAMS), lambda name: [name.replace("/a/", "/z/")]),
    "frozen now": (ADAM, MASKED.init(PARAMS), lambda name: [f"inner_state/{name}"] * ("head" not in name)),
    "frozen before": (MASKED, ADAM.init(PARAMS), lambda name: [name.removeprefix("inner_state/")]),
    "two of equal shapes in a chain, in their order": (
        optax.chain(ADAM, LIKE_ADAM),
        optax.chain(CLIP, ADAM, LIKE_ADAM).init(PARAMS),
        lambda name: [f"{int(name[0]) + 1}{name[1:]}"],
    ),
    "a target of shapes only": (ADAM, jax.eval_shape(ADAM.init, PARAMS), lambda name: [name]),
    "moments of another dtype": (ADAM, optax.adam(1e-3, mu_dtype=jnp.bfloat16).init(PARAMS), lambda name: [name]),
    "renamed": (ADAM, optax.chain(CLIP, ADAM).init(RENAMED), lambda name: ["1/" + name.replace("Dense_0", "encoder")]),
    **{f"the same {n}": (one, one.init(PARAMS), lambda name: [name]) for n, one in enumerate(SAME)},
}


def wrapped(where: str) -> Callable[[str], list[str]]:
    """The names of Adam's leaf where a wrapper has it."""
    return lambda name: [where + name.removeprefix("0/")]


def unwrapped(where: str) -> Callable[[str], list[str]]:
    """The names that Adam has for its leaf in a wrapper, which has others, too."""
    return lambda name: (
        ["0/" + name.removeprefix(where)] * name.startswith((f"{where}count", f"{where}mu", f"{where}nu"))
    )


INTO_WRAPPERS = {f"into {name}": (ADAM, one.init(PARAMS), wrapped(where)) for name, (one, where) in WRAPPED.items()}
OUT_OF_WRAPPERS = {
    f"out of {name}": (one, ADAM.init(PARAMS), unwrapped(where)) for name, (one, where) in WRAPPED.items()
}
MIGRATIONS |= INTO_WRAPPERS | OUT_OF_WRAPPERS


@pytest.mark.parametrize("name", MIGRATIONS)
def test_a_state_goes_on(name: str, flag: bool, tmp_path: Path) -> None:
    """The leaves of parameters that still exist are taken, with all counters; those of others are the target's own."""
    optimizer, new, names_of = MIGRATIONS[name]
    old = trained(optimizer)
    before = [rules.rename("Dense_0", "encoder")] if name == "renamed" else []
    expected = {new_name: leaf for old_name, leaf in flat(old).items() for new_name in names_of(old_name)}
    check(migrate(saved(old, flag, tmp_path), new, *before), expected)


def test_ambiguous_states_are_refused() -> None:
    """One state that fits two stored ones equally well, or two that would share one, are errors with a way out."""
    two = plain({"opt_state": {"gen": trained(ADAM), "disc": trained(ADAM, seed=1)}})
    with pytest.raises(TransformError, match=r"equally well.*optimizer_state\(") as caught:
        migrate(stored(two), ADAM.init(PARAMS))
    assert "opt_state/gen'" in str(caught.value) and "opt_state/disc'" in str(caught.value)
    one = plain({"opt_state": trained(ADAM)})
    with pytest.raises(TransformError, match="equally well"):
        migrate(stored(one), optax.chain(ADAM, ADAM).init(PARAMS))
    found = migrate(stored(two), ADAM.init(PARAMS), optimizer=rules.optimizer_state(stored_at="opt_state/disc"))
    check(found, flat(trained(ADAM, seed=1)))


def test_no_count_without_its_moments() -> None:
    """A state none of whose parameters is stored does not get the count of others, which would spoil its start."""
    old = plain({"opt_state": trained(ADAM)})
    with pytest.raises(TransformError, match="no stored state fits"):
        migrate(stored(old), ADAM.init({"other": jnp.ones(7)}))


@pytest.mark.parametrize("names", ["to novograd", "from novograd"])
def test_no_moment_without_the_others(names: str, flag: bool, tmp_path: Path) -> None:
    """NovoGrad's second moment is one number an array: Adam's steps were 133 times as long with zeros in its place."""
    kernels = {"a": jnp.ones((2, 3)), "b": jnp.ones((4,))}
    new, old = (optax.novograd(1e-3), ADAM) if names == "to novograd" else (ADAM, optax.novograd(1e-3))
    stored_tree = saved(trained(old, kernels), flag, tmp_path)
    with pytest.raises(TransformError, match="no stored state fits"):
        migrate(stored_tree, new.init(kernels))


def test_moments_of_a_parameter_that_is_a_number() -> None:
    """It has the same moments in both, so they are carried over with the count; those of the arrays are not."""
    params = {"scale": jnp.float32(1), "kernel": jnp.ones((2, 3))}
    old = trained(optax.novograd(1e-3), params)
    found = migrate(stored(plain({"opt_state": old})), ADAM.init(params))
    check(found, {"0/count": old[0].count, "0/mu/scale": old[0].mu["scale"], "0/nu/scale": old[0].nu["scale"]})


def test_another_optimizer_altogether() -> None:
    """Momentum is not an Adam: nothing is taken, and the error tells the fields of both and what to do."""
    with pytest.raises(TransformError, match=r"count, mu, nu; below opt_state .*trace.*from_target"):
        migrate(stored(plain({"opt_state": trained(SGD)})), ADAM.init(PARAMS))


def test_a_state_that_was_elsewhere() -> None:
    """The checkpoint's optimizer state may be elsewhere; it stays there, too, for what else comes."""
    old = trained(ADAM)
    found = migrate(stored(plain({"tx": old})), ADAM.init(PARAMS), optimizer=rules.optimizer_state(stored_at="tx"))
    check(found, flat(old))
    for rule in (rules.optimizer_state(), rules.optimizer_state("tx")):
        with pytest.raises(TransformError, match=r"has no (opt_state|tx)"):
            migrate(stored(plain({"tx": old})), ADAM.init(PARAMS), optimizer=rule)


@pytest.mark.skipif(not hasattr(nnx, "to_pure_dict"), reason="this Flax has no nnx.to_pure_dict")
def test_nnx_optimizers(flag: bool, tmp_path: Path) -> None:
    """In an nnx.State there are no named tuples; the names of optax's fields are enough."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    old = nnx.to_pure_dict(nnx.state(nnx.Optimizer(model, ADAM, wrt=nnx.Param)))["opt_state"]
    old = jax.tree.map(lambda leaf: leaf + 1, old)
    clipped = nnx.Optimizer(model, optax.chain(optax.clip(1.0), ADAM), wrt=nnx.Param)
    new = nnx.to_pure_dict(nnx.state(clipped))["opt_state"]
    check(migrate(saved(old, flag, tmp_path), new), {f"1/{name}": leaf for name, leaf in flat(old).items()})


TARGET = {"params": {"a": jnp.ones(2), "head": {"kernel": jnp.ones(3)}}, "batch_stats": {"mean": jnp.ones(4)}, "e": ()}


def test_from_target() -> None:
    """Leaves and subtrees of the target are its own, where there is something stored and where there is not."""
    tree = stored({"params": {"a": np.ones(2), "head": {"old": np.ones(3)}}, "step": 1})
    after = rules.from_target("params/head", "batch_stats", "e").apply(tree, state_dict.describe(TARGET))
    found = {"/".join(path): leaf for path, leaf in iter_leaves(after)}
    assert found.pop("e").children == {}
    assert {name for name, leaf in found.items() if leaf is Own.KEEP_TARGET} == {
        "params/head/kernel",
        "batch_stats/mean",
    }
    assert found.keys() == {"params/a", "params/head/kernel", "batch_stats/mean", "step"}
    assert set(tree.children["params"].children["head"].children) == {"old"}


TWO = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
MULTI = optax.MultiSteps(ADAM, 2)


def numbered(number: float, optimizer: Any = ADAM, params: Any = TWO) -> Any:
    """An optimizer's state every leaf of which is this number, so that it tells whose it was."""
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, number), optimizer.init(params))


def fresh(optimizer: Any = ADAM, params: Any = TWO) -> Any:
    """A state that says of itself that it is the target's own."""
    return numbered(0, optimizer, params)


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


GEN_DISC = {"gen": numbered(1), "disc": numbered(2)}
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


def test_a_proposal_for_one_state_leaves_others(flag: bool, tmp_path: Path) -> None:
    """The rule in the error is for the state that is ambiguous alone: those of other parameters go on."""
    others = {"z": jnp.ones(7)}
    old = {"x": numbered(1), "y": numbered(2), "k": numbered(3, params=others)}
    path, target = written({"opt": old}, flag, tmp_path), {"opt": {"0": fresh()[0], "k": fresh(params=others)}}
    with pytest.raises(TransformError, match="fit equally well") as caught:
        restored(path, target, rules.optimizer_state("opt"))
    line = re.findall(r"rules\.optimizer_state\('[^)]*\)", str(caught.value))[0]
    assert origins(restored(path, target, eval(line, {"rules": rules}))["opt"]) == {"0": 1, "k": 3}


def test_equal_names_tell(flag: bool, tmp_path: Path) -> None:
    """Each takes that of its own name, in any order, inside other wrappers than before, too."""
    path = written({"opt": {"gen": numbered(1, MULTI), "disc": numbered(2), "extra": numbered(3)}}, flag, tmp_path)
    clipped = optax.chain(optax.clip(1.0), ADAM)
    found = restored(path, {"opt": {"disc": fresh(clipped), "gen": fresh(clipped)}}, rules.optimizer_state("opt"))
    assert origins(found["opt"]) == {"disc": 2, "gen": 1}


def carried(old: Any, new: Any) -> dict[str, Any]:
    """The number of the optimizer that each leaf was taken from; None where the target's own stays."""
    tree = rules.optimizer_state("opt").apply(stored(plain({"opt": old})), state_dict.describe({"opt": new}))
    found = leaves_of(tree.children["opt"])
    return {name: None if leaf is Own.KEEP_TARGET else np.ravel(value_of(leaf))[0] for name, leaf in found.items()}


def test_names_of_wrappers_do_not_tell() -> None:
    """A wrapper that the other of two has had makes them no relatives."""
    found = carried({"gen": numbered(1, MULTI), "disc": numbered(2)}, {"gen": fresh(), "disc": fresh(MULTI)})
    assert found["gen/0/count"] == 1
    assert found["disc/inner_opt_state/0/count"] == found["disc/inner_opt_state/0/mu/w"] == 2


def test_its_own_name_before_more_leaves() -> None:
    """Where a parameter changed its shape, its optimizer is not taken for another that has all the shapes of today."""
    wide = {**TWO, "b": jnp.ones(4)}
    found = carried({"gen": numbered(1), "disc": numbered(2, params=wide)}, {"gen": fresh(params=wide)})
    assert (found["gen/0/mu/w"], found["gen/0/mu/b"]) == (1, None)


def shuffled(tree: Any, data: Any) -> Any:
    """The same dicts with their names in another order."""
    if not isinstance(tree, dict):
        return tree
    return {name: shuffled(tree[name], data) for name in data.draw(st.permutations(list(tree)))}


TREES = {
    "names": ({"gen": numbered(1), "disc": numbered(2)}, {"disc": fresh(), "gen": fresh()}),
    "labels": (
        numbered(1, optax.multi_transform({"x": ADAM, "y": ADAM}, {"w": "x", "b": "y"})),
        fresh(),
    ),
    "two chains": (
        {"gen": (numbered(1), numbered(2)), "disc": (numbered(3), numbered(4))},
        {"disc": (optax.EmptyState(), fresh(), fresh()), "gen": (fresh(), fresh())},
    ),
    "a long chain": (tuple(numbered(n) for n in range(11)), (optax.EmptyState(), *(fresh() for _ in range(11)))),
    "other names": (GEN_DISC, OTHER_NAMES["other names"]),
    "dropped": ((numbered(1), numbered(2)), (fresh(),)),
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
    old = {"0": numbered(1), "1": numbered(2)}
    found = carried(old, {1: fresh(), 0: fresh()})
    assert (found["0/0/count"], found["1/0/count"]) == (1, 2)
    with pytest.raises(TransformError, match="equally well"):
        carried(old, {1: fresh(), 2: fresh()})


def test_what_a_later_rule_may_read_is_not_lost(flag: bool, tmp_path: Path) -> None:
    """A state that another would replace is an error that tells how to swap two, which then works."""
    path = written({"opt": (numbered(1), numbered(2))}, flag, tmp_path)
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
    found = restored(tmp_path, {"opt": {"disc": fresh(clipped), "gen": fresh(MULTI)}}, rules.optimizer_state("opt"))
    assert origins(found["opt"]["disc"]) == 2
    assert origins(found["opt"]["gen"].inner_opt_state) == 1
    with pytest.raises(TransformError, match="equally well"):
        restored(tmp_path, {"opt": OTHER_NAMES["other names"]}, rules.optimizer_state("opt"))
