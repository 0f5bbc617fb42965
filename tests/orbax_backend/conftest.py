"""Trees that real Orbax also knows, and real Orbax itself, quietly."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.peers import ORBAX_HAS_TYPED_KEYS, ocp_v1, pytree_handler

Write = Callable[[Path, Any], Path]


def pytree(*, cut: bool = False, **options: Any) -> Write:
    """A writer by Orbax's handler of trees; ``cut`` stores arrays in several chunks, some of them in the index."""

    def write(path: Path, tree: Any) -> Path:
        save_args = (
            {name: ocp.SaveArgs(chunk_byte_size=value.nbytes // 6) for name, value in tree.items()} if cut else None
        )
        ocp.Checkpointer(pytree_handler(**options)).save(path, args=ocp.args.PyTreeSave(tree, save_args=save_args))
        return path

    return write


def _manager(path: Path, tree: Any) -> Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.PyTreeSave(tree))
    return path / "3" / "default"


def _v1(path: Path, tree: Any) -> Path:
    ocp_v1.save(path, tree)
    return path / "state"


# Every layout that the current release of Orbax writes: name → a function that returns where the tree is.
WRITERS: dict[str, Write] = {
    "v0": pytree(),
    "zarr3": pytree(use_zarr3=True),
    "files": pytree(use_ocdbt=False),
    "files zarr3": pytree(use_ocdbt=False, use_zarr3=True),
    "uncompressed": pytree(use_compression=False),
    "uncompressed files": pytree(use_ocdbt=False, use_compression=False),
    "manager": _manager,
    "v1": _v1,
}


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
