"""Trees that real Orbax also knows, and real Orbax itself, quietly."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    from tests.support.interop_table import ZOO

    kinds = ["jax f32", "jax bf16", "jax int4", "jax fp8", "jax bool", "jax 0-d", "np f64", "np i64 0-d", "np big"]
    kinds += ["np zeros", "np c64", "int", "int > 2**63", "float", "bool", "str", "None", "raw key", "dict", "odd keys"]
    kinds += ["list", "{}", "[]", *(["key", "rbg keys"] if ORBAX_HAS_TYPED_KEYS else [])]
    return {**{kind: ZOO[kind] for kind in kinds}, "weird/na.me é%": {"a/b": 1, "x~1y": "tilde"}, "l": [2.5, ["x"]]}
