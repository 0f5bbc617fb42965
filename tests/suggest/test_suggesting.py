"""Proposals, judged by the stored leaf that each leaf of the target would get, also between code bases."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_ckpt_compat import restore, rules, save
from flax_ckpt_compat._suggest import suggest
from flax_ckpt_compat._trees import state_dict
from tests.random_cases.edits import fresh, mapped, stacked
from tests.random_cases.models import Arrays
from tests.random_cases.proposals import Case, verdict
from tests.support.peers import skip_without_typed_keys
from tests.support.suggest_cases import as_stored, proposed, sure
from tests.support.suggest_states import (
    ADAM,
    CLIPPED,
    NNX_NAMES,
    array,
    attention,
    dense,
    flax_optim,
    layers,
    linen,
    nnx_state,
    train,
)

PARAMS = train(linen())["params"]
ADAMS = jax.eval_shape(ADAM.init, PARAMS)
D = dense(8, 8)


def test_raw_keys_become_typed_ones() -> None:
    """A raw key that has a typed one as its counterpart in the target is wrapped."""
    skip_without_typed_keys()
    old = {"net": {"w": np.ones((2, 3)), "rng": np.array([0, 7], np.uint32)}}
    new = {"model": {"w": np.zeros((2, 3)), "rng": jax.random.key(0)}}
    assert sure(old, new) == ["rules.rename('net', 'model')", "rules.wrap_key_data('^model/rng$')"]
    assert sure(old["net"], new["model"]) == ["rules.wrap_key_data('^rng$')"]
    given = rules.rename("rng", "key").apply(rules.wrap_key_data("rng").apply(as_stored(old["net"]), None), None)
    suggestion = suggest(given, state_dict.describe({"v": old["net"]["w"], "key": new["model"]["rng"]}))
    assert suggestion is not None
    # Of another implementation, whose data are four numbers.
    other = {**old["net"], "rng": jax.random.key(0, impl="rbg")}
    assert suggest(as_stored(old["net"]), state_dict.describe(other)) is None


def test_unrolled_layers_become_scanned_ones_and_back() -> None:
    """Numbered layers and one with a leading axis are told from the shapes, moments included."""
    unrolled, scanned = train(layers()), train(layers("layers"))
    assert sure(unrolled, scanned) == [r"rules.stack(r'layer_(\d+)', 'layers')"]
    assert sure(scanned, unrolled) == ["rules.unstack('layers', 'layer_{}')"]
    found = proposed(unrolled, train(layers("scan"), CLIPPED))[1]
    names = [f"opt_state/0/mu/layer_{number}/Dense_0/kernel" for number in range(4)]
    assert found["opt_state/1/0/mu/scan/Dense_0/kernel"] == "+".join(names)


@pytest.mark.skipif(not hasattr(nnx, "to_pure_dict"), reason="this Flax has no nnx.to_pure_dict")
@pytest.mark.parametrize("form", ["state", "pure dict", "inside"])
def test_linen_to_nnx(form: str) -> None:
    """Collections are merged and layers renamed, so that each variable comes from the same variable of its layer."""
    old, new = train(linen()), nnx_state()
    new = new if form == "state" else nnx.to_pure_dict(new)
    suggestion, found = proposed(old, {"net": new} if form == "inside" else new)
    assert suggestion is not None
    assert suggestion.confident, suggestion.doubts
    for path, source in found.items():
        layer, variable = path.removeprefix("net/").removesuffix("/value").split("/")
        collection = "batch_stats" if variable in ("mean", "var") else "params"
        assert source == f"{collection}/{NNX_NAMES[layer]}/{variable}"


@pytest.mark.parametrize("nested", [False, True])
def test_flax_optim(nested: bool) -> None:
    """A checkpoint of flax.optim gives parameters, moments and step."""
    new = {name: node for name, node in train(linen()).items() if name != "batch_stats"}
    assert sure(flax_optim(PARAMS, nested), new)[0] == "rules.pre_optax()"
    found = proposed(flax_optim(PARAMS, nested), new)[1]
    inner = "params/" if nested else ""
    for path, source in found.items():
        kind, _, rest = path.rpartition("opt_state/0/")[2].partition("/")
        field = {"mu": "grad_ema", "nu": "grad_sq_ema"}.get(kind)
        moment = f"optimizer/state/param_states/{inner}{rest}/{field}"
        other = "optimizer/state/step" if path in ("step", "opt_state/0/count") else f"optimizer/target/{inner}{rest}"
        assert source == (moment if field else other)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"gen": train(linen()), "dis": train(linen())}, {"generator": train(linen()), "disc": train(linen())}),
        (
            {"gen": train(linen()), "dis": train(linen())},
            {"gen": train(linen(), CLIPPED), "dis": train(linen(), CLIPPED)},
        ),
        (train(attention()), train(attention(("q_proj", "k_proj", "v_proj", "o_proj")))),
        ({"params": {f"h_{n}": D for n in range(12)}}, {"params": {"h": {str(n): D for n in range(12)}}}),
        ({"params": PARAMS, "ema_params": PARAMS}, {"params": PARAMS, "ema": PARAMS}),
        ({"params": {"up": D, "down": D}}, {"params": {"a_up": D, "b_down": D}}),
    ],
    ids=["twins by name", "two optimizers", "attention", "list", "average", "other order"],
)
def test_equal_shapes_with_telling_names(old: Any, new: Any) -> None:
    """Where names tell leaves of equal shape apart, each is taken from its own."""
    assert sure(old, new)
    for path, source in proposed(old, new)[1].items():
        assert source is not None
        assert source.split("/")[-1] == path.split("/")[-1]
        assert {"mu", "nu", "count"} & set(source.split("/")) == {"mu", "nu", "count"} & set(path.split("/"))
    if "a_up" in new.get("params", ()):
        assert proposed(old, new)[1]["params/a_up/kernel"] == "params/up/kernel"
    if "h" in new.get("params", ()):
        assert proposed(old, new)[1]["params/h/10/kernel"] == "params/h_10/kernel"


def test_nothing_to_suggest() -> None:
    """Nothing is proposed where nothing is missing, or where the checkpoint is of another model."""
    old = _state(TWO)
    assert proposed({"params": {"w": array(8, 8)}}, {"params": {"kernel": array(8, 8)}})[0] is None
    other = {"params": {"a": array(3, 5), "b": array(7)}}, {"params": {"a": array(3, 5), "c": array(9), "d": array(8)}}
    assert proposed(*other)[0] is None
    assert proposed(old, old)[0] is None
    assert proposed({"x": array(3, 5)}, old)[0] is None
    assert proposed(old, {})[0] is None


_A = Arrays()
DENSE = [{"w": _A(4, 5), "b": _A(5)} for _ in range(12)]
TABLE = {"emb": _A.embed(9, 4)}
NUMBERED = {f"layer_{n}": layer for n, layer in enumerate(DENSE)}
FROM_1 = {f"layer_{n}": layer for n, layer in enumerate(DENSE, 1)}
STACK = {"layers": stacked(DENSE, 0)}
T5X = {
    "target": {"encoder": {"layers_0": DENSE[0]}, "decoder": {"layers_0": DENSE[1]}},
    "state": {
        "step": np.int32(7),
        "param_states": {
            "encoder": {"layers_0": mapped(lambda x: x * 2, DENSE[0])},
            "decoder": {"layers_0": mapped(lambda x: x * 2, DENSE[1])},
        },
    },
}
HAIKU = {f"net/~/linear_{n}": layer for n, layer in enumerate(DENSE[:3])}
LINEN = {f"linear_{n}": {"kernel": layer["w"], "bias": layer["b"]} for n, layer in enumerate(DENSE[:3])}


def _state(params: Any) -> Any:
    return _adam({**params, **TABLE})


def _adam(params: Any) -> Any:
    adam = {"count": np.int32(2), "mu": mapped(lambda x: x * 2, params), "nu": mapped(lambda x: x * 3, params)}
    return {"step": np.int32(3), "params": params, "opt_state": {"0": adam}}


PORTS: dict[str, tuple[Any, Any, list[str]]] = {
    "from 1 to stack": (_state(FROM_1), _state(STACK), [r"rules.stack(r'layer_(\d+)', 'layers', first=1)"]),
    "stack to from 1": (_state(STACK), _state(FROM_1), ["rules.unstack('layers', 'layer_{}', first=1)"]),
    "T5X": (T5X, {"params": T5X["target"]}, ["rules.rename('target', 'params')"]),
    "T5X to linen's state": (
        T5X,
        {"step": np.int32(7), "params": T5X["target"]},
        ["rules.rename('target', 'params')", "rules.rename('state/step', 'step')"],
    ),
    "T5X for inference": (T5X, T5X["target"], ["rules.rename('target', '')"]),
    "towers": (
        {"params": {n: {"body": NUMBERED} for n in ("visual", "textual")}},
        {"params": {n: {"body": {f"h{m}": c for m, c in enumerate(DENSE)}} for n in ("visual", "textual")}},
        [r"rules.rename(r'layer_(\d+)', r'h\1')"],
    ),
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
BOXED = mapped(lambda x: {"value": x}, {"fc1": A, "fc2": B, "head": C})
TWO, HEADS = {"Dense_0": A, "Dense_1": B}, ("aux", "policy", "value")
ONE_NORM, OTHER_NORM = ({"scale": np.full(4, n, np.float32)} for n in (1, 2))
STATS = {"norm": {"mean": _A(8), "var": _A(8)}}
CONVS = [{"kernel": _A(3, 3, 4, 4), "bias": _A(4)} for _ in range(3)]
NORMS = [{"scale": _A(4), "bias": _A(4)} for _ in range(3)]
CONVS_NORMS = {f"{name}_{n}": one for name, all_ in (("convs", CONVS), ("norms", NORMS)) for n, one in enumerate(all_)}
AMSGRAD = {**_state(TWO)["opt_state"]["0"], "nu_max": _fresh({**TWO, **TABLE})}
FROM_0 = {f"layer_{n}": mapped(lambda x: x + 1, layer) for n, layer in enumerate(DENSE)}
THIRDS = {"layers": {f"block_{n}": stacked(DENSE[n::3], 0) for n in range(3)}}
PLACES = {f"layer_{n}": f"layers/block_{n % 3}/{n // 3}" for n in range(12)}
GATES = _A(2, 6, 7)
MANY = {f"{name}x": _A.dense(4, 8) for name in "abcdefghijklm"}
ROWS = {f"b{row}_{n}": {"a": _A(3, 3), "n": _A(3)} for row in range(2) for n in range(4)}
DOTS, KEPT = {"a.kernel": _A(3, 4), "a.bias": _A(4), "b.kernel": _A(4, 5)}, np.full(7, np.nan, np.float32)
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
    "a module around all": (
        {"params": TWO, "batch_stats": STATS}, {"params": {"net": TWO}, "batch_stats": {"net": STATS}},
        ["rules.rename('batch_stats', 'batch_stats/net')", "rules.rename('params', 'params/net')"], "",
    ),
    "a chain around the optimizer": (
        _state(TWO), {**_state(TWO), "opt_state": {"0": {}, "1": _state(TWO)["opt_state"]}},
        ["rules.optimizer_state('opt_state')"], "",
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
    "an optimizer that takes the step": (
        _state(TWO), {"model": _state(TWO)["params"], "optimizer": {n: _state(TWO)[n] for n in ("opt_state", "step")}},
        ["rules.rename('params', 'model')", r"rules.rename('(opt_state|step)', r'optimizer/\1')"], "",
    ),
    "states called like optimizers": (
        {"g_opt": _state(TWO), "d_opt": _state({"c": C})}, {"gen": _state(TWO), "disc": _state({"c": C})},
        ["rules.rename('d_opt', 'disc')", "rules.rename('g_opt', 'gen')"], "a name that says something else",
    ),
    "siblings of one shape in another order": (
        {"params": {**TWO, "attn_norm": ONE_NORM, "mlp_norm": OTHER_NORM}},
        {"params": {**TWO, "mlp_norm_x": OTHER_NORM, "norm_of_attn": ONE_NORM}},
        ["rules.rename('mlp_norm', 'mlp_norm_x')", "rules.rename('attn_norm', 'norm_of_attn')"], "",
    ),
    "a tuple that became a dict": (
        tuple(_state(TWO)[name] for name in ("params", "opt_state", "step")), _state(TWO),
        ["rules.rename('^0', 'params')", "rules.rename('1', 'opt_state')", "rules.rename('^2$', 'step')"], "",
    ),
    "a number of another name": (
        {"params": TWO, "iteration": np.int32(7)}, {"params": TWO, "step": np.int32(7)},
        ["rules.rename('^iteration$', 'step')"], "a name that says something else",
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
        ["rules.rename('^params/batch_stats', 'batch_stats')", "rules.rename('^params/params', 'params')"], "",
    ),
    "collections that became one": (
        {"params": TWO, "batch_stats": STATS}, {"params": {"params": TWO, "batch_stats": STATS}},
        ["rules.rename({'batch_stats': 'params/batch_stats', 'params': 'params/params'})"], "",
    ),
    "names that become levels": (
        {"params": {**{f"heads_{name}": A for name in HEADS}, "wo_bias": C["bias"], "wo_kernel": C["kernel"]}},
        {"params": {"heads": dict.fromkeys(HEADS, A), "wo": C}},
        ["rules.rename('wo_bias', 'wo/bias')", "rules.rename('wo_kernel', 'wo/kernel')",
         *(f"rules.rename('heads_{name}', 'heads/{name}')" for name in HEADS)], "",
    ),
    "rows that become one": (
        {"params": CONVS_NORMS},
        {"params": {"blocks": {str(n): {"conv": CONVS[n], "norm": NORMS[n]} for n in range(3)}}},
        [r"rules.rename(r'convs_(\d+)', r'blocks/\1/conv')", r"rules.rename(r'norms_(\d+)', r'blocks/\1/norm')"], "",
    ),
    "boxes around parameters alone": (
        _state(TWO), {**_state(TWO), "params": mapped(lambda x: {"value": x}, {**TWO, **TABLE})},
        [r"rules.rename('(^(?:params)/.*)$', r'\1/value')"], "",
    ),
    "one of two towers that is scanned": (
        _state({"img": NUMBERED, "txt": FROM_0}), _state({"img": STACK, "txt": FROM_0}),
        [r"rules.stack(r'img/layer_(\d+)', 'img/layers')"], "",
    ),
    "one of two towers that is unrolled": (
        _state({"img": STACK, "txt": {"net": STACK["layers"]}}),
        _state({"img": NUMBERED, "txt": {"net": STACK["layers"]}}),
        ["rules.unstack('layers', 'layer_{}')"], "",
    ),
    "stacks of every third layer": (
        _state(NUMBERED), _state(THIRDS), [f"rules.rename({PLACES})", *(
            rf"rules.stack(r'layers/block_{n}/(\d+)', 'layers/block_{n}')" for n in range(3))],
        "holds one layer in 3 or neighbours",
    ),
    "every third layer in a stack": (
        _state(THIRDS), _state(NUMBERED), [*(
            f"rules.unstack('layers/block_{n}', 'layers/block_{n}/{{}}')" for n in range(3)),
            f"rules.rename({ {new: old for old, new in PLACES.items()} })"],
        "holds one layer in 3 or neighbours",
    ),
    "rows that get names": (
        _state({"gating": GATES}), _state({"gate": {"kernel": GATES[0]}, "up": {"kernel": GATES[1]}}),
        ["rules.unstack('gating', 'gating_{}')", "rules.rename({'gating_0': 'gate/kernel', 'gating_1': 'up/kernel'})"],
        "is the first row of gating",
    ),
    "rows that get names in one layer of two": (
        {"params": {"a": {"kv": GATES}, "b": {"kv": GATES}}},
        {"params": {"a": {"k": GATES[0], "v": GATES[1]}, "b": {"kv": GATES}}},
        ["rules.unstack('a/kv', 'a/kv_{}')", "rules.rename({'a/kv_0': 'a/k', 'a/kv_1': 'a/v'})"], "is the first row",
    ),
    "an array that is there, beside two as large as its rows": (
        {"params": {"kind": GATES, "q": GATES[0], "k": GATES[1]}},
        {"params": {"kinds": GATES, "query": GATES[0], "key": GATES[1]}},
        ["rules.rename('kind', 'kinds')", "rules.rename('k', 'key')", "rules.rename('q', 'query')"], "",
    ),
    "two numbers that begin at 0": (
        {"params": {f"stage{n}_block{m}": DENSE[2 * n + m] for n in (1, 2) for m in (1, 2)}},
        {"params": {f"stage{n - 1}_block{m - 1}": DENSE[2 * n + m] for n in (1, 2) for m in (1, 2)}},
        [f"rules.rename({ {f'stage{n}_block{m}': f'stage{n - 1}_block{m - 1}' for n in (1, 2) for m in (1, 2)} })"], "",
    ),
    "parameters for inference, beside their trace": (
        {"params": {"fc": A, "head": B}, "opt_state": {"trace": mapped(lambda x: x * 2, {"fc": A, "head": B})}},
        {"fc": A, "head": B}, ["rules.rename('params', '')"], "",
    ),
    "names that become rows": (
        _state({"k": GATES[0], "v": GATES[1]}), _state({"kv": GATES}),
        ["rules.rename({'k': 'kv_0', 'v': 'kv_1'})", r"rules.stack(r'kv_(\d+)', 'kv')"], "is the first row of kv",
    ),
    "a level around layers called like moments": (
        _adam({"mu": A, "nu": B, "x": C}), _adam({"mu": {"mu": A, "nu": B, "x": C}}),
        [r"rules.rename('(mu)/(bias|kernel)', r'\1/mu/\2')",
         r"rules.rename('((?:mu|nu|params))/nu', r'\1/mu/nu')",
         "rules.rename('x', 'mu/x')"], "",
    ),
    "a level called params, where some layers have statistics": (
        {**_adam({"a": A, "b": B, "head": C}), "batch_stats": {"a": STATS["norm"], "b": {"mean": GATES}}},
        {**_adam({"params": {"a": A, "b": B, "head": C}}),
         "batch_stats": {"params": {"a": STATS["norm"], "b": {"mean": GATES}}}},
        [r"rules.rename('((?:mu|nu|params))/(a|b|head)', r'\1/params/\2')",
         r"rules.rename('((?:batch_stats|mu|nu))/(a|b)', r'\1/params/\2')"], "",
    ),
    "a level around many names, beside one that stays": (
        _adam({**MANY, "head": C}), _adam({"net": MANY, "head": C}),
        [r"rules.rename('((?:mu|nu|params))/((?!(?:head)(?![^/]))[^/]+)', r'\1/net/\2')"], "",
    ),
    "a state in a box, whose parts get names": (
        {"state": _adam(TWO)}, {"target": TWO, "opt": _adam(TWO)["opt_state"]},
        ["rules.rename('state/params', 'target')",
         "rules.optimizer_state('opt', stored_at='state/opt_state')"], "a name that says something else",
    ),
    "a state in a box that becomes a tuple": (
        tuple(_adam(TWO)[name] for name in ("params", "opt_state", "step")), {"state": _adam(TWO)},
        ["rules.rename('^0', 'state/params')",
         "rules.rename('^2$', 'state/step')",
         "rules.optimizer_state('state/opt_state', stored_at='1')"], "",
    ),
    "a collection of another name that becomes one with the parameters": (
        {"params": TWO, "ema_x": {"x": GATES}, "opt_state": _adam(TWO)["opt_state"]},
        {"model": {**TWO, "x": GATES}, "opt_state": _adam(TWO)["opt_state"]},
        ["rules.rename('^(?:ema_x|params)', 'model')"], "a name that says something else",
    ),
    "statistics that leave one tree": (
        {"model": {"bn": {**NORMS[0], **STATS["norm"]}, "fc": A}},
        {"params": {"bn": NORMS[0], "fc": A}, "batch_stats": {"bn": STATS["norm"]}},
        ["rules.rename('model', 'params')",
         "rules.rename('params/bn/mean', 'batch_stats/bn/mean')",
         "rules.rename('params/bn/var', 'batch_stats/bn/var')"], "",
    ),
    "boxes and other names beside a step": (
        {"step": np.int32(3), "params": LAYERS_0_1_2, "opt_state": {"0": {"trace": LAYERS_0_1_2}}},
        {"step": np.int32(3), "params": BOXED, "opt_state": {"0": {"trace": BOXED}}},
        [r"rules.rename('(bias|kernel)$', r'\1/value')",
         "rules.rename({'Dense_0': 'fc1', 'Dense_1': 'fc2'})",
         "rules.rename('Dense_2', 'head')"], "",
    ),
    "a renamed layer in one of several states": (
        {"actor": _adam({"body": {"Dense_0": A}, "Dense_0": B})},
        {"actor": _adam({"body": {"Dense_0": A}, "means": B})},
        [r"rules.rename('((?:mu|nu|params))/Dense_0', r'\1/means')"], "",
    ),
    "a state of linen's that becomes one of NNX's": (
        {**_adam({"params": TWO}), "rng": np.arange(2, dtype=np.uint32)},
        {"model": TWO, "optimizer": {n: _adam(TWO)[n] for n in ("opt_state", "step")},
         "rngs": {"default": np.arange(2, dtype=np.uint32)}},
        [r"rules.rename('(opt_state|step)', r'optimizer/\1')", "rules.rename('^params', 'model')",
         "rules.rename('params', '')", "rules.rename('rng', 'rngs/default')"], "rngs/default would come from rng",
    ),
    "rows beside a renamed one": (
        {"params": ROWS}, {"params": {name: {"zz" if name[1] == "1" else "a": layer["a"], "n": layer["n"]}
                                      for name, layer in ROWS.items()}},
        [r"rules.rename(r'(params/b1_\d+)/a', r'\1/zz')"], "a name that says something else",
    ),
    "parameters for inference, of a whole state": (
        {**_state(TWO), "batch_stats": STATS}, {**TWO, **TABLE}, ["rules.rename('params', '')"], "",
    ),
    "one count of all modules that becomes one per class": (
        {"params": {"Conv_0": A, "Dense_1": B, "Dense_2": C}}, {"params": {"Conv_0": A, "Dense_0": B, "Dense_1": C}},
        ["rules.rename({'Dense_1': 'Dense_0', 'Dense_2': 'Dense_1'})"], "",
    ),
    "names with dots that are right": (
        {"params": DOTS}, {"params": {**DOTS, "a": {"scale": KEPT}, "b": {"scale": KEPT}}},
        ["rules.from_target('params/a', 'params/b')"], "nothing is stored there",
    ),
}  # fmt: skip

REFACTORS |= {name: (*row, "") for name, row in PORTS.items()}


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


def test_two_arrays_where_there_was_one_are_no_box() -> None:
    """Layers with a mean and a spread for each stored array do not get it as the one or the other."""
    old = {f"Dense_{n}": {"kernel": _A(4, 4), "bias": _A(4)} for n in range(3)}
    new = mapped(lambda x: {"loc": x, "scale": x}, old)
    suggestion, _ = proposed(old, new)
    assert suggestion is None or not suggestion.rules


@pytest.mark.parametrize("form", ["rows", "kernels", pytest.param("towers", marks=pytest.mark.slow)])
def test_many_layers_take_no_longer_each(form: str) -> None:
    """Twice the layers are at most three times the work, counted in calls of functions."""

    def work(count: int) -> int:
        old, new = ({f"l{n}_{m}": {"kernel": array(8, w)} for n in range(count) for m in "01"} for w in (8, 9))
        if form == "towers":
            old = {f"t{n}": {f"l_{m}": dense(2, 3) for m in range(3)} for n in range(count)}
            new = {name: {"l": {"kernel": array(3, 2, 3), "bias": array(3, 3)}} for name in old}
        elif form == "kernels":
            old, new = ({f"{one}_{n}_x": array(3, n % 7 + 4, 8) for n in range(count)} for one in ("features", "conv"))
        stored, target, calls = as_stored({"params": old}), state_dict.describe({"params": new}), list[int]()
        sys.setprofile(lambda *_: calls.append(1))
        try:
            suggest(stored, target)
        finally:
            sys.setprofile(None)
        return len(calls)

    assert work(160) < 3 * work(80)


def test_numbers_in_names_are_whole() -> None:
    """Of names with dots, the tenth comes after the second."""
    old = {f"l1.{n}.c": {"kernel": _A(3, 3)} for n in range(13)}
    new = {f"conv_{n}": old[f"l1.{n}.c"] for n in range(13)}
    assert verdict(Case("dots", {"params": old}, {"params": new}))[0] == "certain right"


def test_logits_that_were_the_embedding_are_no_new_layer_for_certain() -> None:
    """A kernel with the shape of the embedding transposed may begin as a copy of it."""
    params = {"embed": _A.embed(11, 4), "mlp": _A.dense(4, 4)}
    new = {**params, "logits": {"kernel": np.full((4, 11), np.inf, np.float32)}}
    found, suggestion, _ = verdict(Case("untied", {"params": params}, {"params": new}))
    assert found == "guess wrong" and suggestion is not None and suggestion.rules == []
