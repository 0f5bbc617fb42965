"""Proposals between code bases: groups of layers, rows from 1, boxes, T5X, Haiku; judged by values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import restore, rules, save
from tests.random_cases.edits import fresh, mapped, stacked
from tests.random_cases.models import Arrays
from tests.random_cases.proposals import Case, verdict

_A = Arrays()
LAYERS = [{"w": _A(4, 5), "b": _A(5)} for _ in range(12)]
TABLE = {"emb": _A.embed(9, 4)}
ROW = {f"layer_{n}": layer for n, layer in enumerate(LAYERS)}
FROM_1 = {f"layer_{n}": layer for n, layer in enumerate(LAYERS, 1)}
STACK = {"layers": stacked(LAYERS, 0)}
GROUPS = {"layers": mapped(lambda x: x.reshape(3, 4, *x.shape[1:]), STACK["layers"])}
BOXED = {name: {"value": array} for name, array in LAYERS[0].items()}
MOMENTS = mapped(lambda x: x * 2, {"layer": LAYERS[0]})
T5X = {
    "target": {"encoder": {"layers_0": LAYERS[0]}, "decoder": {"layers_0": LAYERS[1]}},
    "state": {
        "step": np.int32(7),
        "param_states": {
            "encoder": {"layers_0": mapped(lambda x: x * 2, LAYERS[0])},
            "decoder": {"layers_0": mapped(lambda x: x * 2, LAYERS[1])},
        },
    },
}
HAIKU = {f"net/~/linear_{n}": layer for n, layer in enumerate(LAYERS[:3])}
LINEN = {f"linear_{n}": {"kernel": layer["w"], "bias": layer["b"]} for n, layer in enumerate(LAYERS[:3])}


def _state(params: Any) -> Any:
    params = {**params, **TABLE}
    adam = {"count": np.int32(2), "mu": mapped(lambda x: x * 2, params), "nu": mapped(lambda x: x * 3, params)}
    return {"step": np.int32(3), "params": params, "opt_state": {"0": adam}}


STACKING = r"rules.stack(r'layer_(\d+)', 'layers')"
PORTS: dict[str, tuple[Any, Any, list[str]]] = {
    "12 to 3 x 4": (_state(STACK), _state(GROUPS), ["rules.split_axis('layers', [3, 4])"]),
    "3 x 4 to 12": (_state(GROUPS), _state(STACK), ["rules.merge_axes('layers')"]),
    "row to groups": (_state(ROW), _state(GROUPS), [STACKING, "rules.split_axis('layers', [3, 4])"]),
    "groups to row": (
        _state(GROUPS),
        _state(ROW),
        ["rules.merge_axes('layers')", "rules.unstack('layers', 'layer_{}')"],
    ),
    "from 1 to stack": (_state(FROM_1), _state(STACK), [r"rules.stack(r'layer_(\d+)', 'layers', first=1)"]),
    "stack to from 1": (_state(STACK), _state(FROM_1), ["rules.unstack('layers', 'layer_{}', first=1)"]),
    "boxes of parameters alone": (
        {"params": {"layer": LAYERS[0]}, "opt_state": {"0": {"mu": MOMENTS, "nu": MOMENTS}}},
        {"params": {"layer": BOXED}, "opt_state": {"0": {"mu": MOMENTS, "nu": MOMENTS}}},
        [r"rules.rename('^(params/.+)$', r'\1/value')"],
    ),
    "T5X": (T5X, {"params": T5X["target"]}, ["rules.rename('target', 'params')"]),
    "T5X to linen's state": (
        T5X,
        {"step": np.int32(7), "params": T5X["target"]},
        ["rules.move('state/step', 'step')", "rules.rename('target', 'params')"],
    ),
    "T5X for inference": (T5X, T5X["target"], ["rules.move('target', '')"]),
    "Haiku": (
        {"params": HAIKU},
        {"params": {"net": LINEN}},
        ["rules.nest('/~/')", "rules.rename('b', 'bias')", "rules.rename('w', 'kernel')"],
    ),
}


@pytest.mark.parametrize("name", PORTS)
def test_ports_are_certain_and_right(name: str) -> None:
    """Each value gets to its place by the rules that are expected, of which few suffice."""
    old, new, expected = PORTS[name]
    found, suggestion, _ = verdict(Case(name, old, new))
    assert suggestion is not None and [step.rule.source for step in suggestion.steps] == expected
    assert found == "certain right", suggestion.doubts


def test_names_with_dots_that_are_right_stay() -> None:
    """Where the target has them, too, and something else is new, nothing is nested."""
    flat = {"a.kernel": _A(3, 4), "a.bias": _A(4), "b.kernel": _A(4, 5)}
    target = {**flat, "a": {"scale": np.full(7, np.nan, np.float32)}, "b": {"scale": np.full(9, np.nan, np.float32)}}
    found, suggestion, _ = verdict(Case("dots", {"params": flat}, {"params": target}))
    assert found == "guess right" and suggestion is not None and not suggestion.doubts
    assert [step.rule.source[:17] for step in suggestion.steps] == ["rules.from_target"]


def test_logits_that_were_the_embedding_are_no_new_layer_for_certain() -> None:
    """A kernel with the shape of the embedding transposed may begin as a copy of it."""
    params = {"embed": _A.embed(11, 4), "mlp": _A.dense(4, 4)}
    new = {**params, "logits": {"kernel": np.full((4, 11), np.inf, np.float32)}}
    found, suggestion, _ = verdict(Case("untied", {"params": params}, {"params": new}))
    assert found == "guess wrong" and suggestion is not None and suggestion.rules == []


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_of_overlapping_names_the_longest_is_taken(order: int, format: str, tmp_path: Path) -> None:
    """One mapping takes T5X's names to others, whichever of its entries is given first."""
    names = {
        "target": "params",
        r"target/(\w+)/relpos_bias/rel_embedding": r"params/\1/layers_0/attention/bias",
        r"layers_(\d+)": r"blocks_\1",
        r"layers_(\d+)/pre_attention_layer_norm": r"layers_\1/attention/norm",
    }
    layer = {"pre_attention_layer_norm": {"scale": _A(4)}, "attention": {"query": _A.dense(4, 4)}}
    old = {
        "target": {"encoder": {"layers_0": layer, "layers_1": LAYERS[1], "relpos_bias": {"rel_embedding": _A(2, 3)}}}
    }
    moved = {
        "norm": layer["pre_attention_layer_norm"],
        "bias": old["target"]["encoder"]["relpos_bias"]["rel_embedding"],
    }
    new = {"params": {"encoder": {
        "layers_0": {"attention": moved}, "blocks_0": {"attention": layer["attention"]}, "blocks_1": LAYERS[1],
    }}}  # fmt: skip
    save(tmp_path / "t5x", old, format=format)
    mapping = dict(list(names.items())[::order])
    got = restore(tmp_path / "t5x", fresh(new), transforms=[rules.rename(mapping)])
    np.testing.assert_equal(got, new)
