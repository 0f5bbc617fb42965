"""What real Orbax writes, read by us."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax_ckpt_compat.orbax_backend import open_index

from flax_ckpt_compat._core.location import location_of
from tests.orbax_backend.conftest import WRITERS
from tests.support.orbax_trees import load, on_host
from tests.support.peers import needs
from tests.support.trees import fingerprint


@pytest.mark.parametrize("writer", WRITERS)
def test_reads_what_real_orbax_writes(tmp_path: Path, common_tree: dict[str, Any], writer: str) -> None:
    """Every layout that the current release writes gives the saved values, dtypes, shapes and types."""
    path = WRITERS[writer](tmp_path / "c", common_tree)
    assert fingerprint(load(path)) == fingerprint(on_host(common_tree))


NARROW = {"i": np.int16(3), "f": np.float32(1.5), "c": np.complex64(1j)}


@pytest.mark.parametrize(
    ("write", "tree", "expected"),
    [
        # As saved, but for scalars of 64 bits, which are stored just as Python numbers are.
        (WRITERS["v0"], {**NARROW, "w": np.int64(3), "d": np.float64(2.5)}, {**NARROW, "w": 3, "d": 2.5}),
        pytest.param(
            WRITERS["v0"],
            jnp.arange(4.0),
            np.arange(4, dtype=np.float32),
            marks=needs("orbax-checkpoint", 0, 12, why="cannot save a bare jax array"),
        ),
        (WRITERS["v0"], {"l": list(range(12))}, {"l": list(range(12))}),  # ten after nine
        # Only a declared single array loses its key.
        (WRITERS["files"], {"checkpoint": np.arange(5)}, {"checkpoint": np.arange(5)}),
    ],
)
def test_reads_what_else_real_orbax_writes(tmp_path: Path, write: Any, tree: Any, expected: Any) -> None:
    """Scalars of numpy, long lists, and trees of one leaf."""
    assert fingerprint(load(write(tmp_path / "c", tree))) == fingerprint(expected)


@pytest.mark.parametrize("writer", ["v0", "zarr3"])
def test_compressed_chunks_as_long_as_their_arrays(tmp_path: Path, writer: str) -> None:
    """Their bytes lie in the database like those of small arrays, and are not the arrays' own: Orbax compresses."""
    tree = {f"a{length}": np.ones(length, np.uint8) for length in range(10, 40)}
    path = WRITERS[writer](tmp_path / "c", tree)
    index = open_index.open_database(location_of(path))
    chunks = {name: index.get(f"{name}/c/0" if writer == "zarr3" else f"{name}/0") for name in tree}
    assert any(len(chunk or b"") == tree[name].nbytes for name, chunk in chunks.items())
    assert fingerprint(load(path)) == fingerprint(tree)
