"""Suggestions over generated pairs of states, whose edits change layouts, too: what is certain is right."""

from __future__ import annotations

import cProfile
from collections import Counter
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat._suggest import suggest
from flax_ckpt_compat._trees import state_dict
from tests.random_cases.suggestions import is_missing
from tests.support import suggest_pairs
from tests.support.suggest_cases import as_stored


@pytest.mark.parametrize(
    ("families", "cases", "certain", "right"),
    [
        (suggest_pairs.TUNED, 20, 8, 16),
        (suggest_pairs.HELD_OUT, 20, 6, 16),
        # How many are certain is no promise: the floor only shows that doubts did not spread to all of them.
        pytest.param(suggest_pairs.TUNED, 300, 110, 245, marks=pytest.mark.slow),
        pytest.param(suggest_pairs.HELD_OUT, 300, 110, 250, marks=pytest.mark.slow),
    ],
    ids=["tuned", "held out", "tuned, many", "held out, many"],
)
def test_what_is_certain_is_right(families: Any, cases: int, certain: int, right: int) -> None:
    """A certain proposal gives every leaf its value; most changes of names and of layout are found."""
    counts: Counter[str] = Counter()
    seed = 0 if families is suggest_pairs.TUNED else 50_000
    while counts.total() < cases:
        seed += 1
        pair, stored, target = suggest_pairs.made(families, seed)
        if not is_missing(stored, target):
            continue
        suggestion = suggest(stored, target)
        is_right = suggestion is not None and suggest_pairs.is_right(pair, stored, target, suggestion)
        is_certain = suggestion is not None and suggestion.confident
        assert is_right or not is_certain, (seed, pair.title, str(suggestion))
        counts[f"{'certain' if is_certain else 'guess'} {'right' if is_right else 'wrong'}"] += 1
    assert counts["certain right"] >= certain, counts
    assert counts["certain right"] + counts["guess right"] >= right, counts


D = {"kernel": np.zeros((4, 8), "f4"), "bias": np.zeros(8, "f4")}
NUMBERED = {f"layer_{n}": D for n in range(3)}


def stack(axis: int) -> Any:
    """Three layers on one axis."""
    return {name: np.stack([leaf] * 3, axis) for name, leaf in D.items()}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (NUMBERED, {"layer": {str(n): D for n in range(3)}}, [r"rules.rename(r'layer_(\d+)', r'layer/\1')"]),
        (NUMBERED, {"layers": stack(1)}, [r"rules.stack(r'layer_(\d+)', 'layers', axis=1)"]),
        ({"layers": stack(1)}, NUMBERED, ["rules.unstack('layers', 'layer_{}', axis=1)"]),
        (
            {"layers": {str(n): D for n in range(3)}},
            {"layers": stack(0)},
            [r"rules.stack(r'layers/(\d+)', 'layers')"],
        ),
        (
            {"layers": stack(0)},
            {"layers": stack(1)},
            ["rules.unstack('layers', 'layers_{}')", r"rules.stack(r'layers_(\d+)', 'layers', axis=1)"],
        ),
        (
            {f"layer_{n}": D for n in (1, 2)},
            {"block": {str(n): D for n in (0, 1)}},
            ["rules.rename({'layer_1': 'block/0', 'layer_2': 'block/1'})"],
        ),
        (
            NUMBERED,
            {f"layer_{n}": D for n in (1, 2, 3)},
            ["rules.rename({'layer_0': 'layer_1', 'layer_1': 'layer_2', 'layer_2': 'layer_3'})"],
        ),
    ],
    ids=["list", "axis 1", "off axis 1", "list stacked", "axis 0 to 1", "from 1", "from 0 to 1"],
)
def test_rows_and_stacks(old: Any, new: Any, expected: list[str]) -> None:
    """Lists, any first number and any axis are met with the rules that lead there."""
    suggestion = suggest(as_stored({"params": old}), state_dict.describe({"params": new}))
    assert suggestion is not None
    assert [rule.source for rule in suggestion.rules] == expected
    assert suggestion.confident, suggestion.doubts


def test_much_that_is_foreign_and_unused_is_a_doubt() -> None:
    """A model is not thrown away: nothing is proposed, and so nothing is ready to paste."""
    old = {"blocks": {name: np.zeros((5, 7), "f4") for name in "abc"}, "out": D}
    new = {"stages": {name: np.zeros((7, 6), "f4") for name in "xyz"}, "out": D}
    assert suggest(as_stored({"params": old}), state_dict.describe({"params": new})) is None


def test_work_grows_with_the_leaves() -> None:
    """Blocks whose inner names changed get one rule a name, for three times the blocks about three times the calls."""
    few, many = (calls_for(blocks) for blocks in (4, 12))
    assert many < 5 * few


def calls_for(blocks: int) -> int:
    """Return the Python calls that a certain proposal for a transformer of so many blocks takes."""
    names = {"attn": "attention", "query": "q_proj", "key": "k_proj", "value": "v_proj"}
    parts = ("LayerNorm_0", "attn", "LayerNorm_1", "mlp")
    layers = [suggest_pairs.transformer(f"l{number}", 8, parts) for number in range(blocks)]
    model = {"block": suggest_pairs.Row(layers), "head": suggest_pairs.dense("h", 8, 10)}
    stored = as_stored(suggest_pairs.state_of(model, "adam"))
    suggest_pairs.rename(model, names)
    target = state_dict.describe(suggest_pairs.state_of(model, "adam"))
    profile = cProfile.Profile()
    suggestion = profile.runcall(suggest, stored, target)
    assert suggestion is not None
    assert suggestion.confident, suggestion.doubts
    assert len(suggestion.steps) == len(names)
    return sum(entry.callcount for entry in profile.getstats())
