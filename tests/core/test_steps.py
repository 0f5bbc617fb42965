"""Names and numbers of checkpoints: what is a step, how it is spelled, in what order."""

import fractions
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat._discovery import steps
from flax_ckpt_compat._save import request
from flax_ckpt_compat.errors import ArgumentError

finite = st.one_of(st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False))


@given(finite)
def test_every_finite_number_survives_its_name(number: float) -> None:
    """What a step is spelled as is Flax's spelling, and read back as the same number, ints beyond 2**53 too."""
    text = steps.step_text(number)
    assert steps.parse_step(text) == number and "p_" + text == flax_checkpoints._checkpoint_path("", number, "p_")


@pytest.mark.parametrize(
    "step",
    [
        np.int32(7), np.uint8(7), np.float32(0.3), np.float64(0.3), np.float16(0.3), ml_dtypes.bfloat16(0.5),
        np.array(7), np.array(0.3, np.float32), jnp.int32(7), jnp.float32(0.3), jnp.bfloat16(0.5), -3, 1e22, 5.0,
    ],
)  # fmt: skip
def test_scalars_of_numpy_and_jax_are_spelled_as_flax_spells_them(step: Any) -> None:
    """numpy scalars and 0-d arrays of numpy and jax are steps."""
    assert "p_" + steps.step_text(step) == flax_checkpoints._checkpoint_path("", step, "p_")


@pytest.mark.parametrize(
    "step",
    [
        True, np.True_, jnp.array(True), None, 1j, np.nan, np.inf, -np.inf, np.float32("inf"), [1], np.array([1]),
        jnp.zeros(2), fractions.Fraction(1, 2), 10**400, b"1", "", ".", "..", "tmp", "a/b", "a\0b", "inf", "-NaN",
    ],
)  # fmt: skip
def test_what_is_no_step_is_refused(step: Any) -> None:
    """Bools, non-finite numbers, arrays of several elements and text that no name can hold raise ArgumentError."""
    with pytest.raises(ArgumentError):
        steps.step_text(step)


def test_a_step_without_a_value_is_refused() -> None:
    """Inside of jit and other transformations a step has no value; a donated one has none any more."""
    for transform, step in ((jax.jit, 3), (jax.grad, 3.0), (jax.vmap, jnp.arange(2))):
        with pytest.raises(ArgumentError, match="outside of jit"):
            transform(lambda step: steps.step_text(step) and step)(step)
    deleted = jnp.array(3)
    deleted.delete()
    with pytest.raises(ArgumentError, match="deleted"):
        steps.step_text(deleted)


def test_numbers_are_read_as_float_reads_them() -> None:
    """Flax's float grammar; names with more or less than one finite number after the prefix are no numeric ones."""
    for text in ("7", "-1.5", "1e5", ".5", "1.", "+1", "007", "1e+22", "-0.0"):
        assert steps.parse_step(text) == float(text)
    assert steps.parse_step(f"{2**53 + 1}") == 2**53 + 1  # which is no float
    for text in ("", "-", ".", "e5", "1_000", "1-2", "1.10.1", "inf", "nan", "1e400", " 1", "1\n", "0x1"):
        assert steps.parse_step(text) is None


@given(st.lists(st.integers(-1000, 1000) | st.integers(-4000, 4000).map(lambda n: n / 4), unique=True))
def test_order_is_flaxs_natural_order(numbers: list[float]) -> None:
    """Numeric checkpoints are ordered as Flax's natural_sort orders them."""
    names = [f"p_{number}" for number in numbers]
    assert steps.in_order(names, "p_") == flax_checkpoints.natural_sort(names)


@pytest.mark.parametrize("prefix", ["ck[1]_", "ck*_", "ck?_", "a-", "v1.", "run2", "e", "", "x^$|("])
def test_prefixes_are_literal_text(prefix: str) -> None:
    """Signs, points, digits and glob characters in a prefix mean themselves."""
    names = [f"{prefix}10", f"{prefix}9", "ck1_3", "v2.5", f"z{prefix}1", f"{prefix}tmp"]
    assert steps.in_order(names, prefix) == [f"{prefix}9", f"{prefix}10"]


def test_text_and_longer_prefixes() -> None:
    """Text may end in a number; a separator before it makes it the step of a longer prefix; temporaries are neither."""
    names = ["c_best", "c_best_1", "c_7", "c_final-ema", "c_v2.", "c_epoch10", "c_v1.5", "c__10", "c_lr-3", "d_best"]
    never = ["c_tmp", "c_7_gda", "c_tmp_gda", "c_", "d_7", "c_7.partial_save"]
    never += ["c_7.orbax-checkpoint-tmp", "c_7.orbax-checkpoint-tmp-12"]
    texts = ["c_best", "c_final-ema", "c_v2.", "c_epoch10", "c_v1.5"]
    longer = ["c_best_1", "c__10", "c_lr-3"]
    assert [name for name in names + never if steps.is_text(name, "c_")] == texts
    assert [name for name in names + never if steps.is_text(name, "c_", of_longer_prefix=True)] == longer
    assert steps.in_order(names + never, "c_") == ["c_7"]


def test_counts() -> None:
    """0 and infinity keep all, any whole number is a count, and the rest an error, where Flax saves first."""
    for keep in (0, 0.0, np.inf, float("inf"), np.int64(0)):
        assert request.check_keep(keep) == 0
    for keep in (1e6, np.int32(3), 2.0, np.float32(4)):
        assert request.check_keep(keep) == keep
    for keep in (-1, -0.5, math.nan, 1.5, None, "x", [1], -np.inf, 1j):
        with pytest.raises(ArgumentError):
            request.check_keep(keep)
    for every in ("x", [1], math.nan, 1j):
        with pytest.raises(ArgumentError):
            request.check_every(every)
    assert [request.check_every(none) for none in (None, 0, False)] == [None] * 3


def test_order_does_not_depend_on_the_list() -> None:
    """Two spellings of one step have one order, however the file system lists them."""
    names = ["c_7", "c_07", "c_7.0", "c_6"]
    for listed in (names, names[::-1], sorted(names)):
        assert steps.in_order(listed, "c_") == ["c_6", "c_07", "c_7", "c_7.0"]
