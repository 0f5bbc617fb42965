"""Proposals for ports and edits of well-known models, with states of real optax; judged by values.

``python -m tests.random_cases.proposals --cases 5000`` counts them, and prints what is certain and wrong;
``--follow`` pastes what is certain into a restore."""

import argparse
import contextlib
import copy
import dataclasses
import functools
import random as random_module
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import rules
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Node, iter_leaves
from flax_ckpt_compat._suggest import Suggestion, suggest
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Own
from tests.random_cases.edits import EDITS, Module, mapped
from tests.random_cases.models import FAMILIES, Arrays
from tests.support.stored import value_of
from tests.support.suggest_cases import as_stored

_STEP, _COUNT = np.int32(7), np.int32(5)
_FIELDS = {"mu": 2, "nu": 3, "trace": 4, "acc_grads": 5, "v": 6}


@dataclasses.dataclass(frozen=True)
class Case:
    """An old and a new state; the new one holds what a right restore gives, as in `edits`."""

    title: str
    old: Any
    new: Any

    @property
    def trees(self) -> tuple[Node, Node]:
        """The trees that `suggest` takes."""
        return as_stored(self.old), state_dict.describe(self.new)


def _schedule() -> Any:
    return optax.linear_schedule(1e-3, 0.0, 100)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "schedule": lambda: optax.adam(_schedule()),
    "clip schedule": lambda: optax.chain(optax.clip(1.0), optax.adam(_schedule())),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}
# What was trained with one and goes on with another, and what is known of the result.
_CHANGES = [("adam", "adamw"), ("adam", "clip"), ("clip", "adam"), ("adam", "schedule"), ("schedule", "adam"),
            ("clip schedule", "clip"), ("adam", "momentum"), ("momentum", "adam"), ("adam", "accumulated"),
            ("accumulated", "adam"), ("adamw", "finite"), ("finite", "adamw"), ("injected", "adam")]  # fmt: skip


@functools.cache
def _made(kind: str) -> tuple[Any, frozenset[str]]:
    """The state of an optimizer for a parameter called x, and the names of its fields."""
    state = OPTIMIZERS[kind]().init({"x": np.float32(0)})
    flat, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_for_parameters)
    return state, frozenset(_names(keys)[-1] for keys, _ in flat)


def _is_for_parameters(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {"x"}


def _names(keys: Any) -> tuple[str, ...]:
    return tuple(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in keys)


def _optimizer(kind: str, params: Module, known: str) -> Any:
    """The state of an optimizer, filled with values that its parameters' values give; NaN for what ``known`` lacks."""
    (state, _), (_, had) = _made(kind), _made(known)

    def filled(keys: Any, leaf: Any) -> Any:
        names = _names(keys)
        if not _is_for_parameters(leaf):
            return _number(names, leaf, had)
        factor = _FIELDS[names[-1]] if names[-1] in had else np.float32("nan")
        return mapped(lambda x: x * np.float32(factor), params)

    return jax.tree_util.tree_map_with_path(filled, state, is_leaf=_is_for_parameters)


def _number(names: tuple[str, ...], leaf: Any, had: frozenset[str]) -> Any:
    """A count or another number; what is new begins as the target has it."""
    if names[-1] == "count":  # that of a schedule goes on at the step, and all others are stored
        return _STEP if names[-2:-1] == ("1",) else _COUNT if "count" in had else np.float32("nan")
    values = {"mini_step": 1, "gradient_step": 3}
    return np.full(leaf.shape, values.get(names[-1], 9) if names[-1] in had else np.nan, np.float32)


def _states(r: Any, old: Module, new: Module) -> tuple[str, Any, Any]:
    """How optimizers' states lie beside the parameters, before and after."""
    if (
        r.random() < 0.15
        and old.keys() == new.keys()
        and len(old) > 1
        and all(isinstance(c, dict) for c in old.values())
    ):
        return _parts(r, old, new)
    kinds = r.choice(_CHANGES) if r.random() < 0.3 else (r.choice([*OPTIMIZERS]),) * 2
    ours, theirs = r.choice([("opt_state", "opt_state")] * 6 + [("opt_state", "optimizer"), ("optimizer", "opt_state")])
    befores = {ours: _optimizer(kinds[0], old, kinds[0])}
    return "→".join(dict.fromkeys(kinds)), befores, {theirs: _optimizer(kinds[1], new, kinds[0])}


def _parts(r: Any, old: Module, new: Module) -> tuple[str, Any, Any]:
    """One optimizer for all that became one for each part, or the reverse, of which each has a count of its own."""
    kind = r.choice(["adam", "clip", "momentum"])
    whole = {"opt_state": _optimizer(kind, old, kind)}
    bare = r.random() < 0.7
    each = {f"opt_{n}": _optimizer(kind, c if bare else {n: c}, kind) for n, c in new.items()}
    if r.random() < 0.6:
        return "one optimizer→several", whole, each
    each = {f"opt_{n}": _optimizer(kind, c if bare else {n: c}, kind) for n, c in old.items()}
    return "several optimizers→one", each, {"opt_state": _optimizer(kind, new, kind)}


def _edited(model: Module, r: Any, edits: list[str]) -> Module:
    new = copy.deepcopy(model)
    for edit in edits:
        tried = copy.deepcopy(new)
        with contextlib.suppress(ValueError, KeyError, AttributeError, IndexError):  # what earlier edits made unlike
            EDITS[edit](tried, r)
            new = tried
    return new


UNDONE = {"more_bias": "no_bias", "deeper": "shallower"}


def case(seed: int) -> Case:
    """The case of a seed."""
    r, a = random_module.Random(f"field {seed}"), Arrays()
    family = r.choice(sorted(FAMILIES))
    old = FAMILIES[family](a, r)
    if r.random() < 0.2:
        old = _edited(old, r, [r.choice(["unlist", "stack_row", "wrap", "flatten", "fuse", "merge_heads", "affix"])])
    often = ["port"] * 5 + ["stack_row", "rename_rows", "group", "neutral"] * 2
    edits = list(dict.fromkeys(r.choices([*EDITS, *often], k=r.choice([1, 1, 1, 2, 2, 3]))))
    edits = [one for one in edits if UNDONE.get(one) not in edits]  # what went and came again is stored, if it is new
    if any("/" in name or "." in name for name in old) and r.random() < 0.6:
        edits = ["unflatten", *r.choice([["to_flax"], []])]
    new = _edited(old, r, edits)
    form = r.choice(["params", "train state", "train state", "train state", "new level", "no step", "to target"])
    title = "+".join([family, *edits])
    if form == "params":
        return Case(f"{title}+{form}", old, new)
    style, befores, afters = _states(r, old, new)
    olds = {"step": _STEP, "params": old, **befores}
    news = {"step": _STEP, "params": new, **afters}
    if form == "new level":
        name = r.choice(["state", "model_state", "train_state"])
        news = {name: news}
    elif form == "no step":
        del news["step"]
        if r.random() < 0.5:
            news = {"params": new}
    elif form == "to target":
        olds = {"target": old, "state": {"step": _STEP, "param_states": mapped(lambda x: x * 2, old)}}
        news = r.choice([{"params": new}, new, {"target": new}])
    if r.random() < 0.08:
        critic = jax.tree_util.tree_map(lambda x: x + np.float32(0.5) if np.ndim(x) else x, olds)
        olds, news = ({"generator": one, "critic": critic} for one in (olds, news))
        form += "+items"
    return Case(f"{title}+{style}+{form}", olds, news)


def judged(one: Case, stored: Node, target: Node, suggestion: Suggestion) -> tuple[bool, str]:
    """Whether all steps give each leaf its value; and a leaf that gets a wrong one by the rules that are not comments."""  # noqa: E501
    outcomes = []
    for chosen in ([step.rule for step in suggestion.steps], suggestion.rules):
        tree, bad, is_whole = stored, "", True
        try:
            for rule in chosen:
                tree = rule.apply(tree, target)
        except CheckpointError as error:
            outcomes.append((False, f"raises {error}"[:300]))
            continue
        got = dict(iter_leaves(tree))
        for path, wanted in iter_leaves(state_dict.describe(one.new)):
            if isinstance(wanted, Branch) or wanted is None:
                continue
            if got.get(path) is Own.KEEP_TARGET:
                is_equal = np.isnan(wanted).all()
            else:
                found = np.asarray(value_of(got.get(path)))
                is_equal = np.array_equal(found, wanted)
                if path not in got or found.shape != np.shape(wanted):
                    is_whole = False
                    continue
            if not is_equal:
                bad = "/".join(path)
        outcomes.append((not bad and is_whole, bad))
    (is_right, all_wrong), (_, wrong) = outcomes
    return is_right, all_wrong or wrong


def is_missing(stored: Node, target: Node) -> bool:
    """Return whether the checkpoint lacks a leaf of the target, or has it in another shape."""
    shapes = {path: leaf.shape for path, leaf in iter_leaves(stored) if hasattr(leaf, "shape")}
    wanted = {path: leaf.shape for path, leaf in iter_leaves(target) if hasattr(leaf, "shape")}
    return any(shapes.get(path) != shape for path, shape in wanted.items())


def verdict(one: Case) -> tuple[str, Suggestion | None, str]:
    """``certain right``, ``guess wrong``, ``none``, or ``same`` where nothing is missing; the proposal; a wrong leaf."""  # noqa: E501
    stored, target = one.trees
    if not is_missing(stored, target):
        return "same", None, ""
    suggestion = suggest(stored, target)
    if suggestion is None:
        return "none", None, ""
    is_right, wrong = judged(one, stored, target, suggestion)
    certainty = "certain" if suggestion.confident else "guess"
    return f"{certainty} {'right' if is_right else 'wrong'}", suggestion, wrong


def check(seed: int) -> None:
    """What is certain is right."""
    one = case(seed)
    found, suggestion, wrong = verdict(one)
    assert found != "certain wrong", (seed, one.title, wrong, str(suggestion))


CASES = st.tuples(st.integers(0, 10**9))


def followed(one: Case, suggestion: Suggestion) -> str:
    """A leaf that gets another value than it should if the printed rules are pasted into a restore; or what fails.

    What prints as a comment is a decision, which is taken here."""
    pasted: dict[str, Any] = {}
    exec(str(suggestion).replace("    # rules.", "    rules."), {"rules": rules}, pasted)
    with tempfile.TemporaryDirectory() as folder:
        for format in ("msgpack", "orbax"):
            path = f"{folder}/{format}"
            flax_ckpt_compat.save(path, one.old, format=format)
            try:
                got = flax_ckpt_compat.restore(path, one.new, transforms=pasted["transforms"])
            except flax_ckpt_compat.errors.CheckpointError as error:
                return f"{format}: {error}"
            wanted, _ = jax.tree_util.tree_flatten_with_path(one.new)
            for (keys, value), leaf in zip(wanted, jax.tree_util.tree_leaves(got), strict=True):
                if not np.array_equal(value, leaf, equal_nan=True):
                    return f"{format}: {jax.tree_util.keystr(keys)}"
    return ""


def main() -> int:
    """Count the verdicts of many cases."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_cases.proposals", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--show", default="certain wrong", help="print the first 20 cases of this verdict")
    parser.add_argument("--follow", action="store_true", help="paste what is certain into a restore")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    start, seed = time.process_time(), options.seed
    while counts.total() < options.cases:
        one = case(seed)
        found, suggestion, wrong = verdict(one)
        if options.follow and found == "certain right" and suggestion and (wrong := followed(one, suggestion)):
            found = "certain wrong"
        counts[found] += found != "same"
        if found == options.show and counts[found] <= 20:
            print(
                f"--- {seed} {one.title}: {wrong} {suggestion.doubts if suggestion else ()}\n{suggestion}", flush=True
            )
        seed += 1
    print(dict(sorted(counts.items())), f"{time.process_time() - start:.1f} s of CPU")
    return counts["certain wrong"]


if __name__ == "__main__":
    raise SystemExit(main())
