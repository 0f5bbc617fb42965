"""Pairs of an old and a new state with known truth: values are numbers of their own, so what is right is computed."""

from __future__ import annotations

import copy
import dataclasses
import random as random_module
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core.tree import Branch, Node, iter_leaves
from flax_ckpt_compat._suggest import Suggestion
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Own
from tests.random_cases.suggestions import evaluated
from tests.support.suggest_cases import as_stored

Module = dict[str, Any]


@dataclasses.dataclass
class Row:
    """Layers that are repeated, and how they lie in the tree.

    Attributes:
        layers: one module each.
        form: ``numbered``, ``list`` or ``stack``.
        first: the number of the first one.
        axis: of a stack.
        glue: between the name and the number.
    """

    layers: list[Module]
    form: str = "numbered"
    first: int = 0
    axis: int = 0
    glue: str = "_"


class Leaf:
    """One array of a model; ``fresh`` where the old model has none of it."""

    def __init__(self, uid: str, *shape: int, stat: bool = False, fresh: bool = False):
        self.uid, self.shape, self.stat, self.fresh = uid, shape, stat, fresh

    def value(self) -> np.ndarray:
        """Numbers that no other leaf has."""
        return np.random.default_rng(zlib.crc32(self.uid.encode())).standard_normal(self.shape).astype(np.float32)


def dense(uid: str, rows: int, columns: int, **more: Any) -> Module:
    """A dense layer."""
    return {"kernel": Leaf(f"{uid}/k", rows, columns, **more), "bias": Leaf(f"{uid}/b", columns, **more)}


def conv(uid: str, rows: int, columns: int) -> Module:
    """A convolution."""
    return {"kernel": Leaf(f"{uid}/k", 3, 3, rows, columns), "bias": Leaf(f"{uid}/b", columns)}


def norm(uid: str, width: int) -> Module:
    """A layer norm."""
    return {"scale": Leaf(f"{uid}/s", width), "bias": Leaf(f"{uid}/b", width)}


def batch(uid: str, width: int) -> Module:
    """A batch norm with its statistics."""
    stats = {name: Leaf(f"{uid}/{name}", width, stat=True) for name in ("mean", "var")}
    return {**norm(uid, width), **stats}


def _attention(uid: str, d: int) -> Module:
    return {name: dense(f"{uid}/{name}", d, d) for name in ("query", "key", "value", "out")}


def transformer(uid: str, d: int, names: tuple[str, str, str, str]) -> Module:
    """Return a block of width ``d`` whose parts have these names."""
    first, attention, second, mlp = names
    return {
        first: norm(f"{uid}/n1", d), attention: _attention(f"{uid}/a", d), second: norm(f"{uid}/n2", d),
        mlp: {"fc1": dense(f"{uid}/f1", d, 4 * d), "fc2": dense(f"{uid}/f2", 4 * d, d)},
    }  # fmt: skip


def _vit(r: Any) -> Module:
    d, n = r.choice([8, 12]), r.choice([2, 3, 5, 12])
    row = Row([transformer(f"l{i}", d, ("LayerNorm_0", "attn", "LayerNorm_1", "mlp")) for i in range(n)])
    return {"patch_embed": conv("pe", 3, d), "pos_embed": Leaf("pos", 1, 16, d), "block": row,
            "norm": norm("n", d), "head": dense("h", d, 10)}  # fmt: skip


def _mlp(r: Any) -> Module:
    d, n = r.choice([8, 12]), r.choice([2, 3, 4, 6])
    row = Row([{"Dense_0": dense(f"l{i}/0", d, d), "LayerNorm_0": norm(f"l{i}/n", d)} for i in range(n)])
    return {"embed": dense("e", 5, d), "layers": row, "out": dense("o", d, 3)}


def _cnn(r: Any) -> Module:
    n = r.choice([2, 3, 4])
    row = Row([{"conv": conv(f"s{i}", 8, 8), "bn": batch(f"s{i}/b", 8)} for i in range(n)])
    return {"stem": conv("stem", 3, 8), "stage": row, "pool": dense("p", 8, 6), "classifier": dense("c", 6, 4)}


def _experts(r: Any) -> Module:
    d, n = 8, r.choice([2, 3])
    rows = [
        {"router": dense(f"l{i}/r", d, 5), "expert": Row([dense(f"l{i}/e{j}", d, 16) for j in range(5)]),
         "merge": dense(f"l{i}/m", 16, d)} for i in range(n)
    ]  # fmt: skip
    return {"embed": {"embedding": Leaf("emb", 30, d)}, "layer": Row(rows), "head": dense("h", d, 7)}


def _gpt(r: Any) -> Module:
    d, n = r.choice([6, 10]), r.choice([2, 4, 8])
    rows = [
        {"ln_1": norm(f"l{i}/n1", d), "attn": {"c_attn": dense(f"l{i}/q", d, 3 * d), "c_proj": dense(f"l{i}/o", d, d)},
         "ln_2": norm(f"l{i}/n2", d), "mlp": {"c_fc": dense(f"l{i}/u", d, 4 * d), "c_proj": dense(f"l{i}/d", 4 * d, d)}}
        for i in range(n)
    ]  # fmt: skip
    return {"wte": {"embedding": Leaf("wte", 40, d)}, "wpe": {"embedding": Leaf("wpe", 20, d)}, "h": Row(rows),
            "ln_f": norm("nf", d), "lm_head": dense("h", d, 40)}  # fmt: skip


def _unet(r: Any) -> Module:
    n = r.choice([2, 3])
    down = Row([{"Conv_0": conv(f"d{i}", 8, 8), "LayerNorm_0": norm(f"d{i}n", 8)} for i in range(n)])
    up = Row([{"Conv_0": conv(f"u{i}", 16, 8), "LayerNorm_0": norm(f"u{i}n", 8)} for i in range(n)])
    return {"inp": conv("i", 3, 8), "down": down, "mid": conv("m", 8, 16), "up": up, "final": conv("f", 8, 3)}


def _translator(r: Any) -> Module:
    d, n = 8, r.choice([2, 3])
    encoder = [{"self_attn": _attention(f"e{i}", d), "norm": norm(f"e{i}n", d)} for i in range(n)]
    decoder = [{"self_attn": _attention(f"d{i}", d), "cross_attn": _attention(f"c{i}", d), "norm": norm(f"d{i}n", d)}
               for i in range(n)]  # fmt: skip
    return {"encoder": {"embed": {"embedding": Leaf("ee", 20, d)}, "layers": Row(encoder)},
            "decoder": {"embed": {"embedding": Leaf("de", 24, d)}, "layers": Row(decoder)},
            "proj": dense("p", d, 24)}  # fmt: skip


def _mixed(r: Any) -> Module:
    """Two kinds of layers that alternate under one count."""
    n = r.choice([4, 6])
    rows = [{"mix": dense(f"l{i}", 8, 12), "back": dense(f"k{i}", 12, 8)} if i % 2 == 0 else norm(f"l{i}", 8)
            for i in range(n)]  # fmt: skip
    return {"first": dense("f", 4, 8), "layers": Row(rows), "last": dense("o", 8, 2)}


TUNED = {"vit": _vit, "mlp": _mlp, "cnn": _cnn, "experts": _experts}
HELD_OUT = {"gpt": _gpt, "unet": _unet, "translator": _translator, "mixed": _mixed}
_NAMES = {
    "patch_embed": "embedding", "pos_embed": "pos_embedding", "attn": "attention", "mlp": "ffn", "fc1": "dense_in",
    "fc2": "dense_out", "LayerNorm_0": "ln1", "LayerNorm_1": "ln2", "head": "classifier", "out": "logits", "stem": "conv_stem",  # noqa: E501
    "bn": "BatchNorm_0", "conv": "Conv_0", "router": "gate", "Dense_0": "linear", "query": "q_proj", "key": "k_proj",
    "value": "v_proj", "pool": "hidden", "classifier": "head", "merge": "combine", "embed": "token_embed",
    "ln_1": "norm1", "ln_2": "norm2", "c_attn": "qkv", "c_proj": "proj", "c_fc": "fc", "wte": "tok", "wpe": "pos",
    "ln_f": "final_norm", "inp": "conv_in", "mid": "middle", "final": "conv_out", "Conv_0": "conv", "self_attn": "attention",  # noqa: E501
    "cross_attn": "encoder_attn", "norm": "LayerNorm_0", "proj": "logits", "mix": "w1", "back": "w2", "encoder": "enc",
    "decoder": "dec", "first": "Dense_0", "last": "Dense_1",
}  # fmt: skip
_ROWS = {"block": "encoderblock", "layers": "blocks", "stage": "stages", "layer": "block", "expert": "experts", "h": "layers",  # noqa: E501
         "down": "down_blocks", "up": "up_blocks"}  # fmt: skip


def _modules(model: Module) -> Iterator[Module]:
    """Every module, the outer ones first; the layers of a row one after the other."""
    yield model
    for child in model.values():
        for one in child.layers if isinstance(child, Row) else [child]:
            if isinstance(one, dict):
                yield from _modules(one)


def _rows(model: Module) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for module in _modules(model):
        for name, child in module.items():
            if isinstance(child, Row):
                found.setdefault(name, []).append(child)
    return found


def rename(model: Module, names: dict[str, str]) -> None:
    """Give the children of all modules other names, in place."""
    for module in list(_modules(model)):
        children = {names.get(name, name): child for name, child in module.items()}
        if len(children) == len(module):
            module.clear()
            module.update(children)


def _names_in(model: Module) -> list[str]:
    return sorted({name for module in _modules(model) for name, one in module.items() if isinstance(one, dict | Leaf)})


def _rename_modules(model: Module, r: Any) -> None:
    names = [name for name in _names_in(model) if name in _NAMES]
    chosen = r.sample(names, r.randint(1, len(names)))
    rename(model, {name: _NAMES[name] for name in chosen})


def _rename_rows(model: Module, r: Any) -> None:
    rename(model, {name: _ROWS[name] for name in _rows(model) if name in _ROWS})


def _layout(form: str, **more: Any) -> Callable[[Module, Any], None]:
    def edit(model: Module, r: Any) -> None:
        found = _rows(model)
        name = r.choice(sorted(found))
        for row in found[name]:
            if form != "stack" or len({_print(layer) for layer in row.layers}) == 1:
                row.form = form
                row.first, row.axis = more.get("first", 0), more.get("axis", 0)

    return edit


def _print(node: Any) -> Any:
    if isinstance(node, Leaf):
        return node.shape
    if isinstance(node, Row):
        return tuple(map(_print, node.layers))
    return tuple((name, _print(child)) for name, child in sorted(node.items()))


def _wrap(model: Module, r: Any) -> None:
    inner = dict(model)
    model.clear()
    model[r.choice(["model", "backbone", "net"])] = inner


def _head(model: Module, r: Any) -> None:
    holder = model if len(model) > 1 else next(iter(model.values()))
    name = list(holder)[-1]
    if isinstance(holder[name], dict) and "kernel" in holder[name]:
        shape = holder[name]["kernel"].shape
        wide = r.choice([17, 23])
        holder[name] = {"kernel": Leaf("new/k", *shape[:-1], wide, fresh=True), "bias": Leaf("new/b", wide, fresh=True)}


def _add(model: Module, r: Any) -> None:
    model[r.choice(["adapter", "extra", "aux_head"])] = dense("added", 13, r.choice([11, 8]), fresh=True)


def _drop(model: Module, r: Any) -> None:
    names = [name for name, child in model.items() if isinstance(child, dict)]
    if len(names) > 1:
        del model[r.choice(names)]


def _deeper(model: Module, r: Any) -> None:
    row = next(iter(_rows(model).values()))[0]
    new = copy.deepcopy(row.layers[-1])
    for module in _modules(new):
        for child in module.values():
            if isinstance(child, Leaf):
                child.fresh = True
    row.layers.insert(r.choice([len(row.layers), 0]), new)


EDITS: dict[str, Callable[[Module, Any], None]] = {
    "rename modules": _rename_modules,
    "rename rows": _rename_rows,
    "list": _layout("list"),
    "from 1": _layout("numbered", first=1),
    "stack": _layout("stack"),
    "stack axis 1": _layout("stack", axis=1),
    "wrap": _wrap,
    "head": _head,
    "add": _add,
    "drop": _drop,
    "deeper": _deeper,
}
LAYOUTS = ["list", "from 1", "stack", "stack axis 1"]


def _drawn(node: Any, of: Callable[[Leaf], Any], stats: bool | None) -> Any:
    """The tree of a model's arrays; with statistics alone, without them, or both (None)."""
    if isinstance(node, Leaf):
        return of(node) if stats is None or node.stat == stats else None
    found: dict[str, Any] = {}
    for name, child in node.items():
        if isinstance(child, Row):
            layers = [_drawn(layer, of, stats) for layer in child.layers]
            if layers[0] is None:
                continue
            if child.form == "stack":
                found[name] = _stacked(layers, child.axis)
            elif child.form == "list":
                found[name] = {str(number): layer for number, layer in enumerate(layers)}
            else:
                found |= {f"{name}{child.glue}{number}": layer for number, layer in enumerate(layers, child.first)}
        elif (drawn := _drawn(child, of, stats)) is not None:
            found[name] = drawn
    return found or None


def _stacked(nodes: list[Any], axis: int) -> Any:
    if isinstance(nodes[0], dict):
        return {name: _stacked([node[name] for node in nodes], axis) for name in nodes[0]}
    return np.stack(nodes, min(axis, nodes[0].ndim))


def state_of(model: Module, optimizer: str, form: str = "linen") -> dict[str, Any]:
    """The state of a model in training: linen's, NNX's (``nnx``), parameters alone (``params``) or flax.optim's."""
    value = lambda leaf: np.full(leaf.shape, np.nan, np.float32) if leaf.fresh else leaf.value()  # noqa: E731
    moment = lambda by: lambda leaf: value(leaf) * by  # noqa: E731
    params, stats = _drawn(model, value, False), _drawn(model, value, True)
    mu, nu = (_drawn(model, moment(by), False) for by in (2, 3))
    if form == "params":
        return params
    if form == "nnx":
        return _valued(_drawn(model, value, None))
    if form == "pre-optax":
        moments = _zipped(mu, nu)
        return {"optimizer": {"target": params, "state": {"step": np.int32(7), "param_states": moments}}}
    adam = {"count": np.int32(7), "mu": mu, "nu": nu}
    states = {"adam": {"0": adam, "1": {}}, "clip adam": {"0": {}, "1": {"0": adam, "1": {}}},
              "momentum": {"0": {"trace": _drawn(model, moment(5), False)}, "1": {}}}  # fmt: skip
    made = {"step": np.int32(7), "params": params, "opt_state": states[optimizer]}
    return {**made, "batch_stats": stats} if stats else made


def _valued(node: Any) -> Any:
    return {name: _valued(child) for name, child in node.items()} if isinstance(node, dict) else {"value": node}


def _zipped(mu: Any, nu: Any) -> Any:
    if isinstance(mu, dict):
        return {name: _zipped(mu[name], nu[name]) for name in mu}
    return {"grad_ema": mu, "grad_sq_ema": nu}


@dataclasses.dataclass(frozen=True)
class Pair:
    """An old and a new state.

    Attributes:
        title: family and edits.
        old: what is stored.
        new: what is asked for; its values are those that a right restore gives, NaN where the target's own stay.
    """

    title: str
    old: Any
    new: Any


def pair(families: dict[str, Any], seed: int) -> Pair:
    """The pair of a seed."""
    r = random_module.Random(seed)
    family = r.choice(sorted(families))
    old = families[family](r)
    if r.random() < 0.3:
        EDITS[r.choice(LAYOUTS)](old, r)
    new = copy.deepcopy(old)
    edits = r.sample(sorted(EDITS), r.choice([1, 1, 2, 3]))
    if r.random() < 0.4:
        edits = list(dict.fromkeys([r.choice(LAYOUTS), *edits]))
    for name in edits:
        EDITS[name](new, r)
    forms = r.choices(
        [("linen", "linen"), ("linen", "nnx"), ("linen", "params"), ("pre-optax", "linen")], [12, 1, 1, 1]
    )[0]
    if forms == ("linen", "linen") and r.random() < 0.15:
        old, new = new, old
        for model in (old, new):
            for module in _modules(model):
                for leaf in module.values():
                    if isinstance(leaf, Leaf):
                        leaf.fresh = False
        uids = {leaf.uid: leaf.shape for m in _modules(old) for leaf in _leaves(m)}
        for module in _modules(new):
            for leaf in _leaves(module):
                leaf.fresh = uids.get(leaf.uid) != leaf.shape
        edits.append("back")
    tx = r.choice(["adam", "adam", "clip adam", "momentum"])
    other = r.choice(["adam", "clip adam", "momentum"]) if r.random() < 0.2 else tx
    if forms[0] == "pre-optax":
        tx = other = "adam"
    if tx != other and "momentum" in (tx, other):
        edits.append("other optimizer")
    made = Pair(
        "+".join([family, *edits, "→".join(forms)]), state_of(old, tx, forms[0]), state_of(new, other, forms[1])
    )
    if tx != other and "momentum" in (tx, other) and "opt_state" in made.new:
        made = dataclasses.replace(made, new={**made.new, "opt_state": _fresh(made.new["opt_state"])})
    if forms[0] == "pre-optax" and "batch_stats" in made.new:  # which flax.optim's checkpoints keep elsewhere
        made = dataclasses.replace(made, new={**made.new, "batch_stats": _fresh(made.new["batch_stats"])})
    return made


def _leaves(module: Module) -> list[Leaf]:
    return [leaf for leaf in module.values() if isinstance(leaf, Leaf)]


def _fresh(node: Any) -> Any:
    return {n: _fresh(c) for n, c in node.items()} if isinstance(node, dict) else np.full(np.shape(node), np.nan, "f4")


def is_right(pair_: Pair, stored: Node, target: Node, suggestion: Suggestion | None) -> bool:
    """True where every leaf of the target gets its value, and keeps its own where the old state has none."""
    values = {path: leaf for path, leaf in iter_leaves(state_dict.describe(pair_.old)) if leaf is not None}
    tree = stored
    for rule in (step.rule for step in suggestion.steps) if suggestion else ():
        tree = rule.apply(tree, target)
    got = dict(iter_leaves(tree))
    for path, wanted in iter_leaves(state_dict.describe(pair_.new)):
        if isinstance(wanted, Branch) or wanted is None:
            continue
        if path not in got:
            return False
        new = np.isnan(wanted).all() if wanted.dtype.kind == "f" else False
        if new != (got[path] is Own.KEEP_TARGET) or (not new and not _equal(evaluated(got[path], values), wanted)):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    # A leaf that is partly new is never right: no rule fills a part of a stack.
    return np.shape(one) == np.shape(other) and bool(np.array_equal(one, other))


def made(families: dict[str, Any], seed: int) -> tuple[Pair, Node, Node]:
    """A pair and the trees that `suggest` takes."""
    one = pair(families, seed)
    return one, as_stored(one.old), state_dict.describe(one.new)
