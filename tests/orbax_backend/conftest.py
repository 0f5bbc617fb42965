"""Trees that real Orbax also knows, and real Orbax itself, quietly."""

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.peers import ORBAX_HAS_TYPED_KEYS


@pytest.fixture(autouse=True)
def real_orbax_may_warn() -> Iterator[None]:
    """Deprecations inside Orbax and what it calls are not ours to mend; our own warnings stay errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(orbax|jax|etils|flax|asyncio)\b.*")
        warnings.filterwarnings("ignore", message=".*[Ss]harding.*", category=UserWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


@pytest.fixture
def common_tree() -> dict[str, Any]:
    """Every kind of leaf and container that real Orbax writes itself."""
    tree = {
        "params": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4, jnp.bfloat16)},
        "big": np.random.default_rng(0).random((60, 70)),
        "zeros": jnp.zeros((300, 10), jnp.float32),
        "flags": np.array([True, False]),
        "zero_d": np.array(2.5),
        "half": jnp.arange(5, dtype=jnp.float16),
        "small": jnp.array([-8, -1, 0, 7], jnp.int4),
        "fp8": jnp.arange(3).astype(jnp.float8_e4m3fn),
        "complex": np.array([1 + 2j, -0.0j], np.complex64),
        "step": 7,
        "huge": 2**63 + 5,
        "rate": 1e-3,
        "on": True,
        "name": "héllo\n",
        "list": [1, [2.5, "x"], {"deep": np.arange(3)}],
        "none": None,
        "empty_dict": {},
        "empty_list": [],
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "raw_key": jax.random.PRNGKey(5),
        "weird/na.me é%": {"a/b": 1, "x~1y": "tilde", "sp ace": np.int32([4])},
    }
    if not ORBAX_HAS_TYPED_KEYS:
        del tree["key"], tree["keys"]
    return tree
