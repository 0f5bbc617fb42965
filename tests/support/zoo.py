"""Every kind of leaf and container of the contract, each with the other forms that a format may give it."""

from __future__ import annotations

import collections
import struct
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import core, serialization

from tests.support.samples import Fields, Pair, train_state_sample

# name → value. Containers hold arrays only, so that nothing but the container can differ.
LEAVES: dict[str, Any] = {
    "jax f32": jnp.arange(6.0).reshape(2, 3),
    "jax bf16": jnp.arange(3, dtype=jnp.bfloat16),
    "jax int4": jnp.array([-8, 7], jnp.int4),
    "jax fp8": jnp.arange(3).astype(jnp.float8_e4m3fn),
    "jax bool": jnp.array([True, False]),
    "jax 0-d": jnp.float32(2.5),
    "jax zero-size": jnp.zeros((2, 0)),
    "np f64": np.arange(3.0) / 3,
    "np i64 0-d": np.array(2**60),
    "np big": np.random.default_rng(0).random((50, 60)),
    "np zeros": np.zeros((20, 30), np.int16),
    "np bf16": np.arange(3).astype(ml_dtypes.bfloat16),
    "np fp8": np.arange(3).astype(ml_dtypes.float8_e5m2),
    "np int4": np.array([-8, 7], ml_dtypes.int4),
    "np uint4": np.array([0, 15], ml_dtypes.uint4),
    "np c64": np.array([1 + 2j, -0.0j], np.complex64),
    "np c128 nan": np.array([complex("nan+1j")]),
    "np longdouble": np.array([1, 2], np.longdouble),
    "np datetime": np.array(["1970-01-03"], "M8[D]"),
    "np text": np.array(["ab", "c"]),
    "np bytes": np.array([b"ab", b"c"]),
    "np big-endian": np.arange(3).astype(">i4"),
    "np zero-size": np.zeros((0, 4), np.float32),
    "np.int64": np.int64(-5),
    "np.float32": np.float32(1.5),
    "np.bool_": np.bool_(True),
    "np.complex64": np.complex64(1 - 2j),
    "np.bfloat16": ml_dtypes.bfloat16(1.5),
    "int": -7,
    "int > 2**63": 2**63 + 5,
    "float": 1e-3,
    "nan": float("nan"),
    "bool": True,
    "complex": 1 - 2j,
    "str": "ü\n text",
    "empty str": "",
    "bytes": b"\0\xff",
    "None": None,
    "key": jax.random.key(3),
    "rbg keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
    "raw key": jax.random.PRNGKey(5),
}
CONTAINERS: dict[str, Any] = {
    "dict": {"b": np.arange(2), "a": {"c": np.arange(3)}},
    "odd keys": {"a/b": np.arange(2), " ": np.arange(3), "ü": np.arange(1), "..": np.arange(4)},
    "int keys": {10: np.arange(2), 9: np.arange(3)},
    "OrderedDict": collections.OrderedDict(z=np.arange(2), a=np.arange(3)),
    "FrozenDict": core.freeze({"a": {"b": np.arange(2)}}),
    "list": [np.arange(i) for i in range(1, 13)],
    "tuple": (np.arange(2), (np.arange(3),)),
    "namedtuple": Pair(np.arange(2), Pair(np.arange(3), np.arange(4))),
    "dataclass": Fields(np.arange(2), Fields(np.arange(3), np.arange(1))),
    "TrainState": train_state_sample().replace(step=jnp.int32(3)),
    "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}).init({"w": jnp.ones(2), "b": jnp.ones(3)}),
    "{}": {},
    "[]": [],
    "()": (),
    "EmptyState": optax.EmptyState(),
    "MaskedNode": optax.MaskedNode(),
}
ZOO = {**LEAVES, **CONTAINERS}
ROOTS: dict[str, Any] = {
    "root array": np.arange(6).reshape(2, 3),
    "root jax": jnp.arange(3.0),
    "root int": 7,
    "root {}": {},
    "root list": [np.arange(2), np.arange(3)],
}


def state_dict(value: Any) -> Any:
    """What Flax makes of containers: nested dicts with text keys, positions and fields as names."""
    if isinstance(value, collections.OrderedDict):
        value = dict(value)
    return serialization.to_state_dict(value)


def orbax_containers(value: Any) -> Any:
    """What Orbax's format keeps of containers: dicts with text keys and lists; nodes without children are None."""
    if isinstance(value, dict | core.FrozenDict):
        return {str(key): orbax_containers(child) for key, child in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [orbax_containers(child) for child in value] or value
    if jax.tree_util.all_leaves([value]) or value is None:
        return value
    if not jax.tree_util.tree_leaves(value):
        return None
    state = {name: getattr(value, name) for name in _field_names(value)}
    return {name: orbax_containers(child) for name, child in state.items()}


def _field_names(node: Any) -> list[str]:
    if hasattr(node, "_fields"):
        return list(node._fields)
    fields = node.__dataclass_fields__.values()
    return [field.name for field in fields if field.metadata.get("pytree_node", True)]


def with_none(tree: Any) -> Any:
    """Empty dicts inside as None, which is what Orbax's format has for empty nodes."""
    if not isinstance(tree, dict):
        return tree
    return {name: with_none(child) for name, child in tree.items()} or None


def canonical(tree: Any) -> Any:
    """Equal for two trees only if containers, types, dtypes, shapes and bits are.

    The order of a dict's keys, and whether an array is numpy's or jax's, count for nothing.
    """
    if isinstance(tree, dict | core.FrozenDict):
        children = [(repr(key), canonical(child)) for key, child in tree.items()]
        return (type(tree).__name__, sorted(children, key=lambda child: child[0]))
    if isinstance(tree, list | tuple):
        return (type(tree).__name__, [canonical(child) for child in tree])
    if isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return ("key", str(tree.dtype), canonical(jax.random.key_data(tree)))
    if isinstance(tree, np.ndarray | np.generic | jax.Array):
        kind = "scalar" if isinstance(tree, np.generic) else "array"
        return (kind, np.dtype(tree.dtype).str, tree.dtype.name, tree.shape, np.asarray(tree).tobytes())
    if isinstance(tree, float | complex):
        return (type(tree).__name__, struct.pack("<dd", tree.real, tree.imag))
    if tree is None or jax.tree_util.all_leaves([tree]):
        return (type(tree).__name__, repr(tree))
    children, structure = jax.tree_util.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    return (str(structure), [canonical(child) for child in children])
