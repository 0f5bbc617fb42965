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


def _fresh(tree: Any) -> Any:
    """The same shapes, of which nothing is known."""
    return mapped(lambda x: np.full_like(x, np.nan), tree)


def _replicas(tree: Any) -> Any:
    return mapped(lambda x: np.stack([x] * 4), tree)


A, B, C = _A.dense(4, 8), _A.dense(8, 16), _A.dense(16, 3)
LAYERS_0_1_2 = {"Dense_0": A, "Dense_1": B, "Dense_2": C}
TWO = {"Dense_0": A, "Dense_1": B}
STATS = {"norm": {"mean": _A(8), "var": _A(8)}}
CONVS = [{"kernel": _A(3, 3, 4, 4), "bias": _A(4)} for _ in range(3)]
NORMS = [{"scale": _A(4), "bias": _A(4)} for _ in range(3)]
CONVS_NORMS = {f"{name}_{n}": one for name, all_ in (("convs", CONVS), ("norms", NORMS)) for n, one in enumerate(all_)}
AMSGRAD = {**_state(TWO)["opt_state"]["0"], "nu_max": _fresh({**TWO, **TABLE})}
# Old and new state, the rules, and what is uncertain: nothing, or part of a doubt or comment.
REFACTORS: dict[str, tuple[Any, Any, list[str], str]] = {
    "layers into a backbone beside their head": (
        _state(LAYERS_0_1_2), _state({"encoder": {"fc1": A, "fc2": B}, "head": C}),
        ["rules.rename({'Dense_0': 'encoder/fc1', 'Dense_1': 'encoder/fc2'})", "rules.rename('Dense_2', 'head')"], "",
    ),
    "a backbone that keeps their names": (
        {"params": LAYERS_0_1_2}, {"params": {"backbone": TWO, "head": C}},
        ["rules.rename({'Dense_0': 'backbone/Dense_0', 'Dense_1': 'backbone/Dense_1'})",
         "rules.rename('Dense_2', 'head')"], "",
    ),
    "a new average": (
        _state(TWO), {**_state(TWO), "ema_params": {**TWO, **TABLE}}, ["rules.copy('params', 'ema_params')"],
        "would begin as a copy of params",
    ),
    "an average that moved": (
        {"params": TWO, "ema_params": mapped(lambda x: x * 9, TWO)},
        {"params": TWO, "ema": {"0.999": mapped(lambda x: x * 9, TWO)}},
        ["rules.rename('ema_params', 'ema/0.999')"], "",
    ),
    "parameters inside an optimizer's state": (
        {"optimizer": {"model": TWO, **_state(TWO)}}, {"model": TWO, "optimizer": _state(TWO)},
        ["rules.rename('optimizer/model', 'model')"], "",
    ),
    "states called like optimizers": (
        {"g_opt": _state(TWO), "d_opt": _state({"c": C})}, {"gen": _state(TWO), "disc": _state({"c": C})},
        ["rules.rename('d_opt', 'disc')", "rules.rename('g_opt', 'gen')"], "a name that says something else",
    ),
    "a number that moved": (
        {"params": TWO, "step": np.int32(7)}, {"params": TWO, "counters": {"global_step": np.int32(7)}},
        ["rules.rename('step', 'counters/global_step')"], "a name that says something else",
    ),
    "a number that moved up": (
        {"params": {"w": A, "scale": np.float32(3)}}, {"weights": {"w": A}, "scale": np.float32(3)},
        ["rules.rename('params/scale', 'scale')", "rules.rename('params', 'weights')"], "",
    ),
    "replicas of a renamed model": (
        _replicas(_state(TWO)), _state({"fc1": A, "fc2": B}),
        ["rules.unreplicate()", "rules.rename({'Dense_0': 'fc1', 'Dense_1': 'fc2'})"], "",
    ),
    "replicas beside one array": (
        {**_replicas(_state(TWO)), "table": TABLE["emb"]["embedding"]},
        {**_state(TWO), "table": TABLE["emb"]["embedding"]},
        ["rules.unreplicate('^(?:opt_state|params|step)')"], "",
    ),
    "a new field of an optimizer": (
        _state(TWO), {**_state(TWO), "opt_state": {"0": AMSGRAD}}, ["rules.from_target('opt_state/0/nu_max')"],
        "nothing is stored there",
    ),
    "collections that were one": (
        {"params": {"params": TWO, "batch_stats": STATS}}, {"params": TWO, "batch_stats": STATS},
        ["rules.rename('^params/params', 'params')", "rules.rename('^params/batch_stats', 'batch_stats')"], "",
    ),
    "collections that became one": (
        {"params": TWO, "batch_stats": STATS}, {"params": {"params": TWO, "batch_stats": STATS}},
        ["rules.rename({'batch_stats': 'params/batch_stats', 'params': 'params/params'})"], "",
    ),
    "names that become levels": (
        {"params": {"heads_policy": A, "heads_value": B, "wo_bias": C["bias"], "wo_kernel": C["kernel"]}},
        {"params": {"heads": {"policy": A, "value": B}, "wo": C}},
        ["rules.rename('heads_policy', 'heads/policy')", "rules.rename('heads_value', 'heads/value')",
         "rules.rename('wo_bias', 'wo/bias')", "rules.rename('wo_kernel', 'wo/kernel')"], "",
    ),
    "rows that become one": (
        {"params": CONVS_NORMS},
        {"params": {"blocks": {str(n): {"conv": CONVS[n], "norm": NORMS[n]} for n in range(3)}}},
        [r"rules.rename(r'convs_(\d+)', r'blocks/\1/conv')", r"rules.rename(r'norms_(\d+)', r'blocks/\1/norm')"], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFACTORS)
def test_the_commonest_refactors(name: str, tmp_path: Path) -> None:
    """Each value gets to its place, and the printed text restores what it does not leave to the target."""
    old, new, expected, doubt = REFACTORS[name]
    found, suggestion, wrong = verdict(Case(name, old, new))
    assert suggestion is not None and [step.rule.source for step in suggestion.steps] == expected
    assert found == ("guess right" if doubt else "certain right"), (wrong, suggestion.doubts)
    assert doubt in " ".join((*suggestion.doubts, str(suggestion)))
    if suggestion.rules:
        names: dict[str, Any] = {}
        exec(str(suggestion), names)
        save(tmp_path / "old", old, format="msgpack")
        np.testing.assert_equal(restore(tmp_path / "old", fresh(new), transforms=names["transforms"]), new)


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
