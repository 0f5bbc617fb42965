"""Families of models as the field names them: nested dicts of arrays whose every value occurs once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

Module = dict[str, Any]


class Arrays:
    """Maker of arrays with values of their own."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def __call__(self, *shape: int) -> np.ndarray:
        """Return an array whose values no other one has."""
        size = int(np.prod(shape))
        start = next(self._next)
        for _ in range(size):
            next(self._next)
        return (np.arange(size, dtype=np.float32) + start).reshape(shape)

    def dense(self, rows: int, columns: int, *, bias: bool = True) -> Module:
        """Return a dense layer."""
        return {"kernel": self(rows, columns), **({"bias": self(columns)} if bias else {})}

    def norm(self, width: int) -> Module:
        """Return a layer norm."""
        return {"scale": self(width), "bias": self(width)}

    def conv(self, size: int, rows: int, columns: int) -> Module:
        """Return a convolution."""
        return {"kernel": self(size, size, rows, columns), "bias": self(columns)}

    def embed(self, rows: int, width: int) -> Module:
        """Return an embedding."""
        return {"embedding": self(rows, width)}


def agent(a: Arrays, r: Any) -> Module:
    """An actor with two critics and their slow copies."""
    d = r.choice([6, 8])

    def tower(outputs: int, inputs: int = 5) -> Module:
        return {"Dense_0": a.dense(inputs, d), "Dense_1": a.dense(d, d), "Dense_2": a.dense(d, outputs)}

    found = {"actor": {**tower(4), "log_std": a(2)}, "critic": {"q1": tower(1, 7), "q2": tower(1, 7)}}
    if r.random() < 0.5:
        found["target_critic"] = {"q1": tower(1, 7), "q2": tower(1, 7)}
    return {**found, "log_alpha": a(1)}


def gan(a: Arrays, r: Any) -> Module:
    """A generator and a discriminator."""
    generator = {"project": a.dense(4, 9)} | {f"up_{n}": a.conv(3, 4, 4) for n in range(r.choice([2, 3]))}
    return {
        "generator": {**generator, "to_rgb": a.conv(1, 4, 3)},
        "discriminator": {"from_rgb": a.conv(1, 3, 4), **{f"down_{n}": a.conv(3, 4, 4) for n in range(2)},
                          "score": a.dense(4, 1)},
    }  # fmt: skip


def bert(a: Arrays, r: Any) -> Module:
    """BERT as Hugging Face's Flax port names it."""
    d, n = r.choice([4, 6]), r.choice([2, 3])

    def layer() -> Module:
        return {
            "attention": {
                "self": {name: a.dense(d, d) for name in ("query", "key", "value")},
                "output": {"dense": a.dense(d, d), "LayerNorm": a.norm(d)},
            },
            "intermediate": {"dense": a.dense(d, 3 * d)},
            "output": {"dense": a.dense(3 * d, d), "LayerNorm": a.norm(d)},
        }

    return {"bert": {
        "embeddings": {"word_embeddings": a.embed(11, d), "position_embeddings": a.embed(9, d),
                       "token_type_embeddings": a.embed(2, d), "LayerNorm": a.norm(d)},
        "encoder": {"layer": {str(number): layer() for number in range(n)}},
        "pooler": {"dense": a.dense(d, d)},
    }, "classifier": a.dense(d, 5)}  # fmt: skip


def resnet(a: Arrays, r: Any) -> Module:
    """A residual network with bottlenecks, with batch statistics beside each norm."""

    def batch(width: int) -> Module:
        return {**a.norm(width), "mean": a(width), "var": a(width)}

    blocks: Module = {}
    for number in range(r.choice([2, 3])):
        block = {"Conv_0": a.conv(1, 6, 4), "BatchNorm_0": batch(4), "Conv_1": a.conv(3, 4, 4), "BatchNorm_1": batch(4)}
        blocks[f"BottleneckBlock_{number}"] = {**block, "Conv_2": a.conv(1, 4, 6), "BatchNorm_2": batch(6)}
    return {"conv_init": a.conv(7, 3, 6), "bn_init": batch(6), **blocks, "Dense_0": a.dense(6, 10)}


def t5(a: Arrays, r: Any) -> Module:
    """An encoder and a decoder of T5."""
    d = r.choice([4, 6])

    def block(parts: tuple[str, ...]) -> Module:
        layers: Module = {}
        for number, part in enumerate(parts):
            inner = (
                {name: a.dense(d, d, bias=False) for name in "qkvo"}
                if part != "DenseReluDense"
                else {"wi": a.dense(d, 2 * d, bias=False), "wo": a.dense(2 * d, d, bias=False)}
            )
            layers[str(number)] = {part: inner, "layer_norm": {"weight": a(d)}}
        return {"layer": layers}

    n = r.choice([2, 3])
    encoder = {str(i): block(("SelfAttention", "DenseReluDense")) for i in range(n)}
    decoder = {str(i): block(("SelfAttention", "EncDecAttention", "DenseReluDense")) for i in range(n)}
    return {
        "shared": a.embed(13, d),
        "encoder": {"block": encoder, "final_layer_norm": {"weight": a(d)}},
        "decoder": {"block": decoder, "final_layer_norm": {"weight": a(d)}},
    }


def llama(a: Arrays, r: Any) -> Module:
    """A decoder with gated layers."""
    d, n = r.choice([4, 6]), r.choice([2, 3, 4])

    def layer() -> Module:
        attention = {name: a.dense(d, d, bias=False) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        gated = {"gate_proj": a.dense(d, 3 * d, bias=False), "up_proj": a.dense(d, 3 * d, bias=False),
                 "down_proj": a.dense(3 * d, d, bias=False)}  # fmt: skip
        return {"self_attn": attention, "mlp": gated, "input_layernorm": {"weight": a(d)},
                "post_attention_layernorm": {"weight": a(d)}}  # fmt: skip

    return {
        "model": {
            "embed_tokens": a.embed(17, d),
            "layers": {str(number): layer() for number in range(n)},
            "norm": {"weight": a(d)},
        },
        "lm_head": a.dense(d, 17, bias=False),
    }


def clip(a: Arrays, r: Any) -> Module:
    """Two towers and their projections."""
    d = 4

    def tower(first: Module) -> Module:
        layers = {f"layers_{n}": {"attn": {x: a.dense(d, d) for x in ("q", "k", "v", "out")}, "ln": a.norm(d)}
                  for n in range(r.choice([2, 3]))}  # fmt: skip
        return {**first, **layers, "final_ln": a.norm(d)}

    return {"text_model": tower({"token_embedding": a.embed(13, d), "position_embedding": a.embed(8, d)}),
            "vision_model": tower({"patch_embedding": a.conv(2, 3, d), "class_embedding": a(d)}),
            "text_projection": a.dense(d, 5, bias=False), "visual_projection": a.dense(d, 5, bias=False),
            "logit_scale": a(1)}  # fmt: skip


def diffusion(a: Arrays, r: Any) -> Module:
    """A denoising network, with group norms."""

    def res() -> Module:
        return {"norm1": a.norm(6), "conv1": a.conv(3, 6, 6), "time_emb_proj": a.dense(7, 6), "norm2": a.norm(6),
                "conv2": a.conv(3, 6, 6)}  # fmt: skip

    down = {f"down_blocks_{n}": {"resnets_0": res(), "resnets_1": res()} for n in range(2)}
    up = {f"up_blocks_{n}": {"resnets_0": res()} for n in range(r.choice([1, 2]))}
    return {"conv_in": a.conv(3, 3, 6), "time_embedding": {"linear_1": a.dense(4, 7), "linear_2": a.dense(7, 7)},
            **down, "mid_block": res(), **up, "conv_norm_out": a.norm(6), "conv_out": a.conv(3, 6, 3)}  # fmt: skip


def speech(a: Arrays, r: Any) -> Module:
    """Recurrent layers in both directions."""
    gates = [f"{side}{gate}" for side in "ih" for gate in "ifgo"]
    d = 5

    def cell(inputs: int) -> Module:
        return {gate: a.dense(inputs if gate[0] == "i" else d, d, bias=gate[0] == "h") for gate in gates}

    return {"encoder": {"forward_lstm": cell(7), "backward_lstm": cell(7)}, "bridge": a.dense(2 * d, d),
            "decoder": {"embed": a.embed(9, 4), "lstm": cell(4), "out": a.dense(d, 9)}}  # fmt: skip


def mamba(a: Arrays, r: Any) -> Module:
    """State space layers."""
    d = 4

    def mixer() -> Module:
        return {"A_log": a(2 * d, 3), "D": a(2 * d), "in_proj": a.dense(d, 4 * d, bias=False),
                "conv1d": {"kernel": a(4, 1, 2 * d), "bias": a(2 * d)}, "x_proj": a.dense(2 * d, 7, bias=False),
                "dt_proj": a.dense(1, 2 * d), "out_proj": a.dense(2 * d, d, bias=False)}  # fmt: skip

    layers = {str(n): {"mixer": mixer(), "norm": {"weight": a(d)}} for n in range(r.choice([2, 3]))}
    return {"backbone": {"embeddings": a.embed(15, d), "layers": layers, "norm_f": {"weight": a(d)}}}


def recommender(a: Arrays, r: Any) -> Module:
    """Tables of different sizes beside two towers."""
    tables = {f"table_{n}": a.embed(rows, 4) for n, rows in enumerate(r.sample([7, 9, 12, 15, 21, 30], 4))}
    return {"tables": tables, "bottom_mlp": {"Dense_0": a.dense(6, 8), "Dense_1": a.dense(8, 4)},
            "top_mlp": {"Dense_0": a.dense(20, 8), "Dense_1": a.dense(8, 8), "Dense_2": a.dense(8, 1)}}  # fmt: skip


def graph(a: Arrays, r: Any) -> Module:
    """Message passing between nodes and edges."""
    d = 6
    steps = {f"processor_{n}": {"edge_fn": a.dense(3 * d, d), "node_fn": a.dense(2 * d, d), "LayerNorm_0": a.norm(d)}
             for n in range(r.choice([2, 3, 5]))}  # fmt: skip
    return {"node_encoder": a.dense(5, d), "edge_encoder": a.dense(3, d), **steps, "node_decoder": a.dense(d, 2)}


def mixer(a: Arrays, r: Any) -> Module:
    """An MLP-Mixer."""
    p, d = 6, 4
    blocks = {
        f"MixerBlock_{n}": {
            "LayerNorm_0": a.norm(d), "token_mixing": {"Dense_0": a.dense(p, 9), "Dense_1": a.dense(9, p)},
            "LayerNorm_1": a.norm(d), "channel_mixing": {"Dense_0": a.dense(d, 8), "Dense_1": a.dense(8, d)},
        } for n in range(r.choice([2, 4]))
    }  # fmt: skip
    return {"stem": a.conv(4, 3, d), **blocks, "pre_head_layer_norm": a.norm(d), "head": a.dense(d, 10)}


def codec(a: Arrays, r: Any) -> Module:
    """An autoencoder with a codebook."""
    return {
        "encoder": {**{f"conv_{n}": a.conv(3, 4, 4) for n in range(r.choice([2, 3]))}, "mean": a.dense(4, 3),
                    "logvar": a.dense(4, 3)},
        "codebook": a.embed(16, 3),
        "decoder": {"dense": a.dense(3, 4), **{f"deconv_{n}": a.conv(3, 4, 4) for n in range(2)}, "out": a.conv(1, 4, 3)},  # noqa: E501
    }  # fmt: skip


def convnext(a: Arrays, r: Any) -> Module:
    """Depthwise convolutions."""
    d = 4
    blocks = {f"block{n}": {"dwconv": {"kernel": a(7, 7, 1, d), "bias": a(d)}, "norm": a.norm(d),
                            "pwconv1": a.dense(d, 4 * d), "pwconv2": a.dense(4 * d, d), "gamma": a(d)}
              for n in range(r.choice([2, 3]))}  # fmt: skip
    return {"stem": {"conv": a.conv(4, 3, d), "norm": a.norm(d)}, **blocks, "head": a.dense(d, 10)}


def byol(a: Arrays, r: Any) -> Module:
    """An online network and its slow copy."""

    def network() -> Module:
        return {"backbone": {"fc1": a.dense(5, 8), "fc2": a.dense(8, 8)}, "projector": a.dense(8, 4)}

    return {"online": {**network(), "predictor": a.dense(4, 4)}, "target": network()}


def detector(a: Arrays, r: Any) -> Module:
    """A backbone, a pyramid and heads."""
    stages = {f"stage_{n}": {"conv": a.conv(3, 4, 4), "norm": a.norm(4)} for n in range(r.choice([2, 3]))}
    return {"backbone": {"stem": a.conv(3, 3, 4), **stages}, "neck": {f"lateral_{n}": a.conv(1, 4, 6) for n in range(2)},  # noqa: E501
            "class_embed": a.dense(6, 4), "bbox_embed": a.dense(6, 4), "query_embed": a(9, 6)}  # fmt: skip


def flow(a: Arrays, r: Any) -> Module:
    """Coupling layers."""
    return {
        f"coupling_{n}": {"scale_net": {"Dense_0": a.dense(3, 8), "Dense_1": a.dense(8, 3)},
                          "shift_net": {"Dense_0": a.dense(3, 8), "Dense_1": a.dense(8, 3)}}
        for n in range(r.choice([2, 3, 4]))
    }  # fmt: skip


def qa(a: Arrays, r: Any) -> Module:
    """A reader with several heads of equal shapes."""
    d = 5
    return {"embed": a.embed(12, d), "reader": {"fc1": a.dense(d, 2 * d), "fc2": a.dense(2 * d, d)},
            "pos_proj": a.dense(d, d), "start_head": a.dense(d, 3), "end_head": a.dense(d, 3), "value_head": a.dense(d, 2),  # noqa: E501
            "pre_norm": a.norm(d)}  # fmt: skip


def flat(a: Arrays, r: Any) -> Module:
    """Torch's flat names, with dots."""
    found: Module = {"conv1.weight": a(6, 3, 3, 3), "bn1.weight": a(6), "bn1.bias": a(6)}
    for stage, block in itertools.product(range(1, r.choice([2, 3]) + 1), range(2)):
        name = f"layer{stage}.{block}"
        found |= {f"{name}.conv1.weight": a(6, 6, 3, 3), f"{name}.bn1.weight": a(6), f"{name}.bn1.bias": a(6)}
    return {**found, "fc.weight": a(5, 6), "fc.bias": a(5)}


def lora(a: Arrays, r: Any) -> Module:
    """Low-rank updates beside dense layers."""
    d = 6
    layers = {f"layer_{n}": {x: {**a.dense(d, d), "lora_a": a(d, 2), "lora_b": a(2, d)} for x in ("query", "value")}
              for n in range(r.choice([2, 3]))}  # fmt: skip
    return {"embed": a.embed(11, d), **layers, "head": a.dense(d, 3)}


def moe(a: Arrays, r: Any) -> Module:
    """Experts that lie stacked."""
    d = 4
    layers = {f"layers_{n}": {"router": a.dense(d, 3, bias=False), "wi": {"kernel": a(3, d, 8)}, "wo": {"kernel": a(3, 8, d)},  # noqa: E501
                              "norm": {"scale": a(d)}} for n in range(r.choice([2, 3]))}  # fmt: skip
    return {"token_embedder": a.embed(14, d), **layers, "final_norm": {"scale": a(d)}}


FAMILIES: dict[str, Callable[[Arrays, Any], Module]] = {
    one.__name__: one for one in (agent, gan, bert, resnet, t5, llama, clip, diffusion, speech, mamba, recommender, graph,  # noqa: E501
                                  mixer, codec, convnext, byol, detector, flow, qa, flat, lora, moe)
}  # fmt: skip
