"""Random trees, targets and settings: what a plan says that a restore raises is what the restore raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from flax_ckpt_compat import checkpoints, config, plan_restore, restore, rules, save
from flax_ckpt_compat.transforms import Transform
from tests.support.samples import Pair
from tests.support.saves import new_folder

SHAPES = [(), (1,), (2,), (2, 3)]
DTYPES = [np.float32, np.float64, np.int32, np.int64, np.bool_, np.complex64, jnp.bfloat16, ml_dtypes.int4]
DTYPES += [ml_dtypes.float8_e8m0fnu]
NUMBERS = [0, 2**40, True, 2.5, float("nan"), 1j, np.float32(1.5), np.int64(7)]


def array(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of small numbers."""
    return np.ones(shape).astype(dtype)


def abstract(shape: tuple[int, ...], dtype: Any, axes: int | None) -> Any:
    """An abstract leaf, with a sharding of at most so many axes, or without one."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    axes = axes if axes is None else min(axes, len(shape))
    spec = None if axes is None else PartitionSpec(*[None] * (axes - 1), *["x"] * (axes > 0))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if spec is None else NamedSharding(mesh, spec))


def keys(count: int | None) -> Any:
    """A typed key, or an array of them."""
    key = jax.random.key(0)
    return key if count is None else jax.random.split(key, count)


ARRAYS = st.builds(array, st.sampled_from(SHAPES), st.sampled_from(DTYPES))
KEYS = st.builds(keys, st.sampled_from([None, 2]))
# Text as an array has no cast to numbers, and the data of a key looks like any array.
ODD_ARRAYS = st.sampled_from([np.array(["x", "y"]), np.zeros(2, np.uint32), np.zeros((2, 2), np.uint32)])
COMMON = [ARRAYS, KEYS, st.sampled_from([np.zeros(2, np.uint32), *NUMBERS]), st.sampled_from(["text", b"bytes", None])]
STORED = st.one_of(*COMMON)
WANTED = st.one_of(
    *COMMON,
    ODD_ARRAYS,
    st.builds(jnp.zeros, st.sampled_from(SHAPES), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32])),
    st.builds(abstract, st.sampled_from(SHAPES), st.sampled_from(DTYPES[2:]), st.sampled_from([None, 0, 1, 2])),
    st.sampled_from([PartitionSpec("x"), np.float32, abs, {}, [], ()]),
    KEYS.map(lambda key: jax.ShapeDtypeStruct(key.shape, key.dtype)),
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Small trees over few names, so that stored and target trees meet."""
    inner = st.recursive(
        leaves,
        lambda child: st.one_of(
            st.dictionaries(st.sampled_from("ab"), child, max_size=2),
            st.lists(child, max_size=3),
            st.lists(child, max_size=3).map(tuple),
            st.builds(Pair, child, child),
        ),
        max_leaves=4,
    )
    return st.one_of(st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), inner)


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "missing_leaves": st.sampled_from(["error", "warn", "ignore"]),
        "shape_mismatch": st.sampled_from(["error", "warn", "ignore"]),
        "kind_mismatch": st.sampled_from(["error", "warn", "ignore"]),
        "dtype": st.sampled_from(["stored", "target"]),
        "structure": st.sampled_from(["flax", "stored"]),
    },
)
GIVEN: list[Any] = [
    None,
    {},
    {"a": Transform(original_key="b")},
    {"a|b/.*": Transform(use_fallback=True), "c": Transform(value_fn=lambda value: value)},
    [rules.move("b", "a")],
    [rules.from_target("a")],
]


def error_of(call: Callable[[], Any]) -> str | None:
    """The name of the error's class, or None."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


def planned(path: str, target: Any, transforms: Any, **policies: Any) -> str | None:
    """What the plan says, or what it raises itself, as for a rule that does not fit."""
    found: list[str | None] = []
    failed = error_of(lambda: found.append(plan_restore(path, target, transforms=transforms, **policies).raises))
    return failed or found[0]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["msgpack", "orbax"])
@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(stored=trees(STORED), target=trees(WANTED), policies=SETTINGS, transforms=st.sampled_from(GIVEN))
@example({"a": {"b": np.ones(2)}}, {"a": np.zeros(2)}, {}, None)
@example({"a": 2**40}, {"a": abstract((2,), np.int32, 1)}, {}, None)
@example({"a": np.ones(2)}, {"a": np.array(["x", "y"])}, {"dtype": "target"}, None)
@example({"a": np.ones(())}, {"a": abstract((2, 2), np.int32, 2)}, {"shape_mismatch": "ignore"}, None)
@example({"a": [1, 2, 3]}, {"a": [0]}, {}, {})
@example({"a": np.ones(()), "k": keys(2)}, {"a": np.zeros(2), "k": keys(None)}, {}, None)
def test_the_plan_raises_what_the_restore_raises(
    format: Any, stored: Any, target: Any, policies: dict[str, Any], transforms: Any
) -> None:
    """For restore by default and with any policies, and for restore_checkpoint under its own defaults."""
    with new_folder() as folder:
        path = save(f"{folder}/x", stored, format=format)
        told = planned(path, target, transforms, **policies)
        assert told == error_of(lambda: restore(path, target, transforms=transforms, **policies))
        loose = {
            "shape_mismatch": "warn",
            "kind_mismatch": "warn",
            "structure": "flax",
            "must_exist": False,
            **policies,
        }
        if transforms is not None and not isinstance(transforms, list):
            loose["missing_leaves"] = "ignore"
        told = planned(path, target, transforms, **loose)
        with config.override(**policies):
            raised = error_of(lambda: checkpoints.restore_checkpoint(path, target, orbax_transforms=transforms))
        assert told == raised
