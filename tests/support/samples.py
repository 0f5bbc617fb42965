"""One tree of every kind that users save, and comparing trees to the last bit."""

import collections
import struct
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import core, serialization
from flax.training import train_state

from tests.support.peers import nnx
from tests.support.trees import ML_DTYPES, NUMPY_DTYPES, fill


@flax.struct.dataclass
class Fields:
    """A dataclass of Flax's, with a static field."""

    first: Any
    second: Any = None
    label: str = flax.struct.field(pytree_node=False, default="unset")


Pair = collections.namedtuple("Pair", ["left", "right"])


class Registered:
    """A user's pytree that only JAX knows, without names for its children."""

    def __init__(self, first: Any, second: Any):
        self.first, self.second = first, second


class Keyed(Registered):
    """A user's pytree with names for its children."""


class Serialized:
    """A user's class that only flax.serialization knows."""

    def __init__(self, value: Any):
        self.value = value


jax.tree_util.register_pytree_node(
    Registered, lambda node: ((node.first, node.second), "aux"), lambda _, children: Registered(*children)
)
jax.tree_util.register_pytree_with_keys(
    Keyed,
    lambda node: (tuple((jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in ("first", "second")), None),
    lambda _, children: Keyed(*children),
)
serialization.register_serialization_state(
    Serialized,
    lambda node: {"v": serialization.to_state_dict(node.value)},
    lambda node, state: Serialized(serialization.from_state_dict(node.value, state["v"])),
)


def one_program(tx: Any) -> Any:
    """An optimizer whose step is one program: to compile dozens of small ones takes longer than their tests."""
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


_TX = one_program(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))


def train_state_sample() -> Any:
    """A TrainState with a chain of optimizers."""
    state = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}, tx=_TX)
    return state.apply_gradients(grads={"w": jnp.full((2, 2), 0.5), "b": jnp.ones(2)})


def _multi_transform() -> Any:
    chosen = {"w": "slow", "b": "fast"}
    tx = optax.multi_transform({"slow": optax.adam(1e-3), "fast": optax.sgd(1e-2, momentum=0.9)}, chosen)
    return tx.init({"w": jnp.ones(2), "b": jnp.ones(3)})


def _empty_containers() -> Any:
    plain = {"a": {}, "b": [], "c": (), "f": core.freeze({}), "g": collections.OrderedDict(), "h": None}
    return {**plain, "d": optax.EmptyState(), "e": optax.MaskedNode()}


def nnx_model(seed: int) -> Any:
    """A layer with weights, running averages and random numbers."""

    class Model(nnx.Module):  # here, as there may be no nnx
        def __init__(self, rngs: Any):
            self.linear, self.norm = nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    return Model(nnx.Rngs(seed))


def _nnx_state() -> Any:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    return nnx.split(model)[1]


SAMPLES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"b": np.arange(3), "a": {"c": np.float32([1.5])}},
    "FrozenDict": lambda: core.freeze({"a": {"b": np.arange(3)}}),
    "list": lambda: [np.ones(2), [1, "x"], *range(12)],
    "tuple": lambda: ({"w": np.ones(2)}, (), 7),
    "namedtuple": lambda: Pair(np.ones(1), Pair(1, [2])),
    "dataclass": lambda: Fields(np.ones(2), Fields(1.5, label="inner"), label="outer"),
    "TrainState": train_state_sample,
    "masked": lambda: optax.masked(optax.adam(1e-3), {"w": True, "b": False}).init(
        {"w": jnp.ones(2), "b": jnp.ones(3)}
    ),
    "multi_transform": _multi_transform,
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-3).init({"w": jnp.ones(2)}),
    "nnx": _nnx_state,
    "nnx inside": lambda: {"model": _nnx_state(), "step": 3},
    "registered": lambda: {"r": Registered(np.ones(2), [np.zeros(1), None])},
    "keyed": lambda: Keyed(np.ones(2), Fields(3)),
    "serialized": lambda: {"s": Serialized([np.ones(2), Pair(1, 2)])},
    "OrderedDict": lambda: collections.OrderedDict(z=np.ones(1), a=Fields(np.zeros(2))),
    "defaultdict": lambda: collections.defaultdict(list, {"k": [np.ones(2)]}),
    "Partial": lambda: jax.tree_util.Partial(max, np.ones(2)),
    "int keys": lambda: {1: np.ones(1), 10: 2, -3: {2: "a"}},
    "other keys": lambda: {(1, 2): np.ones(1), (0, True): 3},
    "awkward keys": lambda: {"a/b": np.ones(1), "~": "x", "": "e", " ": "1", "ü\n": 2, "..": 3},
    "empty containers": _empty_containers,
    "array": lambda: np.arange(6, dtype=np.int16).reshape(2, 3),
    "jax array": lambda: jnp.arange(3.0),
    "int": lambda: 3,
    "str": lambda: "text",
    "None": lambda: None,
    "{}": dict,
    "[]": list,
    "()": lambda: (),
    "OrderedDict()": lambda: collections.OrderedDict(),
    "dtypes": lambda: {str(dtype): fill((2, 3), dtype, 5) for dtype in NUMPY_DTYPES + ML_DTYPES},
    "scalars": lambda: {str(dtype): fill((3,), dtype, 5)[0] for dtype in NUMPY_DTYPES + ML_DTYPES},
    "0-d": lambda: {str(dtype): fill((), dtype, 5) for dtype in NUMPY_DTYPES + ML_DTYPES},
    "empty": lambda: {str(dtype): fill((2, 0, 3), dtype, 5) for dtype in NUMPY_DTYPES + ML_DTYPES},
    "big-endian": lambda: {str(n): np.arange(3).astype(n) for n in (">i4", ">f8", ">u2", ">c8", ">U3", ">M8[s]")},
    "jax dtypes": lambda: {n: jnp.arange(4).astype(n) for n in ("bfloat16", "int4", "float8_e4m3fn", "bool", "uint8")},
    "numpy scalars": lambda: {"a": np.float32(2), "b": ml_dtypes.bfloat16(1.5), "c": np.bool_(True)},
    "Python": lambda: {
        "b": True,
        "i": -(2**63),
        "u": 2**64 - 1,
        "f": 5e-324,
        "n": float("nan"),
        "z": -0.0,
        "c": 1 - 2j,
    },
    "text": lambda: {"s": "ü\0\U0001f600", "e": "", "b": b"\0\xff", "eb": b""},
    "keys": lambda: {
        "one": jax.random.key(1),
        "many": jax.random.split(jax.random.key(1), (2, 3)),
        "rbg": jax.random.key(2, impl="rbg"),
        "old": jax.random.PRNGKey(3),
    },
}

# What legacy Flax itself can write and read back; the rest it refuses, or changes (big-endian, byte-swapped).
FLAX_KNOWS = [
    "dict", "FrozenDict", "list", "tuple", "namedtuple", "dataclass", "TrainState", "masked", "multi_transform",
    "inject_hyperparams", "serialized", "Partial", "int keys", "awkward keys", "array", "int", "str", "None", "{}",
    "[]", "()", "jax array", "jax dtypes", "numpy scalars", "Python", "text",
]  # fmt: skip


def fingerprint(tree: Any) -> Any:
    """Something that is equal for two trees only if containers, types, dtypes, shapes and bits are.

    A numpy array and a jax.Array of the same content count as the same.
    """
    if isinstance(tree, Serialized):
        return ("serialized", fingerprint(tree.value))
    if isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return ("key", str(tree.dtype), fingerprint(jax.random.key_data(tree)))
    if isinstance(tree, np.ndarray | np.generic | jax.Array):
        kind = "scalar" if isinstance(tree, np.generic) else "array"
        return (kind, np.dtype(tree.dtype).str, tree.dtype.name, tree.shape, np.asarray(tree).tobytes())
    if isinstance(tree, float | complex):
        return (type(tree).__name__, struct.pack("<dd", tree.real, tree.imag))
    entries, structure = _one_level(tree)
    if tree is None or entries is None:
        return (type(tree).__name__, tree)
    return (str(structure), [fingerprint(entry) for entry in entries])


def canonical(tree: Any) -> Any:
    """Its fingerprint, for which the order of a dict's keys counts for nothing."""
    return fingerprint(jax.tree.map(lambda leaf: leaf, tree))


def _one_level(tree: Any) -> tuple[list[Any] | None, Any]:
    if isinstance(tree, dict):  # JAX sorts the keys; their order and types matter, too
        return list(tree.values()), (type(tree).__name__, list(map(repr, tree)))
    if jax.tree_util.all_leaves([tree]):
        return None, None
    return jax.tree_util.tree_flatten(tree, is_leaf=lambda node: node is not tree)


def assert_apart(arrays: Any, expected: Any) -> None:
    """Fail unless all are as expected, writable and in C order, and what is written to one shows in no other."""
    leaves, wanted = jax.tree.leaves(arrays), jax.tree.leaves(expected)
    for number, leaf in enumerate(leaves):
        assert leaf.flags.carray, number
        np.testing.assert_array_equal(leaf, wanted[number])
        leaf[...] = -1
        for later, value in zip(leaves[number + 1 :], wanted[number + 1 :], strict=True):
            np.testing.assert_array_equal(later, value, err_msg=f"{number} shows in it")
