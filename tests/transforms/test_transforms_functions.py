"""What the functions of transforms are given: by Orbax's documentation, and as far as code for real Orbax goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from orbax.checkpoint import transform_utils as real

from flax_ckpt_compat import transforms as ours
from flax_ckpt_compat.transforms import RestoreArgs, RestoreTransform, apply_transformations, restore_args

ARGS = RestoreArgs(np.ndarray, np.dtype("float32"))


def args_taken(*given: Any) -> int:
    """A function that takes whatever it is given."""
    return len(given)


class Method:
    """Something with methods, and callable."""

    def one(self, value: Any) -> Any:
        """Takes the value."""
        return "one"

    def __call__(self, value: Any, args: Any) -> Any:
        """Takes the value and its arguments."""
        return args


class Untold:
    """A function whose signature cannot be had, as with some that are written in C."""

    __signature__ = "none"

    def __call__(self, *given: Any) -> int:
        """Takes whatever it is given."""
        return len(given)


VALUE_FUNCTIONS: list[tuple[Callable[..., Any], Any]] = [
    (lambda value: "one", "one"),
    (lambda value, args: args, ARGS),
    (lambda value, args=None: args, None),
    (lambda value, *, args=None: args, None),
    (lambda value, /, args: args, ARGS),
    (args_taken, 2),
    (functools.partial(lambda how, value: how, "how"), "how"),
    (functools.partial(lambda value, args: args, args="mine"), "mine"),
    (Method().one, "one"),
    (Method(), ARGS),
    (str, "7"),
    (int, 7),
    (float, 7.0),
    (np.float32, np.float32(7)),
    (np.sqrt, np.sqrt(7)),
    (np.transpose, np.asarray(7)),
    (jnp.asarray, np.asarray(7)),
    (jax.jit(lambda value: value + 1), np.asarray(8)),
    (np.asarray, np.asarray(7)),
    (max, TypeError),
    (Untold(), 1),
]


@pytest.mark.parametrize(("function", "expected"), VALUE_FUNCTIONS)
def test_value_fn_of_a_restore_transform(function: Callable[..., Any], expected: Any) -> None:
    """RestoreArgs go to functions that have to have them, and to none that works with the value alone."""
    transform = RestoreTransform(value_fn=function)
    if expected is TypeError:
        with pytest.raises(TypeError):
            ours.call_value_fn(transform, 7, ARGS)
        return
    got = ours.call_value_fn(transform, 7, ARGS)
    assert got is expected or got == expected


def test_a_transforms_functions_never_get_restore_args() -> None:
    """A Transform's functions get what Orbax's documentation says: the value; the key and the tree."""
    for side in (ours, real):
        assert ours.call_value_fn(side.Transform(value_fn=args_taken), 7, ARGS) == 1
        assert ours.call_multi_value_fn(side.Transform(multi_value_fn=args_taken), "k", {}, ARGS) == 2
        with pytest.raises(TypeError):
            ours.call_value_fn(side.Transform(value_fn=lambda value, args: args), 7, ARGS)


MULTI_FUNCTIONS: list[tuple[Callable[..., Any], Any, Any]] = [
    (lambda key, tree: key, "k", "k"),
    (lambda key, tree, args: args, ARGS, ARGS),
    (lambda key, tree, args=None: args, ARGS, None),
    (args_taken, 3, 2),
    (Untold(), 3, 2),
    (functools.partial(lambda how, key, tree, args: args, "how"), ARGS, ARGS),
]


@pytest.mark.parametrize(("function", "restoring", "in_memory"), MULTI_FUNCTIONS)
@pytest.mark.parametrize("side", [ours, real])
def test_multi_value_fn_of_a_restore_transform(
    side: Any, function: Callable[..., Any], restoring: Any, in_memory: Any
) -> None:
    """Restoring passes RestoreArgs to whatever can take them, as Orbax; in memory, as Orbax, only where required."""
    transform = side.RestoreTransform(multi_value_fn=function)
    assert ours.call_multi_value_fn(transform, "k", {}, ARGS) == restoring
    assert ours.call_multi_value_fn(transform, "k", {}, ARGS, in_memory=True) == in_memory


def test_in_memory_functions_get_the_args_of_the_new_leaf() -> None:
    """RestoreArgs of apply_transformations are those of the new tree's leaf."""
    transforms = {
        "a": RestoreTransform("b", value_fn=lambda value, args: value.astype(args.dtype)),
        "c": RestoreTransform(multi_value_fn=lambda key, tree, args: (key, args.restore_type)),
    }
    got = apply_transformations({"b": np.arange(3)}, transforms, {"a": np.zeros(3, "f4"), "c": 1})
    assert got["a"].dtype == np.float32
    assert got["c"] == ("c", int)


def test_restore_args_are_orbaxs() -> None:
    """RestoreArgs of arrays, abstract arrays and Python values say what Orbax's constructed ones say."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = {
        "numpy": np.ones((2, 3), "f2"),
        "jax": jnp.ones((2, 3), "bfloat16"),
        "abstract": jax.ShapeDtypeStruct((2,), np.dtype("int8"), sharding=sharding),
        "int": 1,
        "float": 1.5,
        "str": "text",
    }
    for name, expected in orbax.checkpoint.checkpoint_utils.construct_restore_args(tree).items():
        got = restore_args(tree[name])
        assert got.restore_type is expected.restore_type, name
        if name not in ("int", "float", "str"):
            assert got.dtype == expected.dtype, name
        for field in ("sharding", "global_shape"):
            assert getattr(got, field) == getattr(expected, field, None), (name, field)


def test_restore_args_of_other_leaves() -> None:
    """A leaf without a value asks for nothing, a numpy scalar for its own type, an unplaced abstract array for any."""
    assert restore_args(None) == RestoreArgs()
    assert restore_args(np.float16(1)) == RestoreArgs(np.float16, np.dtype("float16"))
    unplaced = restore_args(jax.ShapeDtypeStruct((2,), np.dtype("int8")))
    assert unplaced == RestoreArgs(jax.Array, np.dtype("int8"), None, (2,))
