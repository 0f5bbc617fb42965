"""A few random cases of every kind, the same in every run; ``python -m tests.random_cases`` draws others."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.random_cases.kinds import KINDS, Kind
from tests.random_cases.proposals import case, followed, verdict
from tests.random_cases.restores import check_plan
from tests.support.profiles import examples


@pytest.mark.parametrize("kind", KINDS[:4], ids=lambda kind: kind.name)
def test_a_few_cases(kind: Kind) -> None:
    """Of saves fewer, which take longer; those against Orbax have a test of their own."""
    kind.run(9, examples(5 if kind.name.startswith("saves") else 30, 12))


def placed(*shape: int) -> Any:
    """An abstract leaf with a sharding."""
    spec = PartitionSpec(*[None] * (len(shape) - 1), *["x"] * bool(shape))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, spec))


KEY = jax.random.key(0)
FOUND: list[tuple[Any, Any, dict[str, Any]]] = [
    ({"a": {"b": np.ones(2)}}, {"a": np.zeros(2)}, {}),
    ({"a": 2**40}, {"a": placed(2)}, {}),
    ({"a": np.ones(2)}, {"a": np.array(["x", "y"])}, {"dtype": "target"}),
    ({"a": np.ones(())}, {"a": placed(2, 2)}, {"shape_mismatch": "ignore"}),
    ({"a": [1, 2, 3]}, {"a": [0]}, {"transforms": {}}),
    ({"a": np.ones(3, np.float32)}, {"a": np.zeros(3, np.float16)}, {"dtype": "target"}),
    ({"a": np.ones(3, np.float32)}, {"a": jax.ShapeDtypeStruct((3,), jax.numpy.bfloat16)}, {}),
    (
        {"a": np.float32(2), "b": 3, "c": 4},
        {"a": 0, "b": np.float32(1), "c": np.zeros((), np.int16)},
        {"dtype": "target"},
    ),
    ({"a": 1}, {"b": np.float32}, {}),
    ({"a": 1}, {"b": np.float32}, {"missing_leaves": "ignore"}),
    ({"a": np.ones(()), "k": jax.random.split(KEY, 2)}, {"a": np.zeros(2), "k": KEY}, {"transforms": {}}),
]


@pytest.mark.parametrize(("tree", "target", "options"), FOUND)
def test_plans_that_said_something_else(tree: Any, target: Any, options: dict[str, Any], flag: bool) -> None:
    """Than the restore did: found by chance."""
    check_plan((tree, target), options, flag)


@pytest.mark.slow
def test_certain_proposals_are_right_when_pasted() -> None:
    """Ports of well-known models: what is certain is right, also when it is pasted into a restore of either format."""
    certain = 0
    for seed in range(400):
        one = case(seed)
        found, suggestion, wrong = verdict(one)
        assert found != "certain wrong", (seed, one.title, wrong, str(suggestion))
        if found == "certain right" and suggestion is not None:
            certain += 1
            wrong = followed(one, suggestion)
            assert not wrong, (seed, one.title, wrong, str(suggestion))
    assert certain > 100  # of 400: else the cases are no test
