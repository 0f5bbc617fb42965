"""Models whose every layer has an identity, so that it is known which stored leaf each target leaf has to get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_leaves, map_leaves
from flax_ckpt_compat._suggest import Suggestion, suggest
from flax_ckpt_compat._trees import leaf_sources, prng_keys, state_dict

_KINDS = {bool: LeafKind.BOOL, int: LeafKind.INT, float: LeafKind.FLOAT, str: LeafKind.STR}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        uid: what it is, whatever it is called.
        kind: dense, norm (layer norm), batch (batch norm) or block (two dense layers and a norm).
        width: of its output; a norm keeps its input's.
        name: given to it, or None for Flax's own counting.
    """

    uid: str
    kind: str
    width: int = 0
    name: str | None = None


class Block(nn.Module):
    """A residual block."""

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Dense(2 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Net(nn.Module):
    """Layers one after the other, perhaps inside another module."""

    layers: tuple[Layer, ...]
    inside: str = ""
    note: Callable[[str, Path], None] = lambda uid, path: None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.inside:
            first, _, rest = self.inside.partition("/")
            return Net(self.layers, rest, self.note, name=first)(x)
        makers = {
            "dense": lambda one: nn.Dense(one.width, name=one.name),
            "norm": lambda one: nn.LayerNorm(name=one.name),
            "batch": lambda one: nn.BatchNorm(use_running_average=True, name=one.name),
            "block": lambda one: Block(one.width, name=one.name),
        }
        for one in self.layers:
            module = makers[one.kind](one)
            self.note(one.uid, (*self.path, module.name))
            x = module(x)
        return x


@struct.dataclass
class Train:
    """What is saved: a step, parameters, statistics where there are some, and an optimizer's state."""

    step: Any
    params: Any
    opt_state: Any
    batch_stats: Any = None


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "clip adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "warm adam": lambda: optax.adam(optax.linear_schedule(0.0, 1e-3, 100)),
    "rmsprop": lambda: optax.rmsprop(1e-3),
}


@dataclasses.dataclass(frozen=True)
class Made:
    """A state and where each layer's variables are in it."""

    state: Any
    places: dict[str, Path]


def make(layers: Sequence[Layer], optimizer: str = "adam", inside: str = "", width: int = 8) -> Made:
    """The abstract state of a model in training."""
    names: dict[str, Path] = {}
    net = Net(tuple(layers), inside, names.__setitem__)
    variables = jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct((2, width), jnp.float32))
    tx = OPTIMIZERS[optimizer]()
    state_ = Train(0, variables["params"], jax.eval_shape(tx.init, variables["params"]), variables.get("batch_stats"))
    return Made({k: v for k, v in vars(state_).items() if v is not None}, names)


def as_stored(tree: Any) -> Node:
    """The tree of handles that a checkpoint of this state would open as; msgpack files know no containers."""

    def handle(path: Path, leaf: Any) -> Any:
        if leaf is None:
            return None
        array = hasattr(leaf, "shape")
        shape = tuple(leaf.shape) if array else ()
        if prng_keys.is_prng_key(leaf):
            return LeafHandle(path, LeafKind.PRNG_KEY, (*shape, 2), np.dtype("uint32"), 0, "", _NoReader(), None)
        dtype = np.dtype(leaf.dtype) if array else None
        kind = LeafKind.ARRAY if array else _KINDS[type(leaf)]
        return LeafHandle(path, kind, shape, dtype, 0, "/".join(path), _NoReader(), None)

    return _plain(map_leaves(handle, state_dict.describe(tree)))


def _plain(node: Node) -> Node:
    if not isinstance(node, Branch):
        return node
    return Branch({name: _plain(child) for name, child in node.children.items()}, Container.DICT)


class _NoReader:
    """A reader for suggestions, which read nothing."""

    format = path = tree = None

    def read(self, _: Any) -> Any:
        """Fails."""
        raise AssertionError("a suggestion read array data")

    def close(self) -> None:
        """Nothing."""


def proposed(old: Any, new: Any) -> tuple[Suggestion | None, dict[str, str | None]]:
    """The suggestion for a pair of states, and what each leaf of the target would get by it: see `gets`."""
    stored, target = as_stored(old), state_dict.describe(new)
    suggestion = suggest(stored, target)
    return suggestion, gets(stored, target, suggestion)


def gets(stored: Node, target: Node, suggestion: Suggestion | None) -> dict[str, str | None]:
    """Target path → stored path (several joined with ``+``), None where the target keeps its own; missing ones not."""
    tree = stored
    for step in suggestion.steps if suggestion else ():
        tree = step.rule.apply(tree, target)
    there = dict(iter_leaves(tree))
    found: dict[str, str | None] = {}
    for path, leaf in iter_leaves(target):
        if isinstance(leaf, Branch) or leaf is None or path not in there:
            continue
        sources = leaf_sources.handles_of(there[path])
        found["/".join(path)] = "+".join("/".join(one.path) for one in sources) or None
    return found


def truth(old: Made, new: Made, *, same_moments: bool = True) -> dict[str, str | None]:
    """Target path → the stored path that the identity of the layers says, or None.

    A leaf of another shape than the stored one stays as the target has it.
    """
    stored = {path: _shape(leaf) for path, leaf in iter_leaves(state_dict.describe(old.state))}
    origin = {new.places[uid]: place for uid, place in old.places.items() if uid in new.places}
    found: dict[str, str | None] = {}
    for path, leaf in iter_leaves(state_dict.describe(new.state)):
        if isinstance(leaf, Branch):
            continue
        source = _source(path, origin, old.state, new.state, same_moments)
        known = source is not None and stored.get(source, "none") == _shape(leaf)
        found["/".join(path)] = "/".join(source) if known and source else None
    return found


def _shape(leaf: Any) -> Any:
    return tuple(getattr(leaf, "shape", ()))


def _source(path: Path, origin: dict[Path, Path], old: Any, new: Any, same_moments: bool) -> Path | None:
    if path == ("step",):
        return path
    if path[0] != "opt_state":
        return _moved(path, 1, origin)
    ours = _nodes(state_dict.describe(new)).get(_fields(path, new))
    node = next((end for end in range(len(path)) if path[:end] == ours), None)
    theirs = _nodes(state_dict.describe(old)).get(_fields(path, new))
    if node is None or theirs is None or not same_moments:
        return None
    moved = _moved(path, node + 1, origin) if len(path) > node + 1 else path
    return (*theirs, *moved[node:]) if moved else None


def _moved(path: Path, start: int, origin: dict[Path, Path]) -> Path | None:
    for end in range(start + 1, len(path)):
        if path[start:end] in origin:
            return (*path[:start], *origin[path[start:end]], *path[end:])
    return None


def _nodes(tree: Node, path: Path = ()) -> dict[frozenset[str], Path]:
    """Names of the fields → key path of optimizer nodes."""
    if not isinstance(tree, Branch) or path[:1] not in ((), ("opt_state",)):
        return {}
    found = {}
    for name, child in tree.children.items():
        found.update(_nodes(child, (*path, name)))
    if tree.children.keys() & {"count", "mu", "trace", "nu"}:
        found[frozenset(tree.children)] = path
    return found


def _fields(path: Path, tree: Any) -> frozenset[str]:
    node: Any = state_dict.describe(tree)
    best: frozenset[str] = frozenset()
    for name in path:
        if isinstance(node, Branch) and node.children.keys() & {"count", "mu", "trace", "nu"}:
            return frozenset(node.children)
        node = node.children[name] if isinstance(node, Branch) else node
    return best
