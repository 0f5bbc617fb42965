"""Optimizer states and the target's own values, with real optax: whose moments are whose, by names or in chains."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache, partial
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
from flax_ckpt_compat._core.tree import Branch, iter_leaves
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Own
from tests.support.saves import saved_by_peer, use_flag
from tests.support.stored import stored

PARAMS = {
    "Dense_0": {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)},
    "head": {"kernel": np.ones((3, 4), np.float32), "scale": np.float32(1)},
}
ADAM = optax.adam(1e-3)
SGD = optax.sgd(0.1, momentum=0.9)
MULTI = optax.MultiSteps(ADAM, 2)
NOVOGRAD = optax.novograd(1e-3)
CLIP = optax.clip(1.0)
CLIPPED = optax.chain(CLIP, ADAM)
INJECT = optax.inject_hyperparams(optax.adam)(1e-3)
SCHEDULE = optax.scale_by_schedule(optax.constant_schedule(1.0))
SCHEDULED = optax.chain(ADAM, SCHEDULE)


@cache
def trained(optimizer: Any) -> Any:
    """An optimizer's state after three steps, every array of it different."""
    opt_state, update = optimizer.init(PARAMS), jax.jit(optimizer.update)
    rng = np.random.default_rng(0)
    for _ in range(3):
        grads = jax.tree.map(lambda leaf: np.asarray(rng.normal(size=leaf.shape), np.float32), PARAMS)
        _, opt_state = update(grads, opt_state, PARAMS)
    return opt_state


def flat(tree: Any) -> dict[str, Any]:
    """Leaves of a user's tree by their names."""
    found = iter_leaves(state_dict.describe(tree))
    return {"/".join(path): leaf for path, leaf in found if not isinstance(leaf, Branch)}


def plain(tree: Any) -> Any:
    """Nested dicts of numpy arrays, as msgpack keeps them."""
    return jax.tree.map(np.asarray, serialization.to_state_dict(tree))


def written(tree: Any, flag: bool, path: Path) -> Path:
    """A checkpoint in the format that the flag says, by real Flax or real Orbax."""
    with use_flag(flag):
        saved_by_peer(path, tree, real_orbax=flag)
    return path


def restored(path: Path, target: Any, *given_rules: rules.Rule) -> Any:
    """The target restored through rules."""
    return checkpoints.restore_checkpoint(path, target, orbax_transforms=list(given_rules))


WRAPPED = {
    "the same": (ADAM, "0/"),
    "chain": (CLIPPED, "1/0/"),
    "chain of chains": (optax.chain(CLIP, optax.chain(optax.add_decayed_weights(0.1), ADAM)), "1/1/0/"),
    "MultiSteps": (MULTI, "inner_opt_state/0/"),
    "inject_hyperparams": (INJECT, "inner_state/0/"),
    "apply_if_finite": (optax.apply_if_finite(ADAM, 3), "inner_state/0/"),
    "adamw with a schedule": (optax.adamw(optax.constant_schedule(1e-3)), "0/"),
    "masked, all true": (optax.masked(ADAM, True), "inner_state/0/"),
}
LABELS = {"Dense_0": "a", "head": "b"}
BOTH_ADAM = optax.multi_transform({"a": optax.adam(1e-3), "b": optax.adam(1e-4)}, LABELS)
OTHER_LABELS = optax.multi_transform({"z": optax.adam(1e-3), "b": optax.adam(1e-4)}, {"Dense_0": "z", "head": "b"})
MASKED = optax.masked(ADAM, {"Dense_0": True, "head": False})
LIKE_ADAM = optax.scale_by_adam()
COUNTS = LIKE_ADAM._replace(init=lambda params: LIKE_ADAM.init(params)._replace(count=jnp.zeros(2)))
CHANGED = {"Dense_0": PARAMS["Dense_0"], "head": {"kernel": np.ones((3, 100))}, "extra": {"kernel": np.ones(5)}}
RULE = rules.optimizer_state()
RENAMED = {"encoder": PARAMS["Dense_0"], "head": PARAMS["head"]}
NUMBER_AND_ARRAY = {"scale": np.float32(1), "kernel": np.ones((2, 3), np.float32)}
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


def wrapped(where: str) -> Callable[[str], list[str]]:
    """The names of Adam's leaf where a wrapper has it."""
    return lambda name: [where + name.removeprefix("0/")]


def unwrapped(where: str) -> Callable[[str], list[str]]:
    """The names that Adam has for its leaf in a wrapper, which has others, too."""
    return lambda name: (
        ["0/" + name.removeprefix(where)] * name.startswith((f"{where}count", f"{where}mu", f"{where}nu"))
    )


# The old optimizer, the new one, and the new names of an old leaf, of which there may be none.
MIGRATIONS: dict[str, tuple[Any, Any, Callable[[str], list[str]]]] = {
    "new, gone and changed parameters": (ADAM, ADAM, lambda name: [name] * ("head" not in name)),
    "one optimizer divided among several": (ADAM, BOTH_ADAM, divided),
    "several become one": (BOTH_ADAM, ADAM, lambda name: [name.rpartition("inner_state/")[2]]),
    "labels in another order": (BOTH_ADAM, OTHER_LABELS, lambda name: [name.replace("/a/", "/z/")]),
    "frozen now": (ADAM, MASKED, lambda name: [f"inner_state/{name}"] * ("head" not in name)),
    "frozen before": (MASKED, ADAM, lambda name: [name.removeprefix("inner_state/")]),
    "two of equal shapes in a chain, in their order": (
        optax.chain(ADAM, LIKE_ADAM),
        optax.chain(CLIP, ADAM, LIKE_ADAM),
        lambda name: [f"{int(name[0]) + 1}{name[1:]}"],
    ),
    "a target of shapes only": (ADAM, ADAM._replace(init=partial(jax.eval_shape, ADAM.init)), lambda name: [name]),
    "moments of another dtype": (ADAM, optax.adam(1e-3, mu_dtype=jnp.bfloat16), lambda name: [name]),
    "renamed": (ADAM, CLIPPED, lambda name: ["1/" + name.replace("Dense_0", "encoder")]),
    "elsewhere before": (ADAM, ADAM, lambda name: [name]),
    **{f"the same {n}": (one, one, lambda name: [name]) for n, one in enumerate(SAME)},
    **{f"into {name}": (ADAM, one, wrapped(where)) for name, (one, where) in WRAPPED.items()},
    **{f"out of {name}": (one, ADAM, unwrapped(where)) for name, (one, where) in WRAPPED.items()},
}
NEW_PARAMS = {"new, gone and changed parameters": CHANGED, "renamed": RENAMED}
RULES = {
    "renamed": [rules.rename("Dense_0", "encoder"), RULE],
    "elsewhere before": [rules.move("opt_state", "tx"), rules.optimizer_state(stored_at="tx")],
}


def goes_on(old: Any, new: Any, expected: dict[str, Any], flag: bool, path: Path, *given_rules: rules.Rule) -> None:
    """The leaves taken are those expected, bit for bit, and all others are the target's own."""
    steps = given_rules or [rules.optimizer_state()]
    found = restored(written({"opt_state": old, "step": 3}, flag, path), {"opt_state": new, "step": 0}, *steps)
    assert found["step"] == 3
    values, own = flat(found["opt_state"]), flat(new)
    assert values.keys() == own.keys() >= expected.keys()
    for name, value in values.items():
        wanted = expected.get(name, own[name])
        assert np.isnan(wanted).all() or np.array_equal(value, np.broadcast_to(wanted, np.shape(value))), name


@pytest.mark.parametrize("name", MIGRATIONS)
def test_a_state_goes_on(name: str, flag: bool, tmp_path: Path) -> None:
    """The leaves of parameters that still exist are taken, with all counters; those of others are the target's own."""
    optimizer, today, names_of = MIGRATIONS[name]
    old, new = trained(optimizer), today.init(NEW_PARAMS.get(name, PARAMS))
    expected = {new_name: leaf for old_name, leaf in flat(old).items() for new_name in names_of(old_name)}
    goes_on(old, new, expected, flag, tmp_path, *RULES.get(name, ()))


@pytest.mark.skipif(not hasattr(nnx, "to_pure_dict"), reason="this Flax has no nnx.to_pure_dict")
def test_nnx_optimizers(flag: bool, tmp_path: Path) -> None:
    """In an nnx.State there are no named tuples; the names of optax's fields are enough."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    old, new = (
        nnx.to_pure_dict(nnx.state(nnx.Optimizer(model, one, wrt=nnx.Param)))["opt_state"] for one in (ADAM, CLIPPED)
    )
    old = jax.tree.map(lambda leaf: leaf + 1, old)
    goes_on(old, new, {f"1/{name}": leaf for name, leaf in flat(old).items()}, flag, tmp_path)


def test_from_target() -> None:
    """Leaves and subtrees of the target are its own, where there is something stored and where there is not."""
    target = {"params": {"a": jnp.ones(2), "head": {"kernel": jnp.ones(3)}}, "batch_stats": {"mean": 1.0}, "e": ()}
    tree = stored({"params": {"a": np.ones(2), "head": {"old": np.ones(3)}}, "step": 1})
    after = rules.from_target("params/head", "batch_stats", "e").apply(tree, state_dict.describe(target))
    found = {"/".join(path): leaf for path, leaf in iter_leaves(after)}
    assert found.pop("e").children == {}
    kept = {name for name, leaf in found.items() if leaf is Own.KEEP_TARGET}
    assert kept == {"params/head/kernel", "batch_stats/mean"}
    assert found.keys() - kept == {"params/a", "step"}
    assert set(tree.children["params"].children["head"].children) == {"old"}


TWO = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
WIDE = {**TWO, "b": np.ones(4, np.float32)}


def numbered(number: float, optimizer: Any = ADAM, params: Any = TWO) -> Any:
    """An optimizer's state every leaf of which is this number, so that it tells whose it was."""
    shapes = jax.eval_shape(optimizer.init, params)
    return jax.tree.map(lambda leaf: np.full(leaf.shape, number, leaf.dtype), shapes)


def fresh(optimizer: Any = ADAM, params: Any = TWO) -> Any:
    """A state that says of itself that it is the target's own."""
    return numbered(0, optimizer, params)


def by_label(one: Any, labels: str) -> Any:
    """An optimizer for each label, of w and of b."""
    return optax.multi_transform(dict.fromkeys(labels, one), dict(zip("wb", labels, strict=True)))


RENAME = rules.rename("Dense_0", "encoder")
PARAMS_ALONE = [rules.rename("^params/Dense_0", "params/encoder"), {"params/encoder": "params/Dense_0"}]


@pytest.mark.parametrize("steps", [[RENAME, RULE], [RULE, RENAME], *([one, RULE] for one in PARAMS_ALONE)], ids=str)
def test_parameters_without_their_moments_are_told(steps: Any, flag: bool, tmp_path: Path, caplog: Any) -> None:
    """Those that a rule renames too late, or alone, are named; new ones, whose moments begin anew as well, are not."""
    path = written({"params": PARAMS, "opt_state": trained(ADAM)}, flag, tmp_path)
    params = {**RENAMED, "new": {"kernel": np.ones(2, np.float32)}}
    restored(path, {"params": params, "opt_state": ADAM.init(params)}, rules.from_target(".*/new"), *steps)
    told = re.findall("1: (.*) are not used", caplog.text)
    lost = ", ".join(f"opt_state/0/{field}/Dense_0/{name}" for field in ("mu", "nu") for name in ("bias", "kernel"))
    assert told == [lost] * (steps[0] != RENAME)


GEN_DISC = {"gen": numbered(1), "disc": numbered(2)}
# Old and new states, and which number the leaves have then whose names begin so, NaN for any; all others are the
# target's own.
SEVERAL: dict[str, tuple[Any, Any, dict[str, float]]] = {
    "equal names, in any order and inside other wrappers": (
        {"gen": numbered(1, MULTI), "disc": numbered(2), "extra": numbered(3)},
        {"disc": fresh(CLIPPED), "gen": fresh(CLIPPED)},
        {"disc": 2, "gen": 1},
    ),
    "a wrapper that the other one has had makes no relatives": (
        {"gen": numbered(1, MULTI), "disc": numbered(2)},
        {"gen": fresh(), "disc": fresh(MULTI)},
        {"gen": 1, "disc/inner_opt_state": 2},
    ),
    "a wrapper and a schedule that moved to another network": (
        {"nets": {"gen": numbered(1, optax.chain(MULTI, SCHEDULE)), "disc": numbered(2)}},
        {"nets": {"gen": fresh(), "disc": fresh(optax.chain(MULTI, SCHEDULE))}},
        {"nets/gen": 1, "nets/disc/0/inner_opt_state": 2},
    ),
    "a label that some got": (numbered(1, by_label(SCHEDULED, "xx")), fresh(by_label(SCHEDULED, "xy")), {"": 1}),
    "labels in each other's place": (numbered(1, by_label(INJECT, "xy")), fresh(by_label(INJECT, "yx")), {"": 1}),
    "labels in each other's place, whose optimizers have settings now": (
        numbered(1, by_label(ADAM, "xy")),
        fresh(by_label(INJECT, "yx")),
        {f"inner_states/{label}/inner_state/inner_state": 1 for label in "xy"},
    ),
    "its own name before another that has all the shapes of today": (
        {"gen": numbered(1), "disc": numbered(2, params=WIDE)},
        {"gen": fresh(params=WIDE)},
        {"gen/0/count": 1, "gen/0/mu/w": 1, "gen/0/nu/w": 1},
    ),
    "numbers that are names": ({"0": numbered(1), "1": numbered(2)}, {1: fresh(), 0: fresh()}, {"0": 1, "1": 2}),
    "labels": (numbered(1, by_label(ADAM, "xy")), fresh(), {"": 1}),
    "two chains": (
        {"gen": (numbered(1), numbered(2)), "disc": (numbered(3), numbered(4))},
        {"disc": (optax.EmptyState(), fresh(), fresh()), "gen": (fresh(), fresh())},
        {"disc/1": 3, "disc/2": 4, "gen/0": 1, "gen/1": 2},
    ),
    "a chain of more than ten": (
        tuple(numbered(n) for n in range(1, 12)),
        (optax.EmptyState(), *(fresh() for _ in range(11))),
        {f"{n}/": n for n in range(1, 12)},
    ),
    "a number as a parameter has the same moments in both": (
        numbered(1, NOVOGRAD, NUMBER_AND_ARRAY),
        fresh(params=NUMBER_AND_ARRAY),
        {"0/count": 1, "0/mu/scale": 1, "0/nu/scale": 1},
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_whose_moments_are_whose(name: str, flag: bool, tmp_path: Path) -> None:
    """Of several states each takes that of its own name; members of a chain keep their order."""
    old, new, numbers = SEVERAL[name]
    found = [(one, number) for one in flat(new) for start, number in numbers.items() if one.startswith(start)]
    goes_on(old, new, dict(reversed(found)), flag, tmp_path)


KERNELS = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}
REFUSED: list[tuple[Any, Any, rules.Rule, str]] = [
    (GEN_DISC, fresh(), RULE, r"equally well.*optimizer_state\(.*opt_state/(gen|disc)'.*opt_state/(?!\1)(gen|disc)'"),
    (numbered(1), fresh(optax.chain(ADAM, ADAM)), RULE, "equally well"),
    ({"0": numbered(1), "1": numbered(2)}, {1: fresh(), 2: fresh()}, RULE, "equally well"),
    ((numbered(1), numbered(2)), (fresh(),), RULE, "equally well"),
    # Whose settings or arrays a new label gets, and whether a network is new or a renamed one of other shapes, is open.
    (numbered(1, by_label(INJECT, "xx")), fresh(by_label(INJECT, "xy")), RULE, r"/y', '.*/x'\) or .*_states/x'\)"),
    (numbered(1, by_label(COUNTS, "xx")), fresh(by_label(COUNTS, "xy")), RULE, r"/y', '.*/x'\) or .*_states/x'\)"),
    (
        {"gen": numbered(1), "critic": numbered(2, params=WIDE)},
        {"gen": fresh(), "disc": fresh()},
        RULE,
        "equally well.*disc', '.*gen'.* or .*disc', '.*critic'",
    ),
    # No count without its moments, which would spoil the start; and no moment without the others: NovoGrad's second
    # moment is one number an array, and Adam's steps were 133 times as long with zeros in its place.
    (numbered(1), fresh(params={"other": np.ones(7, np.float32)}), RULE, "no stored state fits"),
    (numbered(1, ADAM, KERNELS), fresh(NOVOGRAD, KERNELS), RULE, "no stored state fits"),
    (numbered(1, NOVOGRAD, KERNELS), fresh(ADAM, KERNELS), RULE, "no stored state fits"),
    # The error tells the fields of both and what to do.
    (numbered(1, SGD), fresh(), RULE, r"count, mu, nu; below opt_state .*trace.*from_target"),
    (numbered(1), fresh(), rules.optimizer_state(stored_at="tx"), "the checkpoint has no tx"),
    (numbered(1), fresh(), rules.optimizer_state("tx"), "the target has no tx"),
    (numbered(1), fresh(), rules.optimizer_state(subtree="net"), "net is below the moments of neither state$"),
    (trained(ADAM), trained(ADAM), rules.optimizer_state(subtree="head"), "both states; omit subtree=$"),
]


@pytest.mark.parametrize(("old", "new", "rule", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit(old: Any, new: Any, rule: rules.Rule, message: str, flag: bool, tmp_path: Path) -> None:
    """It is refused, with what to do."""
    path = written({"opt_state": old}, flag, tmp_path)
    with pytest.raises(TransformError, match=message):
        restored(path, {"opt_state": new}, rule)


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
    path, target = written({"opt": GEN_DISC}, flag, tmp_path), {"opt": OTHER_NAMES[name]}
    with pytest.raises(TransformError, match="fit equally well") as caught:
        restored(path, target, rules.optimizer_state("opt"))
    lines = re.findall(r"rules\.optimizer_state\('[^)]*\)", str(caught.value))
    assert len(lines) == 2
    at = lines[0].split("'")[1]
    others = [f"opt/{one}" for one in state_dict.describe(target).children["opt"].children if f"opt/{one}" != at]
    for line, number in zip(lines, (1, 2) if "gen'" in lines[0] else (2, 1), strict=True):
        found = flat(restored(path, target, eval(line, {"rules": rules}), rules.from_target(*others)))
        assert {float(np.max(leaf)) for leaf_name, leaf in found.items() if leaf_name.startswith(at)} == {number}, line


def test_a_proposal_for_one_state_leaves_others(flag: bool, tmp_path: Path) -> None:
    """The rule in the error is for the state that is ambiguous alone: those of other parameters go on."""
    others = {"z": np.ones(7, np.float32)}
    old = {"x": numbered(1), "y": numbered(2), "k": numbered(3, params=others)}
    path, target = written({"opt": old}, flag, tmp_path), {"opt": {"0": fresh()[0], "k": fresh(params=others)}}
    with pytest.raises(TransformError, match="fit equally well") as caught:
        restored(path, target, rules.optimizer_state("opt"))
    line = re.findall(r"rules\.optimizer_state\('[^)]*\)", str(caught.value))[0]
    found = restored(path, target, eval(line, {"rules": rules}))
    jax.tree.map(np.testing.assert_array_equal, found, {"opt": {"0": old["x"][0], "k": old["k"]}})


def shuffled(tree: Any, data: Any) -> Any:
    """The same dicts with their names in another order."""
    if not isinstance(tree, dict):
        return tree
    return {name: shuffled(tree[name], data) for name in data.draw(st.permutations(list(tree)))}


@given(st.sampled_from([*SEVERAL.values(), *((GEN_DISC, new, {}) for new in OTHER_NAMES.values())]), st.data())
def test_the_order_of_names_does_not_matter(case: Any, data: Any) -> None:
    """However a format orders the stored names, the same leaves are taken, or the same error is raised."""
    old, new, _ = case
    target = state_dict.describe({"opt": new})

    def outcome(tree: Any) -> Any:
        try:
            found = iter_leaves(rules.optimizer_state("opt").apply(stored(tree), target))
            return {path: getattr(leaf, "path", leaf) for path, leaf in found if not isinstance(leaf, Branch)}
        except TransformError as error:
            return str(error)

    tree = plain({"opt": old})
    assert outcome(shuffled(tree, data)) == outcome(tree)


def test_what_a_later_rule_may_read_is_not_lost(flag: bool, tmp_path: Path) -> None:
    """A state that another would replace is an error that tells how to swap two, which then works."""
    path = written({"opt": (numbered(1), numbered(2))}, flag, tmp_path)
    target = {"opt": (fresh(), fresh())}
    second = rules.optimizer_state("opt/0", "opt/1")
    with pytest.raises(TransformError, match=r"has opt/0, too.*rules\.move\('opt', 'old'\)"):
        restored(path, target, second, rules.optimizer_state("opt/1", "opt/0"))
    moved = [rules.optimizer_state("opt/0", "old/1"), rules.optimizer_state("opt/1", "old/0")]
    for steps, numbers in (
        ([rules.move("opt", "old"), *moved, rules.drop("old")], (2, 1)),
        ([rules.drop("opt/0"), second, rules.from_target("opt/1")], (2, 0)),
    ):
        expected = {"opt": tuple(map(numbered, numbers))}
        jax.tree.map(np.testing.assert_array_equal, restored(path, target, *steps), expected)


@pytest.mark.parametrize("kept", [lambda adam: adam, lambda adam: optax.TraceState({"m": adam.mu, "v": adam.nu})])
def test_one_state_becomes_two_and_one_again(kept: Callable[[Any], Any], flag: bool, tmp_path: Path) -> None:
    """Each part takes its moments, of any depth, although only one of the states has the part's name in them."""
    each = {f"opt_{name}": numbered(number) for name, number in (("gen", 1), ("disc", 2))}
    moments = {"gen": each["opt_gen"][0].mu, "disc": each["opt_disc"][0].mu}
    adam, rest = numbered(1, params={"gen": TWO, "disc": TWO})
    whole = {"opt": (adam._replace(mu=moments, nu=moments), rest)}
    apart = {**each, "opt_disc": (each["opt_disc"][0]._replace(count=np.array(1, np.int32)), rest)}
    for number, (old, new, places) in enumerate((
        (whole, apart, [(f"opt_{name}", "opt", name) for name in moments]),
        (each, whole, [("opt", f"opt_{name}", name) for name in moments]),
    )):  # fmt: skip
        steps = [rules.optimizer_state(*place) for place in places]
        old, new = ({at: (kept(its), end) for at, (its, end) in one.items()} for one in (old, new))
        found = restored(written(old, flag, tmp_path / str(number)), jax.tree.map(np.zeros_like, new), *steps)
        jax.tree.map(np.testing.assert_array_equal, found, new)


@pytest.mark.parametrize("step", [7, np.int32(7)])
@pytest.mark.parametrize("stored_at", ["opt_state", "old"])
def test_a_count_is_copied_in_any_order(step: Any, stored_at: str, flag: bool, tmp_path: Path) -> None:
    """Before or after `optimizer_state`, and of a Python number, too."""
    schedule = optax.adam(optax.linear_schedule(0.0, 1e-3, 10))
    path = written({stored_at: numbered(3), "step": step}, flag, tmp_path)
    steps = [rules.copy("step", "opt_state/1/count"), rules.optimizer_state("opt_state", stored_at)]
    for order in itertools.permutations(steps):
        found = restored(path, {"opt_state": fresh(schedule), "step": step * 0}, *order)
        assert found["opt_state"][1].count == 7 and found["opt_state"][1].count.dtype == np.int32
        assert found["opt_state"][0].count == 3 and found["step"] == 7


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
    jax.tree.map(np.testing.assert_array_equal, expected, {"opt": GEN_DISC})
    found = restored(tmp_path, target, rules.optimizer_state("opt"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    target = {"opt": {"disc": fresh(CLIPPED), "gen": fresh(MULTI)}}
    found = restored(tmp_path, target, rules.optimizer_state("opt"))["opt"]
    jax.tree.map(np.testing.assert_array_equal, found["disc"][1], GEN_DISC["disc"])
    jax.tree.map(np.testing.assert_array_equal, found["gen"].inner_opt_state, GEN_DISC["gen"])
    with pytest.raises(TransformError, match="equally well"):
        restored(tmp_path, {"opt": OTHER_NAMES["other names"]}, rules.optimizer_state("opt"))
