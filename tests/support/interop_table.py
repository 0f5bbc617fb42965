"""Every kind of tree, saved and read by everybody, and the documented differences of what comes back.

Imported by running tests only: it computes real optimizers' states.
"""

import collections
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import core, serialization

from tests.support.interop import EVERYBODY, FLAX, ORBAX, OURS, READERS, WRITERS, Saved, quietly
from tests.support.peers import ORBAX_HAS_TYPED_KEYS, version
from tests.support.samples import Fields, Pair, canonical, train_state_sample

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


PEERS = (*FLAX, *ORBAX)
DIRECTORIES = ("ours on", "flax on", *ORBAX)
TREES = {**ZOO, **ROOTS}
EQUAL, REFUSED = "equal", "refused"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A documented difference, with its reason: what comes back instead, by kind of tree."""

    name: str
    reason: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    instead: dict[str, Any]


def _marked_key(key: Any) -> Any:
    return {
        "__flax_ckpt_compat_prng_key__": str(jax.random.key_impl(key)),
        "data": np.asarray(jax.random.key_data(key)),
    }


NUMBERS = {"np.int64": -5, "np.float32": 1.5, "np.bool_": True, "np.complex64": 1 - 2j, "np.bfloat16": 1.5}
EMPTY_NODES = ("TrainState", "masked", "EmptyState", "MaskedNode")
_KEY_DATA = {name: np.asarray(jax.random.key_data(ZOO[name])) for name in ("key", "rbg keys")}
DIFFERENCES = [
    Difference(
        "state dict",
        "without a target Flax gives nested dicts with text keys, sequences by position",
        EVERYBODY,
        (*OURS, *FLAX),
        {name: state_dict(TREES[name]) for name in (*CONTAINERS, *ROOTS)},
    ),
    Difference(
        "state dict with None",
        "Orbax's format has None for nodes without children",
        DIRECTORIES,
        (*OURS, *FLAX),
        {name: with_none(state_dict(CONTAINERS[name])) for name in EMPTY_NODES},
    ),
    Difference(
        "Orbax's containers",
        "Orbax's format has dicts with text keys, lists, and None for nodes without children",
        DIRECTORIES,
        ORBAX,
        {name: orbax_containers(TREES[name]) for name in (*CONTAINERS, *ROOTS)},
    ),
    Difference(
        "numpy scalar → Python number",
        "Orbax's format has only scalars",
        ("ours on", "flax on", "PyTree", "Manager"),
        PEERS,
        NUMBERS,
    ),
    Difference(
        "np.int64 → int",
        "Orbax stores an int as an int64, too; a target tells which it was",
        ("flax on", "PyTree", "Manager"),
        OURS,
        {"np.int64": -5},
    ),
    Difference(
        "numpy scalar → 0-d array",
        "StandardCheckpointer makes arrays of them when it saves",
        ("Standard",),
        EVERYBODY,
        {name: np.asarray(ZOO[name]) for name in NUMBERS},
    ),
    Difference(
        "complex → 0-d array",
        "our directories: Orbax has no complex scalar that all its readers take",
        ("ours on",),
        PEERS,
        {"complex": np.array(1 - 2j), "np.complex64": np.array(1 - 2j, np.complex64)},
    ),
    Difference(
        "as the integers it is stored as",
        "our directories: Orbax has no such type; the type is in metadata that only we read",
        ("ours on",),
        PEERS,
        {
            "bytes": np.array([0, 255], np.uint8),
            "np uint4": np.array([0, 15], np.uint8),
            "np datetime": np.array([2]),
            "np text": np.array([[97, 0, 0, 0, 98, 0, 0, 0], [99, 0, 0, 0, 0, 0, 0, 0]], np.uint8),
            "np bytes": np.array([[97, 98], [99, 0]], np.uint8),
            "np longdouble": ZOO["np longdouble"].view(np.uint8).reshape(2, -1),
        },
    ),
    Difference(
        "typed key → key data",
        "Orbax before 0.11.16 has no typed keys",
        ("ours on",) if not ORBAX_HAS_TYPED_KEYS else (),
        PEERS,
        _KEY_DATA,
    ),
    Difference(
        "typed key → key data",
        "Orbax 0.11 before 0.11.16 stores the data alone",
        ("flax on", *ORBAX) if not ORBAX_HAS_TYPED_KEYS else (),
        (*PEERS, *OURS),
        _KEY_DATA,
    ),
    Difference(
        "typed key → marked key data",
        "our msgpack files: Flax's have no typed keys",
        ("ours off",),
        FLAX,
        {name: _marked_key(ZOO[name]) for name in ("key", "rbg keys")},
    ),
    Difference(
        "native byte order",
        "Orbax's format has one byte order; the values are the same",
        DIRECTORIES,
        EVERYBODY,
        {"np big-endian": np.arange(3, dtype="<i4")},
    ),
    Difference(
        "lost when saved: bytes swapped",
        "Flax's msgpack has no byte order; what the array was is not in the file",
        ("flax off",),
        (*OURS, *FLAX),
        {"np big-endian": np.arange(3).astype(">i4").view("<i4")},
    ),
]
# What a peer says no to in what we wrote. It may refuse what a peer of its wrote, that is not a silent difference.
REFUSALS: dict[tuple[str, str], tuple[str, ...]] = {
    # Legacy Flax saves these dtypes, and does not know the names that it saved them by.
    **{("ours off", reader): ("np text", "np bytes") for reader in FLAX},
    # Orbax reads directories only.
    **{("ours off", reader): tuple(TREES) for reader in ORBAX},
}
REFUSED_BY_OLD_ORBAX = tuple(ROOTS) if version("orbax-checkpoint") < (0, 12) else ()


NOTHING = object()


@functools.cache
def accepted(writer: str, folder: Path) -> tuple[str, ...]:
    """The kinds of trees that a writer saves, found by saving ever smaller halves, or each on its own."""

    def search(names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            save(writer, names, folder)
        except Exception:
            half = len(names) // 2
            return search(names[:half]) + search(names[half:]) if half else ()
        return names

    # v1's threads wait for minutes, also at exit, for what failed beside them.
    tries = TREES if writer == "v1" else [tuple(ZOO), *ROOTS]
    return tuple(name for part in tries for name in search((part,) if isinstance(part, str) else part))


@functools.cache
def save(writer: str, names: tuple[str, ...], folder: Path) -> Saved:
    """One checkpoint of these kinds of trees, or of one that is a whole tree."""
    into = folder / f"{writer} {len(list(folder.iterdir()))}"
    into.mkdir()
    tree = ROOTS[names[0]] if names[0] in ROOTS else {name: ZOO[name] for name in names}
    return quietly(WRITERS[writer], into, tree)


def read(writer: str, reader: str, names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """What a reader gives back, by kind of tree; what it refuses is not there."""
    try:
        got = quietly(READERS[reader], save(writer, names, folder))
    except Exception:
        half = len(names) // 2
        halves = (names[:half], names[half:]) if half else ()
        return {name: value for part in halves for name, value in read(writer, reader, part, folder).items()}
    if got is None:
        return dict.fromkeys(names, NOTHING)
    return {names[0]: got} if names[0] in ROOTS else {name: got[name] for name in names}


def outcome(writer: str, reader: str, kind: str, got: Any) -> str:
    """Equal, the name of a documented difference, or what came back instead."""
    if got is NOTHING and reader in FLAX and writer in ("Manager", "v1"):
        return "nothing"  # Flax takes neither for a checkpoint, and returns the target, here None
    found = canonical(got)
    if found == canonical(TREES[kind]):
        return EQUAL
    for difference in DIFFERENCES:
        applies = writer in difference.writers and reader in difference.readers and kind in difference.instead
        if applies and found == canonical(difference.instead[kind]):
            return difference.name
    return f"UNDOCUMENTED: {TREES[kind]!r} came back as {got!r}"
