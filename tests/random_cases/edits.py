"""Edits of models and their states; what the new state holds is what a right restore gives.

NaN: the target's own value stays. Infinity: what belongs there cannot be told, so that no certain proposal is right."""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np

from tests.random_cases.models import Module

Edit = Callable[[Module, Any], None]

_NEUTRAL = ["alpha", "bravo", "delta", "juno", "kappa", "lumen", "orbit", "pixel", "quartz", "tango", "umbra", "violet"]
_SYNONYMS = {
    "transformer": "decoder_stack", "wte": "token_embed", "wpe": "position_embed", "h": "blocks", "ln_f": "final_norm",
    "ln_1": "norm1", "ln_2": "norm2", "attn": "attention", "c_fc": "fc_in", "mlp": "feed_forward",
    "MultiHeadDotProductAttention_1": "attention", "MlpBlock_3": "mlp", "LayerNorm_0": "pre_norm",
    "encoder_norm": "norm", "Transformer": "encoder", "embedding": "patch_embed", "cls": "cls_token",
    "head": "classifier", "token_embedder": "shared_embedding", "relpos_bias": "relative_position_bias",
    "pre_mlp_layer_norm": "mlp_norm", "pre_attention_layer_norm": "attention_norm",
    "encoder_decoder_attention": "cross_attention", "wo": "w_out", "logits_dense": "lm_head", "coarse_mlp": "coarse",
    "fine_mlp": "fine", "sigma": "density", "rgb": "color", "temp": "temperature", "critic": "q_function",
    "wm": "world_model", "rssm": "dynamics", "rew": "reward", "enc": "encoder", "dec": "decoder",
    "con": "continue_head", "se": "squeeze_excite", "stem_conv": "stem", "head_conv": "top_conv",
    "expand_conv": "expansion", "project_conv": "projection", "self_attn": "SelfAttention_0", "fc1": "dense_in",
    "fc2": "dense_out", "embed_tokens": "token_embedding", "embed_positions": "position_embedding", "Embed_0": "embed",
    "Encoder_0": "trunk", "FeedForward_0": "mlp", "SelfAttention_0": "attn", "unembed": "to_logits", "final_ln": "ln_f",
    "stem": "conv_stem", "pool_proj": "projection", "fc": "classifier", "core": "lstm", "to_logits": "decoder_head",
}  # fmt: skip
# A part that goes, and one of another purpose that comes, of the same shapes.
_OTHER = {
    "head": "mask_predictor", "classifier": "domain_classifier", "lm_head": "reward_head", "logits_dense": "value_head",
    "rgb": "normals", "temp": "lagrange", "actor": "explorer", "rew": "cost", "con": "discount", "se": "gate_unit",
    "unembed": "probe", "cls": "distill_token", "fine_mlp": "background_mlp", "pool_proj": "audio_proj",
    "wpe": "segment_embed", "embed_positions": "speaker_table",
}  # fmt: skip
_ROWS = {"layer_": "layers_", "layers_": "block_", "conv_": "Conv_", "Dense_": "fc"}
_QKV = [("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v")]


def modules(model: Module) -> Iterator[Module]:
    """Every module, the outer ones first."""
    yield model
    for child in list(model.values()):
        if isinstance(child, dict):
            yield from modules(child)


def mapped(function: Callable[[np.ndarray], Any], node: Any) -> Any:
    """A tree with each array replaced."""
    return {n: mapped(function, c) for n, c in node.items()} if isinstance(node, dict) else function(node)


def fresh(node: Any) -> Any:
    """A tree of which nothing is stored."""
    return mapped(lambda array: np.full(array.shape, np.nan, np.float32), node)


def unknown(node: Any) -> Any:
    """A tree of which nothing certain can be said."""
    return mapped(lambda array: np.full(array.shape, np.inf, np.float32), node)


def is_layer(node: Any) -> bool:
    """A module that holds arrays alone."""
    return isinstance(node, dict) and bool(node) and not any(isinstance(one, dict) for one in node.values())


def put(model: Module, items: list[tuple[str, Any]]) -> None:
    """Give a module other children, unless two of them have one name."""
    if len(dict(items)) == len(items):
        model.clear()
        model.update(items)


def replaced(holder: Module, names: Collection[str], items: Iterable[tuple[str, Any]]) -> None:
    """Put others in the place of some children of a module, behind those that stay."""
    put(holder, [*((name, child) for name, child in holder.items() if name not in names), *items])


def rename_rows(model: Module, r: Any) -> None:
    """Numbered layers get another stem."""
    found = {m[1] for one in modules(model) for name in one if (m := re.fullmatch(r"(.*?)\d+", name)) and m[1] in _ROWS}
    stem = r.choice(sorted(found)) if found else ""
    for one in list(modules(model)) if stem else ():
        put(one, [(re.sub(rf"^{stem}(\d+)$", rf"{_ROWS[stem]}\1", name), child) for name, child in one.items()])


def wrap(model: Module, r: Any) -> None:
    """One more level around all, or around one module."""
    holder = r.choice([model, *(one for one in modules(model) if not is_layer(one))])
    put(holder, [(r.choice(["net", "core", "inner_model"]), dict(holder))])


def unwrap(model: Module, r: Any) -> None:
    """One level less."""
    for one in list(modules(model)):
        if len(one) == 1 and isinstance(only := next(iter(one.values())), dict) and not is_layer(only):
            put(one, list(only.items()))
            return


def numbered_rows(model: Module) -> list[tuple[Module, str, list[str]]]:
    """Holders of numbered layers, the text before the number, and the names."""
    found = []
    for one in modules(model):
        stems: dict[str, list[str]] = {}
        for name, child in one.items():
            if isinstance(child, dict) and (match := re.fullmatch(r"(.*?)(\d+)", name)):
                stems.setdefault(match[1], []).append(name)
        found += [(one, stem, sorted(names, key=lambda n: int(re.findall(r"\d+", n)[-1])))
                  for stem, names in stems.items() if len(names) > 1]  # fmt: skip
    return found


def stacked(nodes: list[Any], axis: int) -> Any:
    """Several trees as one with one more axis."""
    if isinstance(nodes[0], dict):
        return {name: stacked([node[name] for node in nodes], axis) for name in nodes[0]}
    return np.stack(nodes, min(axis, nodes[0].ndim))


def unlist(model: Module, r: Any) -> None:
    """``layers/0`` becomes ``layers_0``, and the other way round."""
    rows = numbered_rows(model)
    for holder, stem, names in rows:
        if stem == "" and len(names) == len(holder):
            for above in list(modules(model)):
                for name, child in list(above.items()):
                    if child is holder:
                        put(above, [x for old, c in above.items() for x in (
                            [(f"{name}_{n}", layer) for n, layer in holder.items()] if old == name else [(old, c)])])  # fmt: skip  # noqa: E501
            return
    if rows:
        holder, stem, names = r.choice(rows)
        replaced(holder, names, [(stem.rstrip("_"), {str(n): holder[name] for n, name in enumerate(names)})])


def from_one(model: Module, r: Any) -> None:
    """Numbers begin at 1."""
    rows = numbered_rows(model)
    if rows:
        holder, stem, _ = r.choice(rows)
        shift = lambda name: re.sub(r"\d+$", lambda m: str(int(m[0]) + 1), name)  # noqa: E731
        put(holder, [(shift(n) if re.fullmatch(rf"{re.escape(stem)}\d+", n) else n, c) for n, c in holder.items()])


def fuse(model: Module, r: Any) -> None:
    """Query, key and value become one projection."""
    into = r.choice(["qkv", "qkv_proj", "in_proj"])
    for one in list(modules(model)):
        for names in _QKV:
            if all(name in one and is_layer(one[name]) for name in names):
                whole = {n: np.concatenate([one[name][n] for name in names], -1) for n in one[names[0]]}
                put(one, [(into, whole), *((n, c) for n, c in one.items() if n not in names)])


def vocabulary(model: Module, r: Any) -> None:
    """An embedding gets more rows."""
    tables = [layer for one in modules(model) for layer in one.values() if is_layer(layer) and "embedding" in layer]
    if tables := [table for table in tables if np.isfinite(table["embedding"]).all()]:
        table = r.choice(tables)
        rows, *rest = table["embedding"].shape
        table["embedding"] = np.full((rows + 5, *rest), np.inf, np.float32)


def torch_names(model: Module, r: Any) -> None:
    """Kernels become torch's weights, which are transposed."""
    for one in list(modules(model)):
        if "kernel" in one and not isinstance(kernel := one["kernel"], dict) and kernel.ndim in (2, 4):
            turned = kernel.T if kernel.ndim == 2 else kernel.transpose(3, 2, 0, 1)
            put(one, [("weight", turned) if n == "kernel" else (n, c) for n, c in one.items()])


def transpose_one(model: Module, r: Any) -> None:
    """One kernel lies the other way round."""
    layers = [one for one in _kernels(model) if one["kernel"].ndim == 2 and len(set(one["kernel"].shape)) > 1]
    if layers:
        layer = r.choice(layers)
        layer["kernel"] = layer["kernel"].T


def unit_axes(model: Module, r: Any) -> None:
    """The scale of norms gets axes of length 1."""
    for one in list(modules(model)):
        if {"scale", "bias"} == one.keys() and not isinstance(one["scale"], dict) and one["scale"].ndim == 1:
            for name in one:
                one[name] = one[name].reshape(1, 1, 1, -1)


def add(model: Module, r: Any) -> None:
    """Something small is new."""
    holder = r.choice([model, *(one for one in modules(model) if not is_layer(one))])
    layer = {"kernel": np.full((13, 11), np.nan, np.float32), "bias": np.full(11, np.nan, np.float32)}
    holder[r.choice(["adapter", "extra", "aux_head", "side_net"])] = layer


def drop(model: Module, r: Any) -> None:
    """A module goes."""
    holders = [one for one in modules(model) if sum(isinstance(c, dict) for c in one.values()) > 1]
    if holders:
        holder = r.choice(holders)
        del holder[r.choice([name for name, child in holder.items() if isinstance(child, dict)])]


def move_bias(model: Module, r: Any) -> None:
    """Of two layers of one shape the other one has the bias, and both are numbered by another name."""
    for holder, _, names in numbered_rows(model):
        layers = [holder[name] for name in names[:2]]
        if (
            all(is_layer(x) and "kernel" in x for x in layers)
            and layers[0]["kernel"].shape == layers[1]["kernel"].shape
        ):
            first = {"kernel": layers[0]["kernel"]}
            second = {"kernel": layers[1]["kernel"], "bias": np.full(layers[0]["kernel"].shape[-1], np.nan, np.float32)}
            put(holder, [(f"fc{names.index(n)}", (first, second)[names.index(n)]) if n in names[:2] else (n, c)
                          for n, c in holder.items()])  # fmt: skip
            return


def _lost(array: np.ndarray) -> float:
    """What becomes of an array that cannot be computed from the stored ones: new if it was new before."""
    return np.nan if np.isnan(array).all() else np.inf


def factors(model: Module, r: Any) -> None:
    """A kernel becomes a product of two."""
    layers = [one for one in _kernels(model) if one["kernel"].ndim == 2]
    if layers:
        layer = r.choice(layers)
        value = _lost(layer["kernel"])
        rows, columns = layer.pop("kernel").shape
        layer["left"] = np.full((rows, 2), value, np.float32)
        layer["right"] = np.full((2, columns), value, np.float32)


def _renumbered(row: tuple[Module, str, list[str]], change: Callable[[list[Any]], Any]) -> None:
    """Change the list of a row's layers, which are numbered on from the first one's number."""
    holder, stem, names = row
    layers = [holder[name] for name in names]
    change(layers)
    first = int(re.findall(r"\d+", names[0])[-1])
    replaced(holder, names, [(f"{stem}{n}", layer) for n, layer in enumerate(layers, first)])


def deeper(model: Module, r: Any) -> None:
    """A row gets another layer: the first one, the middle one or the last one; the later ones get other numbers."""
    if rows := numbered_rows(model):
        _renumbered(
            r.choice(rows),
            lambda layers: layers.insert(
                r.choice([0, len(layers) // 2, len(layers)]), fresh(copy.deepcopy(layers[-1]))
            ),
        )


def shallower(model: Module, r: Any) -> None:
    """A row loses a layer."""
    if rows := [row for row in numbered_rows(model) if len(row[2]) > 2]:
        _renumbered(r.choice(rows), lambda layers: layers.pop(r.randrange(len(layers))))


def boxes(model: Module, r: Any) -> None:
    """Each array, or each of one name, is in a box."""
    only = r.choice([None, "kernel", "bias"])
    for one in list(modules(model)):
        for name, child in one.items():
            if not isinstance(child, dict) and only in (None, name):
                one[name] = {"value": child}


def _kernels(model: Module) -> list[Module]:
    return [one for one in modules(model) if is_layer(one) and "kernel" in one]


def port(model: Module, r: Any) -> None:
    """Modules get the words of another code base."""
    names = sorted({name for one in modules(model) for name in one} & _SYNONYMS.keys())
    chosen = set(r.sample(names, r.randint(1, len(names)))) if names else set()
    for one in list(modules(model)):
        put(one, [(_SYNONYMS[name] if name in chosen else name, child) for name, child in one.items()])


def affix(model: Module, r: Any) -> None:
    """All modules of one level get a word more."""
    holders = [one for one in modules(model) if sum(isinstance(c, dict) for c in one.values()) > 1]
    form = r.choice(["{}_module", "my_{}", "{}_net"])
    if holders:
        holder = r.choice(holders)
        put(
            holder,
            [(form.format(n) if isinstance(c, dict) and not n[-1:].isdigit() else n, c) for n, c in holder.items()],
        )


def neutral(model: Module, r: Any) -> None:
    """Two modules get names without meaning."""
    words = r.sample(_NEUTRAL, 2)
    for word in words:
        holders = [one for one in modules(model) if any(isinstance(c, dict) for c in one.values())]
        holder = r.choice(holders)
        name = r.choice([n for n, c in holder.items() if isinstance(c, dict)])
        put(holder, [(word if n == name else n, c) for n, c in holder.items()])


def _rows(model: Module) -> list[tuple[Module, str, list[str]]]:
    """Rows of layers with arrays of the same shapes."""
    return [
        (holder, stem, names)
        for holder, stem, names in numbered_rows(model)
        if all(mapped(np.shape, holder[name]) == mapped(np.shape, holder[names[0]]) for name in names)
    ]


def group(model: Module, r: Any) -> None:
    """Rows of layers, or a stack, become groups of layers with two axes."""
    rows = [row for row in _rows(model) if len(row[2]) in (4, 6)]
    for holder, stem, names in rows[:1]:
        whole = stacked([holder[name] for name in names], 0)
        into = stem.rstrip("_") or "groups"
        replaced(holder, names, [(into, mapped(lambda x: x.reshape(2, -1, *x.shape[1:]), whole))])
    if not rows and isinstance(model.get("layers"), dict):
        sizes = {np.shape(x)[0] for x in _leaves(model["layers"])}
        if sizes & {4, 6} and len(sizes) == 1:
            model["layers"] = mapped(lambda x: x.reshape(2, -1, *x.shape[1:]), model["layers"])


def _leaves(node: Any) -> list[np.ndarray]:
    return [x for c in node.values() for x in _leaves(c)] if isinstance(node, dict) else [node]


def stack_row(model: Module, r: Any) -> None:
    """A row becomes a stack, from whichever number it begins; its name keeps the text."""
    rows = [row for row in _rows(model) if row[1]]
    if rows:
        holder, stem, names = r.choice(rows)
        replaced(holder, names, [(stem.rstrip("_") + "s", stacked([holder[name] for name in names], 0))])


def unstack(model: Module, r: Any) -> None:
    """A stack becomes a row, or a list, that begins at 0 or 1."""
    for one in list(modules(model)):
        for name, child in list(one.items()):
            sizes = {np.shape(x)[:1] for x in _leaves(child)} if isinstance(child, dict) else set()
            if name == "layers" and len(sizes) == 1 and not any(n.isdigit() for n in child) and len(_leaves(child)) > 2:
                first, count = r.choice([0, 0, 1]), sizes.pop()[0]
                layers = [mapped(lambda x, n=n: x[n], child) for n in range(count)]
                as_list = r.random() < 0.4
                row = {str(n) if as_list else f"layer_{n + first}": layer for n, layer in enumerate(layers)}
                replaced(one, [name], [(name, row)] if as_list else row.items())
                return


def untie(model: Module, r: Any) -> None:
    """Logits that were made with the embedding get a kernel of their own, which may begin as a copy."""
    tables = [one["embedding"] for one in modules(model) if is_layer(one) and "embedding" in one]
    if tables and "untied_logits" not in model:
        model["untied_logits"] = {"kernel": np.full(tables[0].shape[::-1], np.inf, np.float32)}


def _of_one_name(model: Module, r: Any, suits: Callable[[Module], bool]) -> list[tuple[Module, str]]:
    """All layers of a name that one that suits has: the modules that hold them, and the name."""
    names = sorted({n for one in modules(model) for n, c in one.items() if is_layer(c) and suits(c)})
    name = r.choice(names) if names else ""
    return [(one, name) for one in modules(model) if is_layer(one.get(name))]


def no_bias(model: Module, r: Any) -> None:
    """Layers of one name lose their bias."""
    for one, name in _of_one_name(model, r, lambda layer: {"kernel", "bias"} <= layer.keys()):
        if len(one[name]) > 1:
            one[name].pop("bias", None)


def more_bias(model: Module, r: Any) -> None:
    """Layers of one name get a bias."""
    for one, name in _of_one_name(model, r, lambda layer: layer.keys() == {"kernel"}):
        if one[name].keys() == {"kernel"}:
            one[name]["bias"] = np.full(one[name]["kernel"].shape[-1:], np.nan, np.float32)


def rms(model: Module, r: Any) -> None:
    """Norms lose their bias."""
    for one in modules(model):
        if {"scale", "bias"} == one.keys():
            del one["bias"]


def lora(model: Module, r: Any) -> None:
    """Low-rank updates beside the kernels of one name, or around them."""
    layers, around = _of_one_name(model, r, lambda layer: "kernel" in layer), r.random() < 0.5
    for one, name in layers:
        if "kernel" in (layer := one[name]):
            kernel = layer["kernel"]
            new = {"lora_a": np.full((kernel.shape[0], 2), np.nan, np.float32),
                   "lora_b": np.full((2, kernel.shape[-1]), np.nan, np.float32)}  # fmt: skip
            one[name] = {"base": layer, **new} if around else {**layer, **new}


def key_value(model: Module, r: Any) -> None:
    """Keys and values become one array with an axis of two."""
    for one in list(modules(model)):
        for names in (("key", "value"), ("k_proj", "v_proj"), ("wi_0", "wi_1")):
            layers = [one.get(name) for name in names]
            if all(map(is_layer, layers)) and mapped(np.shape, layers[0]) == mapped(np.shape, layers[1]):
                whole = stacked(layers, 0)
                into = "kv" if names[0] != "wi_0" else "wi"
                replaced(one, names, [(into, whole)])


def dense_of_conv(model: Module, r: Any) -> None:
    """Convolutions of 1 by 1 become dense layers, or dense layers become such convolutions."""
    convs = [layer for layer in _kernels(model) if layer["kernel"].shape[:2] == (1, 1) and layer["kernel"].ndim == 4]
    for layer in convs:
        layer["kernel"] = layer["kernel"].reshape(layer["kernel"].shape[2:])
    layers = [layer for layer in _kernels(model) if layer["kernel"].ndim == 2] if not convs else []
    if layers:
        layer = r.choice(layers)
        layer["kernel"] = layer["kernel"].reshape(1, 1, *layer["kernel"].shape)


def merge_heads(model: Module, r: Any) -> None:
    """Attention loses its axis of heads, or gets one."""
    for one in list(modules(model)):
        if {"query", "key", "value"} <= one.keys() and all(is_layer(one[n]) for n in ("query", "key", "value")):
            for name in [n for n in ("query", "key", "value", "out") if is_layer(one.get(n))]:
                kernel = one[name]["kernel"]
                heads = (-1,) if kernel.ndim == 3 else (2, -1)
                kernel = (
                    kernel.reshape(*heads, kernel.shape[-1]) if name == "out" else kernel.reshape(len(kernel), *heads)
                )
                bias = {} if "bias" not in one[name] else {"bias": one[name]["bias"]}
                if bias and name != "out":
                    bias["bias"] = bias["bias"].reshape(kernel.shape[1:])
                one[name] = {"kernel": kernel, **bias}


def other_purpose(model: Module, r: Any) -> None:
    """A part goes, and another one of the same shapes comes."""
    names = [(one, name) for one in modules(model) for name in one if name in _OTHER]
    if names:
        one, name = r.choice(names)
        put(one, [(_OTHER[n], fresh(c)) if n == name else (n, c) for n, c in one.items()])


def wider(model: Module, r: Any) -> None:
    """A layer that is no head gets more outputs, perhaps with the first ones as they were."""
    heads = re.compile(r".*(out|head|logits|dense|fc|classifier|sigma|rgb)", re.IGNORECASE)
    layers = [
        c for one in modules(model) for n, c in one.items() if is_layer(c) and "kernel" in c and not heads.match(n)
    ]
    layers = [layer for layer in layers if layer["kernel"].ndim == 2 and np.isfinite(layer["kernel"]).all()]
    if layers:
        layer = r.choice(layers)
        rows, columns = layer["kernel"].shape
        layer["kernel"] = np.full((rows, columns + 3), np.inf, np.float32)
        if "bias" in layer:
            layer["bias"] = np.full(columns + 3, np.inf, np.float32)


def flatten(model: Module, r: Any) -> None:
    """Levels become names with slashes or dots, down to the layers or to the arrays."""
    separator, to_arrays = r.choice(["/", "."]), r.random() < 0.5
    found: Module = {}

    def visit(node: Module, at: tuple[str, ...]) -> None:
        for name, child in node.items():
            if isinstance(child, dict) and (to_arrays or not is_layer(child)):
                visit(child, (*at, name))
            else:
                found[separator.join((*at, name))] = child

    visit(model, ())
    put(model, list(found.items()))


def unflatten(model: Module, r: Any) -> None:
    """Names with slashes or dots become levels, without Haiku's ``~``."""
    for name in [name for name in model if "/" in name or "." in name]:
        *above, last = [part for part in re.split("[/.]", name) if part != "~"]
        at = model
        for level in above:
            at = at.setdefault(level, {})
        at[last] = model.pop(name)


def to_flax(model: Module, r: Any) -> None:
    """Arrays get Flax's names instead of Haiku's."""
    for one in list(modules(model)):
        if is_layer(one):
            names = {"w": "kernel", "b": "bias", "weights": "kernel", "offset": "bias"}
            put(one, [(names.get(n, n), c) for n, c in one.items()])


def slow_copy(model: Module, r: Any) -> None:
    """A module gets a copy beside it, of which nothing is stored."""
    names = [name for name, child in model.items() if isinstance(child, dict) and not is_layer(child)]
    if names:
        name = r.choice(names)
        model.setdefault(r.choice(["slow_{}", "{}_momentum", "target_{}", "{}_old"]).format(name), unknown(model[name]))


EDITS: dict[str, Edit] = {
    edit.__name__: edit for edit in (
        rename_rows, wrap, unwrap, unlist, from_one, fuse, vocabulary, torch_names, transpose_one, unit_axes,
        add, drop, move_bias, factors, deeper, shallower, boxes, port, affix, neutral, group, stack_row,
        unstack, untie, no_bias, more_bias, rms, lora, key_value, dense_of_conv, merge_heads, other_purpose,
        wider, flatten, unflatten, to_flax, slow_copy,
    )
}  # fmt: skip
