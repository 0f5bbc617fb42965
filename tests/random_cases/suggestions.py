"""Proposals for random models whose states changed: what is certain is right, judged by values.

``python -m tests.random_cases.suggestions --cases 5000`` counts them, and prints what is certain and wrong."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import random as random_module
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Node, iter_leaves
from flax_ckpt_compat._suggest import Suggestion, suggest
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, Own
from tests.random_cases.model_edits import EDITS, Module, fresh, mapped, unknown
from tests.random_cases.model_families import FAMILIES, Arrays
from tests.support.suggest_cases import as_stored

_STEP, _COUNT = np.int32(7), np.int32(5)


@dataclasses.dataclass(frozen=True)
class Case:
    """An old and a new state; the new one holds what a right restore gives, as in `model_edits`."""

    title: str
    old: Any
    new: Any

    @property
    def trees(self) -> tuple[Node, Node]:
        """The trees that `suggest` takes."""
        return as_stored(self.old), state_dict.describe(self.new)


def _parted(model: Any, *, stats: bool) -> Any:
    """The statistics of a model alone, or the rest; None for nothing."""
    found = {}
    for name, child in model.items():
        is_stat = not isinstance(child, dict) and name in ("mean", "var")
        kept = _parted(child, stats=stats) if isinstance(child, dict) and not _is_box(child) else None
        if isinstance(child, dict) and _is_box(child):
            kept = child if (name in ("mean", "var")) == stats else None
        elif not isinstance(child, dict) and is_stat == stats:
            kept = child
        if kept is not None:
            found[name] = kept
    return found or None


def _is_box(node: Module) -> bool:
    return node.keys() == {"value"} and not isinstance(node["value"], dict)


def _adam(params: Any, count: Any = _COUNT) -> Any:
    return {"count": count, "mu": mapped(lambda x: x * 2, params), "nu": mapped(lambda x: x * 3, params)}


def optimizer(kind: str, params: Any) -> Any:
    """The state of an optimizer."""
    if kind == "adam":
        return {"0": _adam(params), "1": {}}
    if kind == "clip adam":
        return {"0": {}, "1": {"0": _adam(params), "1": {}}}
    if kind == "schedule":
        return {"0": _adam(params), "1": {"count": _STEP}}
    if kind == "plateau":
        return {
            "0": _adam(params),
            "1": {n: np.float32(i) for i, n in enumerate(("best_value", "count", "lr", "scale"), 40)},
        }
    if kind == "new plateau":
        old = {n: np.float32(i) for i, n in enumerate(("best_value", "count", "lr", "scale"), 40)}
        del old["best_value"], old["lr"]
        return {"0": _adam(params), "1": {**old, "avg_value": np.float32("nan"), "plateau_count": np.float32("nan"),
                                          "best_value": np.float32(40), "cooldown": np.float32("nan")}}  # fmt: skip
    if kind == "multi steps":
        return {"mini_step": np.float32(1), "gradient_step": np.float32(3), "inner_opt_state": {"0": _adam(params), "1": {}},  # noqa: E501
                "acc_grads": mapped(lambda x: x * 5, params)}  # fmt: skip
    return {"0": {"trace": mapped(lambda x: x * 4, params)}, "1": {}}


def _ordinary(old: Module, new: Module, r: Any) -> tuple[Any, Any, str]:
    """One optimizer."""
    kind = r.choice(["adam", "adam", "clip adam", "momentum", "multi steps", "schedule"])
    other = r.choice(["adam", "clip adam", "momentum", "schedule"]) if r.random() < 0.2 else kind
    made = optimizer(other, new)
    if "momentum" in (kind, other) and kind != other:
        made = fresh(made)
    if r.random() < 0.05 and kind == other == "adam":
        return {"opt_state": optimizer("plateau", old)}, {"opt_state": optimizer("new plateau", new)}, "plateau"
    return {"opt_state": optimizer(kind, old)}, {"opt_state": made}, kind if kind == other else f"{kind}→{other}"


def _several(old: Module, new: Module, r: Any) -> tuple[Any, Any, str]:
    """An optimizer for each of two towers, which may have other names in the new state; made for old == new alone."""
    names = [name for name, child in old.items() if isinstance(child, dict)][:2]
    styles = [("opt1", "opt2"), (f"opt_{names[0]}", f"opt_{names[1]}"), (f"{names[0]}_opt", f"{names[1]}_opt"),
              ("optimizer_0", "optimizer_1")]  # fmt: skip
    ours, theirs = r.choice(styles), r.choice(styles)
    if r.random() < 0.4:
        theirs = ours
    kind = r.choice(["adam", "clip adam", "momentum"])
    other = r.choice(["adam", "clip adam"]) if kind != "momentum" else kind
    befores = {opt: optimizer(kind, {name: old[name]}) for opt, name in zip(ours, names, strict=True)}
    afters = {opt: optimizer(other, {name: new[name]}) for opt, name in zip(theirs, names, strict=True)}
    return befores, afters, f"several {ours}→{theirs}"


def _one_level_less(states: Any, names: list[str]) -> Any:
    """Moments without the name of the tower, as of states that were initialized with its parameters alone."""
    found = {}
    for (key, state), name in zip(states.items(), names, strict=True):
        found[key] = _bare(state, name)
    return found


def _bare(node: Any, name: str) -> Any:
    if not isinstance(node, dict):
        return node
    if node.keys() == {name}:
        return node[name]
    return {key: _bare(child, name) for key, child in node.items()}


def _twins(a: Arrays, r: Any) -> Module:
    """Two towers of equal shapes."""

    def tower() -> Module:
        return {"Dense_0": a.dense(5, 8), "Dense_1": a.dense(8, 2)}

    return {
        name: tower() for name in r.choice([("gen", "disc"), ("student", "teacher"), ("policy", "value"), ("a", "b")])
    }


def _edited(model: Module, r: Any, edits: list[str]) -> Module:
    new = copy.deepcopy(model)
    for edit in edits:
        tried = copy.deepcopy(new)
        with contextlib.suppress(
            ValueError, KeyError, AttributeError
        ):  # arrays that earlier edits made unlike each other
            EDITS[edit](tried, r)
            new = tried
    return new


def case(seed: int) -> Case:
    """The case of a seed."""
    r, a = random_module.Random(seed), Arrays()
    if r.random() < 0.08:
        old = _twins(a, r)
        edits = r.sample(["add", "big_table"], r.choice([0, 0, 1]))
        new = _edited(old, r, edits)
        names = list(old)
        if "add" in edits and any(n not in old for n in new) is False:
            edits = []
            new = copy.deepcopy(old)
        befores, afters, style = _several(old, new, r)
        if r.random() < 0.6:
            befores, afters = _one_level_less(befores, names), _one_level_less(afters, names)
        state = {"step": _STEP, "params": old, **befores}, {"step": _STEP, "params": new, **afters}
        return Case("+".join(["twins", style, *edits]), *state)
    family = r.choice(sorted(FAMILIES))
    old = FAMILIES[family](a, r)
    if r.random() < 0.15:
        old = _edited(old, r, [r.choice(["unlist", "stack", "from_one", "fuse", "wrap"])])
    often = ["rename_words", "rename_words", "rename_rows", "stack", "unlist", "wrap", "fuse", "head", "deeper"]
    edits = list(dict.fromkeys(r.choices([*sorted(EDITS), *often], k=r.choice([1, 1, 1, 2, 2, 3]))))
    if {"deeper", "shallower"} <= set(edits):  # as many layers as before, which then keep their names
        edits.remove("shallower")
    if family == "flat" and r.random() < 0.4:
        edits = ["nested"]
    new = _edited(old, r, edits)
    if r.random() < 0.12 and not {"copies", "deeper"} & set(edits):
        old, new = _reversed(old, new)
        edits.append("back")
    title = [family, *edits]
    if r.random() < 0.1:
        return Case("+".join([*title, "params"]), old, new)
    olds, news = ({"params": _parted(x, stats=False), "batch_stats": _parted(x, stats=True)} for x in (old, new))
    olds, news = ({n: c for n, c in x.items() if c is not None} for x in (olds, news))
    befores, afters, style = _ordinary(olds["params"], news["params"], r)
    if r.random() < 0.1:
        afters, style = {}, "no optimizer"
    made = {"step": _STEP, **olds, **befores}, {"step": _STEP, **news, **afters}
    if r.random() < 0.06:
        made[1]["ema_params"], style = unknown(news["params"]), "new average"
    if r.random() < 0.06:
        extra = {"student": made[0], "teacher": _other(made[0])}
        return Case("+".join([*title, style, "items"]), extra, {"student": made[1], "teacher": _other(made[0])})
    return Case("+".join([*title, style]), *made)


def _other(state: Any) -> Any:
    """A state of the same model with other values."""
    return mapped(lambda x: x + 0.5 if np.ndim(x) else x, state)


def _reversed(old: Module, new: Module) -> tuple[Module, Module]:
    """The way back: what the old state lacks is new there, and what cannot be told stays so."""
    given = mapped(lambda x: np.where(np.isnan(x) | np.isinf(x), -1 - np.arange(x.size).reshape(x.shape), x), new)
    known = set()
    for _, leaf in iter_leaves(state_dict.describe(given)):
        known |= set(leaf.ravel().tolist())
    values = [leaf for _, leaf in iter_leaves(state_dict.describe(old))]
    lost = any(not set(leaf.ravel().tolist()) <= known for leaf in values)

    def wanted(x: np.ndarray) -> np.ndarray:
        there = [value in known for value in x.ravel().tolist()]
        if all(there):
            return x
        # Where the new model has something unknown in its place, so has the old one.
        return np.full_like(x, np.inf if any(there) or _unknown_in(new) else np.nan)

    return given, mapped(wanted, old) if lost else old


def _unknown_in(model: Module) -> bool:
    return any(np.isinf(leaf).any() for _, leaf in iter_leaves(state_dict.describe(model)))


def evaluated(leaf: Any, values: dict[Any, Any]) -> Any:
    """The value of a leaf of a tree that rules have made."""
    if isinstance(leaf, LeafHandle):
        return values[leaf.path]
    if isinstance(leaf, ArraySlice):
        return values[leaf.handle.path][leaf.index]
    if isinstance(leaf, Derived):
        return leaf.function(*(evaluated(one, values) for one in leaf.inputs))
    return None


def judged(one: Case, stored: Node, target: Node, suggestion: Suggestion) -> tuple[bool, str]:
    """Whether all steps give each leaf its value; and a leaf that gets a wrong one by the rules that are not comments."""  # noqa: E501
    values = {path: leaf for path, leaf in iter_leaves(state_dict.describe(one.old)) if leaf is not None}
    wrong = ""
    outcomes = []
    for rules in ([step.rule for step in suggestion.steps], suggestion.rules):
        tree, bad, lacking = stored, "", False
        try:
            for rule in rules:
                tree = rule.apply(tree, target)
        except CheckpointError as error:
            outcomes.append((False, f"raises {error}"[:300]))
            continue
        got = dict(iter_leaves(tree))
        for path, wanted in iter_leaves(state_dict.describe(one.new)):
            if isinstance(wanted, Branch) or wanted is None:
                continue
            if path not in got:
                lacking = True
                continue
            is_own = got[path] is Own.KEEP_TARGET
            if is_own:
                if not np.isnan(wanted).all():
                    bad = "/".join(path)
                continue
            found = np.asarray(evaluated(got[path], values))
            if found.shape != np.shape(wanted):
                lacking = True
            elif not np.array_equal(found, wanted):
                bad = "/".join(path)
        outcomes.append((not bad and not lacking, bad))
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


def count(
    name: str,
    about: str,
    made: Callable[[Any], Callable[[int], Case]],
    more: Callable[[argparse.ArgumentParser], None] = lambda _: None,
    followed: Callable[[Case, Suggestion], str] | None = None,
) -> int:
    """Count the verdicts of many cases, for a command with options of its own."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.random_cases.{name}", description=about)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--show", default="certain wrong", help="print the cases of this verdict")
    parser.add_argument("--most", type=int, default=20, help="print at most so many")
    parser.add_argument("--list", help="write the verdict of each seed to this file")
    more(parser)
    options = parser.parse_args()
    case_of = made(options)
    counts: Counter[str] = Counter()
    start, shown, lines = time.process_time(), 0, []
    seed = options.seed
    while counts.total() < options.cases:
        one = case_of(seed)
        found, suggestion, wrong = verdict(one)
        if (
            followed
            and options.follow
            and found == "certain right"
            and suggestion
            and (wrong := followed(one, suggestion))
        ):
            found = "certain wrong"
        lines.append(f"{seed} {found} {one.title}")
        seed += 1
        if found == "same":
            continue
        counts[found] += 1
        if found == options.show and shown < options.most:
            shown += 1
            doubts = suggestion.doubts if suggestion else ()
            print(f"--- {seed - 1} {one.title}: {wrong} {doubts}\n{suggestion}", flush=True)
    if options.list:
        with open(options.list, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    print(dict(sorted(counts.items())), f"{time.process_time() - start:.1f} s of CPU")
    return counts["certain wrong"]


def main() -> int:
    """Count the verdicts of many cases."""
    return count("suggestions", __doc__ or "", lambda _: case)


if __name__ == "__main__":
    raise SystemExit(main())
