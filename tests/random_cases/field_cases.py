"""Proposals for ports and edits of well-known models, with states of real optax; judged by values.

``python -m tests.random_cases.field_cases --cases 5000`` counts them; ``--families held-out`` takes those that nothing was
tried on. ``--follow`` pastes each proposal that is certain into a restore of a saved checkpoint."""  # noqa: E501

from __future__ import annotations

import contextlib
import copy
import functools
import random as random_module
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import rules
from flax_ckpt_compat._suggest import Suggestion
from tests.random_cases import suggestions
from tests.random_cases.field_edits import FIELD_EDITS
from tests.random_cases.field_models import DEVELOPED, HELD_OUT, Family
from tests.random_cases.model_edits import EDITS, Module, mapped
from tests.random_cases.model_families import Arrays
from tests.random_cases.suggestions import Case

_STEP, _COUNT = np.int32(7), np.int32(5)
_FIELDS = {"mu": 2, "nu": 3, "trace": 4, "acc_grads": 5, "v": 6}
# Edits of the other fuzzer that are tried on these families, too.
_OTHERS = ["rename_rows", "wrap", "unwrap", "stack", "unlist", "fuse", "deeper", "add", "drop", "boxes", "torch_names",
           "transpose_one", "unit_axes", "vocabulary"]  # fmt: skip


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
            (FIELD_EDITS.get(edit) or EDITS[edit])(tried, r)
            new = tried
    return new


def case(seed: int, families: dict[str, Family] = DEVELOPED) -> Case:
    """The case of a seed."""
    r, a = random_module.Random(f"field {seed}"), Arrays()
    family = r.choice(sorted(families))
    old = families[family](a, r)
    if r.random() < 0.2:
        old = _edited(old, r, [r.choice(["unlist", "stack_row", "wrap", "flatten", "fuse", "merge_heads", "affix"])])
    often = ["port"] * 5 + ["stack_row", "camel", "group", "neutral"] * 2
    edits = list(dict.fromkeys(r.choices([*FIELD_EDITS, *_OTHERS, *often], k=r.choice([1, 1, 1, 2, 2, 3]))))
    if any("/" in name for name in old) and r.random() < 0.6:
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
        olds, news = ({"generator": x, "critic": mapped_numbers(y)} for x, y in ((olds, olds), (news, olds)))
        form += "+items"
    return Case(f"{title}+{style}+{form}", olds, news)


def mapped_numbers(tree: Any) -> Any:
    """A tree of the same arrays with other values."""
    return jax.tree_util.tree_map(lambda x: x + np.float32(0.5) if np.ndim(x) else x, tree)


def check(seed: int) -> None:
    """What is certain is right."""
    one = case(seed)
    found, suggestion, wrong = suggestions.verdict(one)
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
    sets = {"developed": DEVELOPED, "held-out": HELD_OUT}

    def more(parser: Any) -> None:
        parser.add_argument("--families", choices=list(sets), default="developed")
        parser.add_argument("--follow", action="store_true", help="paste what is certain into a restore")

    def made(options: Any) -> Callable[[int], Case]:
        return lambda seed: case(seed, sets[options.families])

    return suggestions.count("field_cases", __doc__ or "", made, more, followed)


if __name__ == "__main__":
    raise SystemExit(main())
