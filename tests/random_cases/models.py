"""Families of models with the names of well-known code bases, whose every value occurs once: nested dicts of arrays."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

Module = dict[str, Any]
_D = 6  # width: two heads of three


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


def _heads(a: Arrays, names: tuple[str, ...] = ("query", "key", "value"), out: str = "out") -> Module:
    """Attention of linen, with an axis of heads."""
    inner = {name: {"kernel": a(_D, 2, 3), "bias": a(2, 3)} for name in names}
    return {**inner, out: {"kernel": a(2, 3, _D), "bias": a(_D)}}


def gpt2(a: Arrays, r: Any) -> Module:
    """GPT-2 of Hugging Face's port: projections that are one."""

    def block() -> Module:
        attention = {"c_attn": a.dense(_D, 3 * _D), "c_proj": a.dense(_D, _D)}
        mlp = {"c_fc": a.dense(_D, 4 * _D), "c_proj": a.dense(4 * _D, _D)}
        return {"ln_1": a.norm(_D), "attn": attention, "ln_2": a.norm(_D), "mlp": mlp}

    blocks = {str(n): block() for n in range(r.choice([2, 3, 4, 6]))}
    return {"transformer": {"wte": a.embed(19, _D), "wpe": a.embed(8, _D), "h": blocks, "ln_f": a.norm(_D)}}


def vit(a: Arrays, r: Any) -> Module:
    """The vision transformer of google-research."""

    def block() -> Module:
        return {"LayerNorm_0": a.norm(_D), "MultiHeadDotProductAttention_1": _heads(a), "LayerNorm_2": a.norm(_D),
                "MlpBlock_3": {"Dense_0": a.dense(_D, 9), "Dense_1": a.dense(9, _D)}}  # fmt: skip

    blocks = {f"encoderblock_{n}": block() for n in range(r.choice([2, 3, 4]))}
    first = {"posembed_input": {"pos_embedding": a(1, 5, _D)}, **blocks, "encoder_norm": a.norm(_D)}
    return {"embedding": a.conv(4, 3, _D), "cls": a(1, 1, _D), "Transformer": first, "head": a.dense(_D, 10)}


def t5x(a: Arrays, r: Any) -> Module:
    """T5 as T5X names it."""

    def attention() -> Module:
        return {name: a.dense(_D, _D, bias=False) for name in ("query", "key", "value", "out")}

    def layer(*, decodes: bool) -> Module:
        wide = {name: a.dense(_D, 8, bias=False) for name in ("wi_0", "wi_1")}
        mlp = {**wide, "wo": a.dense(8, _D, bias=False)}
        if not decodes:
            return {"pre_attention_layer_norm": {"scale": a(_D)}, "attention": attention(),
                    "pre_mlp_layer_norm": {"scale": a(_D)}, "mlp": mlp}  # fmt: skip
        return {"pre_self_attention_layer_norm": {"scale": a(_D)}, "self_attention": attention(),
                "pre_cross_attention_layer_norm": {"scale": a(_D)}, "encoder_decoder_attention": attention(),
                "pre_mlp_layer_norm": {"scale": a(_D)}, "mlp": mlp}  # fmt: skip

    n = r.choice([2, 3, 4])
    encoder = {f"layers_{i}": layer(decodes=False) for i in range(n)}
    decoder = {f"layers_{i}": layer(decodes=True) for i in range(n)}
    bias = lambda: {"rel_embedding": a(2, 16)}  # noqa: E731
    return {"token_embedder": a.embed(13, _D),
            "encoder": {"relpos_bias": bias(), **encoder, "encoder_norm": {"scale": a(_D)}},
            "decoder": {"relpos_bias": bias(), **decoder, "decoder_norm": {"scale": a(_D)},
                        "logits_dense": a.dense(_D, 13, bias=False)}}  # fmt: skip


def haiku(a: Arrays, r: Any) -> Module:
    """A residual network of Haiku: names that hold a path."""
    top = "res_net/~/"
    found: Module = {
        f"{top}initial_conv": {"w": a(7, 7, 3, 4)},
        f"{top}initial_batchnorm": {"scale": a(4), "offset": a(4)},
    }
    for group in range(r.choice([1, 2])):
        for block in range(2):
            at = f"{top}block_group_{group}/~/block_{block}/~/"
            for n in range(2):
                found |= {f"{at}conv_{n}": {"w": a(3, 3, 4, 4)}, f"{at}batchnorm_{n}": {"scale": a(4), "offset": a(4)}}
    return {**found, f"{top}logits": {"w": a(4, 10), "b": a(10)}}  # fmt: skip


def nerf(a: Arrays, r: Any) -> Module:
    """A coarse and a fine network of square layers."""

    def mlp() -> Module:
        trunk = {f"Dense_{n}": a.dense(8, 8) for n in range(1, r.choice([3, 4]))}
        return {"Dense_0": a.dense(5, 8), **trunk, "sigma": a.dense(8, 1), "rgb": a.dense(8, 3)}

    state = r.getstate()
    coarse = mlp()
    r.setstate(state)
    return {"coarse_mlp": coarse, "fine_mlp": mlp()}


def sac(a: Arrays, r: Any) -> Module:
    """Critics that lie stacked."""
    d = 7
    critic = {"VmapCritic_0": {"MLP_0": {"Dense_0": {"kernel": a(2, 9, d), "bias": a(2, d)},
                                         "Dense_1": {"kernel": a(2, d, d), "bias": a(2, d)}},
                               "Dense_0": {"kernel": a(2, d, 1), "bias": a(2, 1)}}}  # fmt: skip
    actor = {
        "MLP_0": {"Dense_0": a.dense(6, d), "Dense_1": a.dense(d, d)},
        "Dense_0": a.dense(d, 3),
        "Dense_1": a.dense(d, 3),
    }
    return {"actor": actor, "critic": critic, "temp": {"log_temp": a(1)}}


def dreamer(a: Arrays, r: Any) -> Module:
    """A world model, an actor and a critic with its slow copy."""

    def head(outputs: int) -> Module:
        return {"h0": a.dense(8, 8), "h1": a.dense(8, 8), "out": a.dense(8, outputs)}

    rssm = {"img_in": a.dense(6, 8), "gru": {"cell": a.dense(16, 24), "norm": a.norm(24)}, "img_out": a.dense(8, 8),
            "obs_out": a.dense(12, 8), "imgs_stats": a.dense(8, 5), "obs_stats": a.dense(8, 5)}  # fmt: skip
    world = {"enc": {f"conv{n}": a.conv(4, 3, 4) for n in range(2)}, "rssm": rssm, "dec": a.dense(8, 12), "rew": head(9),  # noqa: E501
             "con": head(1)}  # fmt: skip
    return {
        "wm": world,
        "actor": head(4),
        "critic": {"net": head(9), **({"slow": head(9)} if r.random() < 0.5 else {})},
    }


def efficientnet(a: Arrays, r: Any) -> Module:
    """Inverted residuals with squeeze and excitation."""

    def batch(width: int) -> Module:
        return {**a.norm(width), "mean": a(width), "var": a(width)}

    def block(wide: int) -> Module:
        return {"expand_conv": {"kernel": a(1, 1, 4, wide)}, "expand_bn": batch(wide),
                "depthwise_conv": {"kernel": a(3, 3, 1, wide)}, "depthwise_bn": batch(wide),
                "se": {"reduce": a.conv(1, wide, 2), "expand": a.conv(1, 2, wide)},
                "project_conv": {"kernel": a(1, 1, wide, 4)}, "project_bn": batch(4)}  # fmt: skip

    blocks = {f"blocks_{n}": block(r.choice([8, 8, 12])) for n in range(r.choice([2, 3]))}
    return {"stem_conv": {"kernel": a(3, 3, 3, 4)}, "stem_bn": batch(4), **blocks, "head_conv": {"kernel": a(1, 1, 4, 9)},  # noqa: E501
            "head_bn": batch(9), "classifier": a.dense(9, 10)}  # fmt: skip


def whisper(a: Arrays, r: Any) -> Module:
    """Speech to text."""

    def attention() -> Module:
        return {"q_proj": a.dense(_D, _D), "k_proj": a.dense(_D, _D, bias=False), "v_proj": a.dense(_D, _D),
                "out_proj": a.dense(_D, _D)}  # fmt: skip

    def layer(*, decodes: bool) -> Module:
        crossed = {"encoder_attn": attention(), "encoder_attn_layer_norm": a.norm(_D)} if decodes else {}
        return {"self_attn": attention(), "self_attn_layer_norm": a.norm(_D), **crossed, "fc1": a.dense(_D, 4 * _D),
                "fc2": a.dense(4 * _D, _D), "final_layer_norm": a.norm(_D)}  # fmt: skip

    n = r.choice([2, 3])
    encoder = {"conv1": {"kernel": a(3, 8, _D), "bias": a(_D)}, "conv2": {"kernel": a(3, _D, _D), "bias": a(_D)},
               "layers": {str(i): layer(decodes=False) for i in range(n)}, "layer_norm": a.norm(_D)}  # fmt: skip
    decoder = {"embed_tokens": a.embed(17, _D), "embed_positions": a.embed(9, _D),
               "layers": {str(i): layer(decodes=True) for i in range(n)}, "layer_norm": a.norm(_D)}  # fmt: skip
    return {"model": {"encoder": encoder, "decoder": decoder}}


def compact(a: Arrays, r: Any) -> Module:
    """Linen's own numbers at every level."""

    def block() -> Module:
        return {"LayerNorm_0": a.norm(_D), "SelfAttention_0": _heads(a), "LayerNorm_1": a.norm(_D),
                "FeedForward_0": {"Dense_0": a.dense(_D, 10), "Dense_1": a.dense(10, _D)}}  # fmt: skip

    encoder = {f"Block_{n}": block() for n in range(r.choice([2, 3, 4]))}
    return {"Embed_0": a.embed(12, _D), "Encoder_0": encoder, "LayerNorm_0": a.norm(_D), "Dense_0": a.dense(_D, 4)}


def scanned(a: Arrays, r: Any) -> Module:
    """Layers of ``nn.scan``, on axis 0 or 1."""
    n, axis = r.choice([4, 6]), r.choice([0, 0, 1])

    def array(*shape: int) -> Any:
        return a(*shape[:axis], n, *shape[axis:])

    layer = {"ln": {"scale": array(_D)}, "attn": {"qkv": {"kernel": array(_D, 3 * _D)}, "proj": {"kernel": array(_D, _D)}},  # noqa: E501
             "mlp": {"up": {"kernel": array(_D, 11)}, "down": {"kernel": array(11, _D)}}}  # fmt: skip
    return {
        "embed": a.embed(18, _D),
        "layers": layer,
        "final_ln": {"scale": a(_D)},
        "unembed": a.dense(_D, 18, bias=False),
    }


def numbered_from_one(a: Arrays, r: Any) -> Module:
    """Stages that begin at 1."""
    stages = {f"stage{n}": {"conv": a.conv(3, 4, 4), "bn": a.norm(4)} for n in range(1, r.choice([3, 4, 5]))}
    return {"stem": a.conv(3, 3, 4), **stages, "pool_proj": a.dense(4, 7), "fc": a.dense(7, 10)}


def flat(a: Arrays, r: Any) -> Module:
    """Torch's flat names, with dots."""
    found: Module = {"conv1.weight": a(6, 3, 3, 3), "bn1.weight": a(6), "bn1.bias": a(6)}
    for stage, block in itertools.product(range(1, r.choice([2, 3]) + 1), range(2)):
        name = f"layer{stage}.{block}"
        found |= {f"{name}.conv1.weight": a(6, 6, 3, 3), f"{name}.bn1.weight": a(6), f"{name}.bn1.bias": a(6)}
    return {**found, "fc.weight": a(5, 6), "fc.bias": a(5)}


def moe(a: Arrays, r: Any) -> Module:
    """Experts that lie stacked."""
    d = 4
    layers = {f"layers_{n}": {"router": a.dense(d, 3, bias=False), "wi": {"kernel": a(3, d, 8)}, "wo": {"kernel": a(3, 8, d)},  # noqa: E501
                              "norm": {"scale": a(d)}} for n in range(r.choice([2, 3]))}  # fmt: skip
    return {"token_embedder": a.embed(14, d), **layers, "final_norm": {"scale": a(d)}}


def agent(a: Arrays, r: Any) -> Module:
    """An actor with two critics and their slow copies."""
    d = r.choice([6, 8])

    def tower(outputs: int, inputs: int = 5) -> Module:
        return {"Dense_0": a.dense(inputs, d), "Dense_1": a.dense(d, d), "Dense_2": a.dense(d, outputs)}

    found = {"actor": {**tower(4), "log_std": a(2)}, "critic": {"q1": tower(1, 7), "q2": tower(1, 7)}}
    if r.random() < 0.5:
        found["target_critic"] = {"q1": tower(1, 7), "q2": tower(1, 7)}
    return {**found, "log_alpha": a(1)}


def byol(a: Arrays, r: Any) -> Module:
    """An online network and its slow copy."""

    def network() -> Module:
        return {"backbone": {"fc1": a.dense(5, 8), "fc2": a.dense(8, 8)}, "projector": a.dense(8, 4)}

    return {"online": {**network(), "predictor": a.dense(4, 4)}, "target": network()}


Family = Callable[[Arrays, Any], Module]
FAMILIES: dict[str, Family] = {one.__name__: one for one in (
    gpt2, vit, t5x, haiku, nerf, sac, dreamer, efficientnet, whisper, compact, scanned, numbered_from_one,
    flat, moe, agent, byol)}  # fmt: skip
