"""More edits of models, such as ports between code bases; see `model_edits` for what the new state holds."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np

from tests.random_cases.model_edits import (
    Edit,
    Module,
    fresh,
    is_layer,
    mapped,
    modules,
    numbered_rows,
    put,
    rename_some,
    replace_one,
    stacked,
    unknown,
)

_NEUTRAL = ["alpha", "bravo", "delta", "juno", "kappa", "lumen", "orbit", "pixel", "quartz", "tango", "umbra", "violet"]
_SYNONYMS = {
    "transformer": "decoder_stack", "wte": "token_embed", "wpe": "position_embed", "h": "blocks", "ln_f": "final_norm",
    "ln_1": "norm1", "ln_2": "norm2", "attn": "attention", "c_fc": "fc_in", "mlp": "feed_forward",
    "MultiHeadDotProductAttention_1": "attention", "MlpBlock_3": "mlp", "LayerNorm_0": "pre_norm", "encoder_norm": "norm",  # noqa: E501
    "Transformer": "encoder", "embedding": "patch_embed", "cls": "cls_token", "head": "classifier",
    "token_embedder": "shared_embedding", "relpos_bias": "relative_position_bias", "pre_mlp_layer_norm": "mlp_norm",
    "pre_attention_layer_norm": "attention_norm", "encoder_decoder_attention": "cross_attention", "wo": "w_out",
    "logits_dense": "lm_head", "coarse_mlp": "coarse", "fine_mlp": "fine", "sigma": "density", "rgb": "color",
    "temp": "temperature", "critic": "q_function", "wm": "world_model", "rssm": "dynamics", "rew": "reward", "enc": "encoder",  # noqa: E501
    "dec": "decoder", "con": "continue_head", "se": "squeeze_excite", "stem_conv": "stem", "head_conv": "top_conv",
    "expand_conv": "expansion", "project_conv": "projection", "self_attn": "SelfAttention_0", "fc1": "dense_in",
    "fc2": "dense_out", "embed_tokens": "token_embedding", "embed_positions": "position_embedding", "Embed_0": "embed",
    "Encoder_0": "trunk", "FeedForward_0": "mlp", "SelfAttention_0": "attn", "unembed": "to_logits", "final_ln": "ln_f",
    "stem": "conv_stem", "pool_proj": "projection", "fc": "classifier", "embedder": "token_embedder",
    "q_einsum": "query", "kv_einsum": "key_value", "attn_vec_einsum": "output", "gating_einsum": "gate_up", "linear": "down",  # noqa: E501
    "pre_attention_norm": "norm_attn", "pre_ffw_norm": "norm_mlp", "multihead_attn": "cross_attn", "linear1": "mlp_in",
    "linear2": "mlp_out", "class_head": "logits", "box_head": "bbox_mlp", "query_pos": "object_queries", "torso": "network",  # noqa: E501
    "core": "lstm", "policy_logits": "policy_head", "baseline": "value_head", "latents": "latent_array", "cross": "cross_block",  # noqa: E501
    "to_logits": "decoder_head", "quantize": "vector_quantizer", "prior": "gpt", "mid": "middle_block", "tok": "token_embed",  # noqa: E501
    "wav2vec2": "speech_model", "feature_extractor": "conv_frontend", "feature_projection": "input_projection",
    "att": "time_mixing", "ffn": "channel_mixing", "emb": "embedding", "ln_out": "output_norm", "receptance": "gate",
}  # fmt: skip
# A part that goes, and one of another purpose that comes, of the same shapes.
_OTHER = {
    "head": "mask_predictor", "classifier": "domain_classifier", "lm_head": "reward_head", "logits_dense": "value_head",
    "rgb": "normals", "temp": "lagrange", "actor": "explorer", "rew": "cost", "con": "discount", "policy_logits": "options",  # noqa: E501
    "baseline": "advantage", "class_head": "attribute_head", "query_pos": "anchors", "prior": "judge", "se": "gate_unit",  # noqa: E501
    "unembed": "probe", "cls": "distill_token", "latents": "memory", "fine_mlp": "background_mlp",
    "pool_proj": "audio_proj", "emb": "user_table", "wpe": "segment_embed", "embed_positions": "speaker_table",
}  # fmt: skip


def _kernels(model: Module) -> list[Module]:
    return [one for one in modules(model) if is_layer(one) and "kernel" in one]


def port(model: Module, r: Any) -> None:
    """Modules get the words of another code base."""
    rename_some(model, r, _SYNONYMS)


def camel(model: Module, r: Any) -> None:
    """Rows of snake case get names in camel case, or the other way round."""
    for one in list(modules(model)):
        found = []
        for name, child in one.items():
            match = re.fullmatch(r"([A-Za-z_]*?[A-Za-z])_?(\d+)", name)
            if match and isinstance(child, dict):
                stem = match[1]
                turned = "".join(w.capitalize() for w in stem.split("_")) if stem.islower() else _snake(stem)
                name = f"{turned}_{match[2]}"
            found.append((name, child))
        put(one, found)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


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
        rest = [(name, child) for name, child in holder.items() if name not in names]
        into = stem.rstrip("_") or "groups"
        put(holder, [*rest, (into, mapped(lambda x: x.reshape(2, -1, *x.shape[1:]), whole))])
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
        rest = [(name, child) for name, child in holder.items() if name not in names]
        put(holder, [*rest, (stem.rstrip("_") + "s", stacked([holder[name] for name in names], 0))])


def unstack(model: Module, r: Any) -> None:
    """A stack becomes a row, or a list, that begins at 0 or 1."""
    for one in list(modules(model)):
        for name, child in list(one.items()):
            sizes = {np.shape(x)[:1] for x in _leaves(child)} if isinstance(child, dict) else set()
            if name == "layers" and len(sizes) == 1 and not any(n.isdigit() for n in child) and len(_leaves(child)) > 2:
                first, count = r.choice([0, 0, 1]), sizes.pop()[0]
                layers = [mapped(lambda x, n=n: x[n], child) for n in range(count)]
                rest = [(n, c) for n, c in one.items() if n != name]
                as_list = r.random() < 0.4
                row = {str(n) if as_list else f"layer_{n + first}": layer for n, layer in enumerate(layers)}
                put(one, [*rest, *([(name, row)] if as_list else row.items())])
                return


def insert_middle(model: Module, r: Any) -> None:
    """A row gets another layer in its middle, and the later ones other numbers."""
    rows = [row for row in _rows(model) if len(row[2]) > 1]
    if rows:
        holder, stem, names = r.choice(rows)
        layers = [holder[name] for name in names]
        layers.insert(len(layers) // 2 or 1, fresh(copy.deepcopy(layers[0])))
        first = int(re.findall(r"\d+", names[0])[-1])
        rest = [(name, child) for name, child in holder.items() if name not in names]
        put(holder, [*rest, *((f"{stem}{n}", layer) for n, layer in enumerate(layers, first))])


def untie(model: Module, r: Any) -> None:
    """Logits that were made with the embedding get a kernel of their own, which may begin as a copy."""
    tables = [one["embedding"] for one in modules(model) if is_layer(one) and "embedding" in one]
    if tables and "untied_logits" not in model:
        model["untied_logits"] = {"kernel": np.full(tables[0].shape[::-1], np.inf, np.float32)}


def no_bias(model: Module, r: Any) -> None:
    """Layers of one name lose their bias."""
    names = sorted(
        {n for one in modules(model) for n, c in one.items() if is_layer(c) and {"kernel", "bias"} <= c.keys()}
    )
    name = r.choice(names) if names else ""
    for one in modules(model):
        if is_layer(one.get(name)) and len(one[name]) > 1:
            one[name].pop("bias", None)


def more_bias(model: Module, r: Any) -> None:
    """Layers of one name get a bias."""
    names = sorted({n for one in modules(model) for n, c in one.items() if is_layer(c) and c.keys() == {"kernel"}})
    name = r.choice(names) if names else ""
    for one in modules(model):
        if is_layer(one.get(name)) and one[name].keys() == {"kernel"}:
            one[name]["bias"] = np.full(one[name]["kernel"].shape[-1:], np.nan, np.float32)


def rms(model: Module, r: Any) -> None:
    """Norms lose their bias."""
    for one in modules(model):
        if {"scale", "bias"} == one.keys():
            del one["bias"]


def lora(model: Module, r: Any) -> None:
    """Low-rank updates beside the kernels of one name, or around them."""
    names = sorted({n for one in modules(model) for n, c in one.items() if is_layer(c) and "kernel" in c})
    name, around = (r.choice(names) if names else ""), r.random() < 0.5
    for one in list(modules(model)):
        layer = one.get(name)
        if is_layer(layer) and "kernel" in layer:
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
                put(one, [*((n, c) for n, c in one.items() if n not in names), (into, whole)])


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
                if kernel.ndim == 3:
                    kernel = (
                        kernel.reshape(-1, kernel.shape[-1]) if name == "out" else kernel.reshape(kernel.shape[0], -1)
                    )
                else:
                    kernel = (
                        kernel.reshape(2, -1, kernel.shape[1]) if name == "out" else kernel.reshape(len(kernel), 2, -1)
                    )
                bias = {} if "bias" not in one[name] else {"bias": one[name]["bias"]}
                if bias and name != "out":
                    bias["bias"] = bias["bias"].reshape(kernel.shape[1:])
                one[name] = {"kernel": kernel, **bias}


def other_purpose(model: Module, r: Any) -> None:
    """A part goes, and another one of the same shapes comes."""
    replace_one(model, r, _OTHER)


def second(model: Module, r: Any) -> None:
    """A module gets a sibling of the same shapes, and another name that means the same."""
    found = [
        (one, name) for one in modules(model) for name, c in one.items() if name in _SYNONYMS and isinstance(c, dict)
    ]
    if found:
        one, name = r.choice(found)
        child, other = one[name], r.choice([f"{name}_b", f"aux_{name}", f"second_{_SYNONYMS[name]}"])
        put(one, [(_SYNONYMS[name] if n == name else n, c) for n, c in one.items()] + [(other, fresh(child))])


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
    """Names with slashes become levels, without Haiku's ``~``."""
    for name in [name for name in model if "/" in name]:
        *above, last = [part for part in name.split("/") if part != "~"]
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
        model[r.choice(["slow_{}", "{}_momentum", "target_{}", "{}_old"]).format(name)] = unknown(model[name])


FIELD_EDITS: dict[str, Edit] = {edit.__name__: edit for edit in (
    port, camel, affix, neutral, group, stack_row, unstack, insert_middle, untie, no_bias, more_bias, rms, lora, key_value,  # noqa: E501
    dense_of_conv, merge_heads, other_purpose, second, wider, flatten, unflatten, to_flax, slow_copy)}  # fmt: skip
