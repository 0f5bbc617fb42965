"""Random trees, and comparing trees to the last bit."""

import contextlib
import math
import struct
from typing import Any

import jax
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.numbered_names import ARRAYS_PLACEHOLDER
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, iter_leaves

NUMPY_DTYPES = [np.dtype(name) for name in (*"?bhiqBHIQefdFD", "M8[s]", "m8[ns]", "U3", "S2")]
ML_DTYPES = [
    np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4")
]


def fill(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray[Any, Any]:
    """An array of random bit patterns (NaN payloads and all) that are valid for the dtype."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "U":
        return rng.integers(32, 0x2000, shape).astype(f"U{dtype.itemsize // 4}").astype(dtype)
    if dtype.kind == "b" or dtype.name in ("int4", "uint4"):
        return rng.integers(0, 2, shape).astype(dtype)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


@st.composite
def arrays(draw: Any, dtypes: list[np.dtype[Any]] | None = None) -> np.ndarray[Any, Any]:
    """Arrays of every dtype, 0-d, empty, in C order, F order or strided."""
    dtype = draw(st.sampled_from(dtypes or NUMPY_DTYPES + ML_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    array = fill(shape, dtype, draw(st.integers(0, 2**32)))
    layout = draw(st.sampled_from("CFS"))
    if layout == "F":
        return np.asfortranarray(array) if shape else array
    return array[::-1] if layout == "S" and shape else array


def numbers() -> st.SearchStrategy[Any]:
    """Python numbers, with every width boundary of msgpack's ints."""
    edges = [edge + step for edge in (2**n for n in (5, 7, 8, 15, 16, 31, 32, 63)) for step in (-1, 0, 1)]
    edges += [-edge for edge in edges if edge <= 2**63] + [2**64 - 1]
    return st.one_of(
        st.sampled_from(edges),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.booleans(),
        st.complex_numbers(),
    )


def texts() -> st.SearchStrategy[Any]:
    """Text and bytes, with every length boundary of msgpack's headers."""
    lengths = st.sampled_from([0, 1, 31, 32, 255, 256, 65535, 65536])
    return st.one_of(
        # Such a text refers to a folder of arrays; hypothesis takes texts from the source.
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
            lambda text: not text.startswith(ARRAYS_PLACEHOLDER)
        ),
        st.binary(max_size=20),
        lengths.map(lambda n: "x" * n),
        lengths.map(bytes),
    )


def leaves() -> st.SearchStrategy[Any]:
    """Every kind of leaf that Flax's msgpack files hold."""
    scalars = arrays().map(lambda array: array.reshape(-1)[0] if array.size else np.float32(1.5))
    return st.one_of(arrays(), scalars, numbers(), texts(), st.none())


def keys() -> st.SearchStrategy[str]:
    """Names of children: unicode, empty, with separators."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def state_dicts() -> st.SearchStrategy[Any]:
    """Nested dicts of leaves, or a bare leaf."""
    return st.recursive(leaves(), lambda inner: st.dictionaries(keys(), inner, max_size=5), max_leaves=12)


def to_branches(tree: Any) -> Any:
    """A tree of dicts, lists, tuples and namedtuples as the neutral tree; typed keys are taken apart."""
    if isinstance(tree, dict):
        children = {str(key): to_branches(value) for key, value in tree.items()}
        return Branch(children, Container.DICT, frozenset(str(key) for key in tree if isinstance(key, int)))
    if hasattr(tree, "_fields"):
        return Branch({name: to_branches(getattr(tree, name)) for name in tree._fields}, Container.NAMEDTUPLE)
    if isinstance(tree, list | tuple):
        children = {str(index): to_branches(value) for index, value in enumerate(tree)}
        return Branch(children, Container.LIST if isinstance(tree, list) else Container.TUPLE)
    if isinstance(tree, jax.Array) and jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
        name = str(jax.random.key_impl(tree))
        return KeyData({"fry": "threefry2x32", "urbg": "unsafe_rbg"}.get(name, name), jax.random.key_data(tree))
    return tree


def read_whole(backend: Any, path: Any, *, verify: bool = False) -> Any:
    """A checkpoint as a backend's reader gives it, all leaves at once, in dicts, lists and tuples."""
    with contextlib.closing(backend.open(location_of(path), verify=verify)) as reader:
        handles = [leaf for _, leaf in iter_leaves(reader.tree) if isinstance(leaf, LeafHandle)]
        return to_values(reader.tree, dict(zip(map(id, handles), reader.read(handles), strict=True)))


def to_values(node: Any, values: dict[int, Any]) -> Any:
    """A neutral tree of handles as plain dicts, lists and tuples of what ``values`` has for each handle's id."""
    if not isinstance(node, Branch):
        return None if node is None else values[id(node)]
    children = {
        int(name) if name in node.int_keys else name: to_values(child, values) for name, child in node.children.items()
    }
    if node.container is Container.LIST:
        return list(children.values())
    return tuple(children.values()) if node.container is Container.TUPLE else children


def _bits(array: Any) -> bytes:
    """The bits of all values; of x86's 80-bit floats without the six bytes of padding, which hold anything."""
    data = np.asarray(array).tobytes()
    if array.dtype.type is not np.longdouble or array.dtype.itemsize != 16 or np.finfo(np.longdouble).nmant != 63:
        return data
    return b"".join(data[start : start + 10] for start in range(0, len(data), 16))


def fingerprint(tree: Any) -> Any:
    """Something that is equal for two trees only if types, dtypes, shapes and bits are."""
    if isinstance(tree, dict):
        return {key: fingerprint(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [fingerprint(value) for value in tree]
    if isinstance(tree, KeyData):
        return ("key", tree.impl, fingerprint(tree.data))
    if isinstance(tree, np.ndarray | np.generic):
        kind = "array" if isinstance(tree, np.ndarray) else "scalar"
        return (kind, tree.dtype.name, tree.dtype.byteorder, tree.shape, _bits(tree))
    if isinstance(tree, float):
        return ("float", struct.pack("<d", tree))
    if isinstance(tree, complex):
        return ("complex", struct.pack("<dd", tree.real, tree.imag))
    return (type(tree).__name__, tree)
