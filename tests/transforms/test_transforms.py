"""Transforms one by one: what Orbax's documentation and published tests say, their functions, the messages."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from orbax.checkpoint import transform_utils as real

from flax_ckpt_compat import restore, rules, save
from flax_ckpt_compat import transforms as ours
from flax_ckpt_compat.errors import NameCollisionError, TransformError
from flax_ckpt_compat.transforms import (
    RestoreArgs,
    RestoreTransform,
    Transform,
    apply_transformations,
    restore_args,
)
from flax_ckpt_compat.transforms._resolve import Transforms


def double(value: Any) -> Any:
    """Any value_fn."""
    return value * 2


@pytest.mark.parametrize("name", ["Transform", "RestoreTransform"])
def test_the_fields_are_orbaxs(name: str) -> None:
    """The fields have Orbax's names, order and defaults, so that positional arguments mean the same."""

    def fields(side: Any) -> list[tuple[str, Any]]:
        return [(field.name, field.default) for field in dataclasses.fields(getattr(side, name))]

    assert fields(ours) == fields(real)


FIELDS: dict[str, list[Any]] = {
    "original_key": [None, "", "a"],
    "use_fallback": [False, True],
    "value_fn": [None, double],
    "multi_value_fn": [None, double],
    "multi_value_fn_input_args": [None, {}, {"a": None}],
}


@pytest.mark.parametrize("for_restore", [False, True])
def test_legal_combinations_are_orbaxs(for_restore: bool) -> None:
    """Exactly the combinations that fail Orbax's assertions raise, with a message that names the fields."""
    name = "RestoreTransform" if for_restore else "Transform"
    names = list(FIELDS)[: 5 if for_restore else 4]
    for values in itertools.product(*(FIELDS[field] for field in names)):
        given = dict(zip(names, values, strict=True))
        try:
            getattr(real, name)(**given)
        except AssertionError:
            with pytest.raises(TransformError, match=name) as caught:
                getattr(ours, name)(**given)
            told = [field for field in names if field in str(caught.value) and given[field] not in (None, False)]
            assert told, (given, caught.value)
        else:
            assert dataclasses.asdict(getattr(ours, name)(**given)) == given


@pytest.mark.parametrize("side", [ours, real])
@pytest.mark.parametrize(
    "change",
    [
        {"multi_value_fn": double, "value_fn": double},
        {"use_fallback": True, "original_key": "b"},
        {"original_key": "b", "multi_value_fn": double},
        {"original_key": 3},
    ],
)
def test_what_was_made_illegal_afterwards_raises_at_use(side: Any, change: dict[str, Any]) -> None:
    """A transform that was changed into nonsense after it was made is refused where it is used, with its key."""
    transform = side.Transform()
    for name, value in change.items():
        setattr(transform, name, value)
    with pytest.raises(TransformError, match=r"'x/a'.*" + next(iter(change))):
        Transforms({"x": {"a": transform}})


TWICE = {"a/b": 1, "a": {"b": 2}}
KEPT = Transform(use_fallback=True)
# What is applied to which tree for which new one, the class of the error and what it says.
REFUSED: list[tuple[Any, Any, Any, Any, str]] = [
    *(
        ({}, {"x": [leaf]}, {"x": {}}, TransformError, rf"expected a Transform at x/0, found {type(leaf).__name__}")
        for leaf in (3, "b/c", Transform, double, np.ones(2))
    ),
    ({}, {"x(": Transform()}, {"x": {}}, TransformError, r"'x\('.*re\.escape"),
    ({"x": 1}, {"(x)": Transform(r"\2")}, {"x": 0}, TransformError, r"'\(x\)'.*group reference 2"),
    ({}, {"a/b": Transform(), "a": {"b": Transform()}}, {"x": {}}, NameCollisionError, "a/b"),
    # An absent source, also where a later transform replaces it, and an empty one that none replaces.
    ({"a1": 1}, {"(.)1": Transform("z/q")}, {"a1": 0}, TransformError, r"'\(\.\)1'.*takes z/q for a1,"),
    ({"b": {"c": 2}}, {"x": Transform(("b", "c/d"))}, {"x": 0}, TransformError, r"\('b', 'c/d'\)"),
    ({"a": 1}, {".*": Transform("e"), "a": KEPT}, {"a": 0}, TransformError, r"'\.\*' takes e for a,"),
    # Nothing is chosen in silence where a key contains a separator and so names two leaves.
    (TWICE, {"x": Transform("a/b")}, {"x": 0}, NameCollisionError, r"'a/b' means 2 leaves.*\('a/b',\).*tuple"),
    ({}, {}, TWICE, NameCollisionError, "'a/b'"),
]


@pytest.mark.parametrize(("old", "transforms", "new", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(old: Any, transforms: Any, new: Any, error: Any, message: str) -> None:
    """With the key of the transform, its type, or the leaf."""
    with pytest.raises(error, match=message):
        apply_transformations(old, transforms, new)


def test_an_empty_source_and_a_fallback_to_what_is_stored() -> None:
    """The error for an absent source has the leaf; an empty one that a fallback keeps is absent, too."""
    with pytest.raises(TransformError, match=r"'\.\*' takes e for a,") as caught:
        Transforms({".*": Transform("e"), "a": KEPT}).resolve("a", lambda _: False, is_empty=lambda one: one == "e")
    assert caught.value.leaf == "a"
    with pytest.raises(TransformError, match="use_fallback"):
        apply_transformations({}, {"f": KEPT}, {"f": 1}, default_to_original=False)


@pytest.mark.parametrize("key", [("b/c", "d"), ("b/c", 0)])
def test_a_tuple_is_an_exact_key_path(key: tuple[Any, ...]) -> None:
    r"""A tuple as original_key, which Orbax documents and cannot apply, names one leaf: no separators, no groups."""
    original = {"b/c": {str(key[1]): 1}, "b": {"c": {str(key[1]): 2}}, r"\1": 3}
    assert apply_transformations(original, {"(.*)": Transform(key)}, {"x": 0}) == {"x": 1}
    assert apply_transformations(original, {"(.*)": Transform((r"\1",))}, {"x": 0}) == {"x": 3}
    with pytest.raises(TypeError):
        real.apply_transformations(original, {"(.*)": real.Transform(key)}, {"x": 0})
    found = apply_transformations(TWICE, {"x": Transform(("a/b",)), "y": Transform(("a", "b"))}, {"x": 0, "y": 0})
    assert found == {"x": 1, "y": 2}


def test_an_absent_source_behind_a_rule_is_told(tmp_path: Path) -> None:
    """The error of a dict of transforms that follows a rule names the file and the leaf."""
    path = save(tmp_path, {"b": 1}, step=1)
    with pytest.raises(TransformError, match="takes b for a") as caught:
        restore(path, {"a": 0, "b2": 0}, transforms=[rules.rename("b", "b2"), {"a": Transform(original_key="b")}])
    assert (caught.value.path, caught.value.leaf) == (path, "a")


def test_only_the_winners_function_is_called() -> None:
    """Functions of transforms that a later one overrides are not called; Orbax calls them all."""
    called: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        return lambda *given: called.append(name) or name

    transforms = {
        "(a)": Transform(value_fn=noting("first")),
        ".": Transform(multi_value_fn=noting("second")),
        "a": Transform(value_fn=noting("third")),
    }
    assert apply_transformations({"a": 1}, transforms, {"a": 0}) == {"a": "third"}
    assert called == ["third"]
    assert real.apply_transformations({"a": 1}, transforms, {"a": 0}) == {"a": "third"}


def test_kept_leaves_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Leaves that neither transforms nor the old tree know are logged; those that were meant to stay are not."""
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        apply_transformations({"a": 1}, {"f": Transform(use_fallback=True)}, {"a": 0, "f": 1, "new": {"w": 2, "v": 3}})
    (record,) = caplog.records
    assert record.name == "flax_ckpt_compat"
    assert "new/v, new/w" in record.getMessage()
    assert "f," not in record.getMessage()


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
