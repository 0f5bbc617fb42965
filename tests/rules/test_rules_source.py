"""What a rule says of itself: Python that makes it again, in its source and in its errors; templates filled in."""

from __future__ import annotations

import re

import cloudpickle
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from flax_ckpt_compat import rules

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
INTS = st.integers(-3, 9) | st.integers(-3, 9).map(np.int64) | st.integers(0, 9).map(np.uint8)
NUMBERS = (
    st.integers(-(2**70), 2**70)
    | st.floats()
    | st.complex_numbers()
    | st.booleans()
    | st.floats(width=32).map(np.float32)
    | st.floats(width=16).map(ml_dtypes.bfloat16)
    | st.complex_numbers().map(np.complex128)
    | st.floats(width=32).map(jnp.float32)
    | st.just(np.array(3.5))
)
DTYPES = st.sampled_from(
    ["bfloat16", "f4", np.float32, jnp.float16, jnp.bfloat16, ml_dtypes.int4, np.dtype(">i4"), float, int, ">f8"]
)
NAMES = st.lists(TEXTS, min_size=2, max_size=3, unique=True)
ESCAPED = TEXTS.map(re.escape)
NEW_NAMES = TEXTS.map(lambda text: text.replace("\\", "/"))
RULES = st.one_of(
    st.builds(rules.rename, ESCAPED, NEW_NAMES),
    st.builds(rules.rename, st.dictionaries(ESCAPED, NEW_NAMES, min_size=1)),
    st.builds(rules.copy, ESCAPED, NEW_NAMES),
    st.builds(rules.move, ESCAPED, NEW_NAMES),
    st.builds(rules.drop, ESCAPED, ESCAPED.map(np.str_)),
    st.builds(rules.wrap, TEXTS, at=ESCAPED),
    st.builds(rules.unwrap, ESCAPED, ESCAPED),
    st.builds(rules.stack, st.just(r"layer_(\d+)"), TEXTS, INTS),
    st.builds(rules.unstack, ESCAPED, st.just("l{}"), axis=INTS),
    st.builds(rules.fuse, NAMES | NAMES.map(tuple), TEXTS, INTS),
    st.builds(
        rules.split,
        ESCAPED,
        st.just(("a", "b")),
        axis=INTS,
        sizes=st.tuples(INTS, INTS).map(list) | st.none(),
    ),
    st.builds(rules.transpose, ESCAPED, st.permutations(range(3)) | st.just(np.array([1, 0]))),
    st.builds(rules.reshape, ESCAPED, st.just((2, np.int32(3), -1))),
    st.builds(rules.cast, ESCAPED, DTYPES),
    st.builds(rules.pad, ESCAPED, INTS, INTS, NUMBERS | st.just("target")),
    st.builds(rules.cut, ESCAPED, INTS.map(abs), INTS),
    st.builds(rules.from_target, ESCAPED, ESCAPED),
    st.builds(rules.optimizer_state, ESCAPED, ESCAPED | st.none()),
    st.builds(rules.pre_linen, ESCAPED),
    st.builds(rules.pre_optax),
)


@given(RULES)
@example(rules.pad("w", 1, value=complex(0.0, -0.0)))
@example(rules.pad("w", 1, value=complex(-0.0, 0.0)))
def test_the_source_makes_an_equal_rule(rule: rules.Rule) -> None:
    """Whatever a rule was given, arrays and numpy's numbers and dtypes too, its source needs nothing but ``rules``."""
    again = eval(rule.source, {"rules": rules})
    assert again == rule
    assert str(again) == rule.source


@given(RULES)
def test_rules_reach_workers_on_other_machines(rule: rules.Rule) -> None:
    """Executors send them with cloudpickle, which takes functions by value, and no context variables."""
    again = cloudpickle.loads(cloudpickle.dumps(rule))
    assert again == rule and again.source == rule.source
