"""Edits of models and their states; what the new state holds is what a right restore gives.

NaN: the target's own value stays. Infinity: what belongs there cannot be told, so that no certain proposal is right."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Module = dict[str, Any]
Edit = Callable[[Module, Any], None]


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


def _layers(model: Module) -> list[tuple[Module, str]]:
    return [(one, name) for one in modules(model) for name, child in one.items() if is_layer(child)]


_SYNONYMS = {
    "actor": "policy", "critic": "critics", "generator": "gen", "discriminator": "disc", "bert": "roberta",
    "embeddings": "embedding", "word_embeddings": "token_embed", "position_embeddings": "pos_embed", "layer": "layers",
    "self": "self_attn", "intermediate": "ffn_in", "pooler": "pool", "dense": "Dense_0", "LayerNorm": "LayerNorm_0",
    "conv_init": "stem_conv", "bn_init": "stem_bn", "block": "blocks", "SelfAttention": "self_attention",
    "DenseReluDense": "mlp", "layer_norm": "ln", "shared": "token_embedder", "q": "query", "k": "key", "v": "value",
    "o": "out", "self_attn": "attention", "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "embed_tokens": "tok_embeddings", "norm": "ln",
    "text_model": "text_encoder", "vision_model": "vision_encoder", "attn": "attention", "out": "out_proj",
    "conv_in": "input_conv", "time_embedding": "time_embed", "norm1": "GroupNorm_0", "conv1": "Conv_0",
    "norm2": "GroupNorm_1", "conv2": "Conv_1", "mid_block": "middle", "conv_out": "output_conv",
    "forward_lstm": "fwd_lstm", "backward_lstm": "bwd_lstm", "bridge": "bridge_dense", "lstm": "LSTMCell_0",
    "mixer": "ssm", "backbone": "trunk", "in_proj": "input_proj", "bottom_mlp": "dense_arch", "top_mlp": "over_arch",
    "node_encoder": "node_enc", "edge_encoder": "edge_enc", "edge_fn": "edge_mlp", "node_fn": "node_mlp",
    "token_mixing": "token_mlp", "channel_mixing": "channel_mlp", "pre_head_layer_norm": "pre_head_norm", "head": "logits",  # noqa: E501
    "encoder": "enc", "decoder": "dec", "codebook": "quantizer", "dwconv": "depthwise", "pwconv1": "expand",
    "pwconv2": "contract", "online": "online_net", "target": "target_net", "projector": "proj", "neck": "fpn",
    "class_embed": "cls_head", "bbox_embed": "bbox_head", "scale_net": "log_scale_net", "shift_net": "translate_net",
    "start_head": "start", "end_head": "end", "reader": "reader_mlp", "router": "gate", "final_norm": "norm_f",
    "token_embedder": "embed", "classifier": "head", "lm_head": "logits", "project": "proj",
}  # fmt: skip
_ROWS = {
    "BottleneckBlock_": "block_", "layer_": "layers_", "layers_": "block_", "up_": "upsample_", "down_": "downsample_",
    "down_blocks_": "down_", "up_blocks_": "up_", "resnets_": "res_", "processor_": "step_", "MixerBlock_": "blocks_",
    "conv_": "Conv_", "deconv_": "ConvTranspose_", "block": "stage", "stage_": "blocks_", "coupling_": "flows_",
    "lateral_": "in_", "Dense_": "fc", "table_": "embedding_",
}  # fmt: skip
_UNLIKE = {
    "pos_proj": "post_proj", "start_head": "head_2", "end_head": "tail_2", "class_embed": "embedding",
    "pre_norm": "prediction_norm", "value_head": "attn", "score": "mask_head", "pooler": "retriever", "codebook": "prior",  # noqa: E501
    "projector": "reward_head", "predictor": "segmenter", "bbox_embed": "keypoint_head", "text_projection": "audio_adapter",  # noqa: E501
    "to_rgb": "to_depth", "visual_projection": "video_proj", "bridge": "speaker", "router": "bias_net",
    "node_decoder": "energy_head", "time_embedding": "label_embed", "lm_head": "value_head", "mean": "gate",
    "log_std": "temperature", "classifier": "domain_adapter", "class_embedding": "mask_token", "gamma": "drop_rate",
    "query_embed": "anchor_table",
}  # fmt: skip


def rename_some(model: Module, r: Any, words: Mapping[str, str]) -> None:
    """Some of the names that have another word get it, wherever they are."""
    names = sorted({name for one in modules(model) for name in one} & words.keys())
    chosen = set(r.sample(names, r.randint(1, len(names)))) if names else set()
    for one in list(modules(model)):
        put(one, [(words[name] if name in chosen else name, child) for name, child in one.items()])


def rename_words(model: Module, r: Any) -> None:
    """Modules get other words of the field."""
    rename_some(model, r, _SYNONYMS)


def rename_rows(model: Module, r: Any) -> None:
    """Numbered layers get another stem."""
    found = {m[1] for one in modules(model) for name in one if (m := re.fullmatch(r"(.*?)\d+", name)) and m[1] in _ROWS}
    stem = r.choice(sorted(found)) if found else ""
    for one in list(modules(model)) if stem else ():
        put(one, [(re.sub(rf"^{stem}(\d+)$", rf"{_ROWS[stem]}\1", name), child) for name, child in one.items()])


def rename_any(model: Module, r: Any) -> None:
    """One module gets a name without meaning."""
    holders = [one for one in modules(model) if any(isinstance(c, dict) for c in one.values())]
    if not holders:
        return
    holder = r.choice(holders)
    name = r.choice([name for name, child in holder.items() if isinstance(child, dict)])
    other = r.choice(["thing", "module_7", "zeta", "Foo_0", "part_b"])
    put(holder, [(other if name == old else old, child) for old, child in holder.items()])


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


def _prints(node: Any) -> Any:
    return {n: _prints(c) for n, c in node.items()} if isinstance(node, dict) else node.shape


def stacked(nodes: list[Any], axis: int) -> Any:
    """Several trees as one with one more axis."""
    if isinstance(nodes[0], dict):
        return {name: stacked([node[name] for node in nodes], axis) for name in nodes[0]}
    return np.stack(nodes, min(axis, nodes[0].ndim))


def stack(model: Module, r: Any) -> None:
    """Numbered layers become one with one more axis; from a list, in place of the list."""
    axis = r.choice([0, 0, 0, 1])
    stems = {stem for _, stem, _ in numbered_rows(model)}
    chosen = r.choice(sorted(stems)) if stems else None
    for holder, stem, names in numbered_rows(model):
        layers = [holder[name] for name in names]
        if stem == chosen and all(_prints(layer) == _prints(layers[0]) for layer in layers):
            whole = stacked(layers, axis)
            rest = [(name, child) for name, child in holder.items() if name not in names]
            new = stem.rstrip("_") or ("" if not rest else "stack")
            put(holder, [*rest, *([(f"{new}", whole)] if new else whole.items())])


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
        rest = [(name, child) for name, child in holder.items() if name not in names]
        put(holder, [*rest, (stem.rstrip("_"), {str(n): holder[name] for n, name in enumerate(names)})])


def from_one(model: Module, r: Any) -> None:
    """Numbers begin at 1."""
    rows = numbered_rows(model)
    if rows:
        holder, stem, _ = r.choice(rows)
        shift = lambda name: re.sub(r"\d+$", lambda m: str(int(m[0]) + 1), name)  # noqa: E731
        put(holder, [(shift(n) if re.fullmatch(rf"{re.escape(stem)}\d+", n) else n, c) for n, c in holder.items()])


def two_levels(model: Module, r: Any) -> None:
    """A stack of 4 layers becomes one of 2 by 2."""
    for holder, _, names in numbered_rows(model):
        if len(names) == 4 and len({str(_prints(holder[name])) for name in names}) == 1:
            whole = mapped(lambda x: x.reshape(2, 2, *x.shape[1:]), stacked([holder[name] for name in names], 0))
            rest = [(name, child) for name, child in holder.items() if name not in names]
            put(holder, [*rest, ("layers", whole)])
            return


_QKV = [("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("gate_proj", "up_proj")]


def fuse(model: Module, r: Any) -> None:
    """Query, key and value become one projection."""
    into = r.choice(["qkv", "qkv_proj", "in_proj"])
    for one in list(modules(model)):
        for names in _QKV:
            if all(name in one and is_layer(one[name]) for name in names):
                whole = {n: np.concatenate([one[name][n] for name in names], -1) for n in one[names[0]]}
                new = into if len(names) == 3 else "gate_up_proj"
                put(one, [(new, whole), *((n, c) for n, c in one.items() if n not in names)])


def _resized(array: np.ndarray, axis: int, size: int, value: float) -> np.ndarray:
    shape = list(array.shape)
    shape[axis] = size
    return np.full(shape, value, np.float32)


_HEADS = ("head", "classifier", "logits", "score", "value_head", "fc", "class_embed")


def head(model: Module, r: Any) -> None:
    """The task has another number of classes."""
    names = [(one, name) for one, name in _layers(model) if name in _HEADS and "kernel" in one[name]]
    if names:
        one, name = r.choice(names)
        one[name] = {n: _resized(array, -1, 17, np.nan) for n, array in one[name].items()}


def vocabulary(model: Module, r: Any) -> None:
    """An embedding gets more rows."""
    tables = [layer for one in modules(model) for layer in one.values() if is_layer(layer) and "embedding" in layer]
    if tables := [table for table in tables if np.isfinite(table["embedding"]).all()]:
        table = r.choice(tables)
        table["embedding"] = _resized(table["embedding"], 0, table["embedding"].shape[0] + 5, np.inf)


def torch_names(model: Module, r: Any) -> None:
    """Kernels become torch's weights, which are transposed."""
    for one in list(modules(model)):
        if "kernel" in one and not isinstance(kernel := one["kernel"], dict) and kernel.ndim in (2, 4):
            turned = kernel.T if kernel.ndim == 2 else kernel.transpose(3, 2, 0, 1)
            put(one, [("weight", turned) if n == "kernel" else (n, c) for n, c in one.items()])


def transpose_one(model: Module, r: Any) -> None:
    """One kernel lies the other way round."""
    layers = [one[n] for one, n in _layers(model) if "kernel" in one[n] and one[n]["kernel"].ndim == 2
              and len(set(one[n]["kernel"].shape)) > 1]  # fmt: skip
    if layers:
        layer = r.choice(layers)
        layer["kernel"] = layer["kernel"].T


def split_heads(model: Module, r: Any) -> None:
    """The projections of attention get an axis of heads."""
    for one in list(modules(model)):
        for names in _QKV[:3]:
            for name in names:
                layer = one.get(name)
                if all(n in one for n in names) and is_layer(layer) and "kernel" in layer:
                    one[name] = {n: x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2) for n, x in layer.items()}


def unit_axes(model: Module, r: Any) -> None:
    """The scale of norms gets axes of length 1."""
    for one in list(modules(model)):
        if {"scale", "bias"} == one.keys() and not isinstance(one["scale"], dict) and one["scale"].ndim == 1:
            for name in one:
                one[name] = one[name].reshape(1, 1, 1, -1)


def copies(model: Module, r: Any) -> None:
    """A module gets a slow copy beside it."""
    names = [name for name, child in model.items() if isinstance(child, dict) and not is_layer(child)]
    if names:
        name = r.choice(names)
        model[r.choice([f"{name}_target", f"{name}_ema", f"ema_{name}"])] = unknown(model[name])


def big_table(model: Module, r: Any) -> None:
    """A table far larger than the rest is new."""
    model[r.choice(["memory_table", "retrieval"])] = {"embedding": np.full((97, 61), np.nan, np.float32)}


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


def replace_one(model: Module, r: Any, words: Mapping[str, str]) -> None:
    """A module with one of these names goes, and another one of the same shapes comes."""
    names = [(one, name) for one in modules(model) for name in one if name in words]
    if names:
        one, name = r.choice(names)
        put(one, [(words[n], fresh(c)) if n == name else (n, c) for n, c in one.items()])


def replace(model: Module, r: Any) -> None:
    """A module goes, and another one of the same shapes comes."""
    replace_one(model, r, _UNLIKE)


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
    layers = [one[n] for one, n in _layers(model) if "kernel" in one[n] and one[n]["kernel"].ndim == 2]
    if layers:
        layer = r.choice(layers)
        value = _lost(layer["kernel"])
        rows, columns = layer.pop("kernel").shape
        layer["left"] = np.full((rows, 2), value, np.float32)
        layer["right"] = np.full((2, columns), value, np.float32)


def packed(model: Module, r: Any) -> None:
    """Kernels are packed into fewer numbers."""
    for one in list(modules(model)):
        if "kernel" in one and not isinstance(one["kernel"], dict) and one["kernel"].ndim == 2:
            value = _lost(one["kernel"])
            rows, columns = one.pop("kernel").shape
            one["qweight"] = np.full((rows, (columns + 7) // 8), value, np.float32)
            one["scales"] = np.full((1, columns), value, np.float32)


def experts(model: Module, r: Any) -> None:
    """An MLP becomes several."""
    layers = [one[n] for one, n in _layers(model) if "kernel" in one[n] and one[n]["kernel"].ndim == 2]
    if layers:
        layer = r.choice(layers)
        layer["kernel"] = np.full((5, *layer["kernel"].shape), _lost(layer["kernel"]), np.float32)


def deeper(model: Module, r: Any) -> None:
    """A row gets another layer: the last one, or the first one."""
    rows = numbered_rows(model)
    if rows:
        holder, stem, names = r.choice(rows)
        layers = [holder[name] for name in names]
        layers.insert(r.choice([0, len(layers)]), fresh(copy.deepcopy(layers[-1])))
        first = int(re.findall(r"\d+", names[0])[-1])
        rest = [(name, child) for name, child in holder.items() if name not in names]
        put(holder, [*rest, *((f"{stem}{n}", layer) for n, layer in enumerate(layers, first))])


def shallower(model: Module, r: Any) -> None:
    """A row loses a layer."""
    rows = [row for row in numbered_rows(model) if len(row[2]) > 2]
    if rows:
        holder, stem, names = r.choice(rows)
        layers = [holder[name] for name in names]
        del layers[r.randrange(len(layers))]
        first = int(re.findall(r"\d+", names[0])[-1])
        rest = [(name, child) for name, child in holder.items() if name not in names]
        put(holder, [*rest, *((f"{stem}{n}", layer) for n, layer in enumerate(layers, first))])


def boxes(model: Module, r: Any) -> None:
    """Each array, or each of one name, is in a box."""
    only = r.choice([None, "kernel", "bias"])
    for one in list(modules(model)):
        for name, child in one.items():
            if not isinstance(child, dict) and only in (None, name):
                one[name] = {"value": child}


def nested(model: Module, r: Any) -> None:
    """Names with dots become levels."""
    for one in list(modules(model)):
        if any("." in name for name in one):
            found: Module = {}
            for name, child in one.items():
                *above, last = name.split(".")
                at = found
                for level in above:
                    at = at.setdefault(level, {})
                at[last] = child
            put(one, list(found.items()))


EDITS: dict[str, Edit] = {
    edit.__name__: edit for edit in (
        rename_words, rename_rows, rename_any, wrap, unwrap, stack, unlist, from_one, two_levels, fuse, head, vocabulary,  # noqa: E501
        torch_names, transpose_one, split_heads, unit_axes, copies, big_table, add, drop, replace, move_bias, factors,
        packed, experts, deeper, shallower, boxes, nested,
    )
}  # fmt: skip
