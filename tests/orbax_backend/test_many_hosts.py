"""The merged index of many hosts has several levels: TensorStore, real Orbax and we read it, and miss no chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend.ocdbt import read_entries

from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.location import location_of
from tests.benchmarks.scale_play import ELEMENTS
from tests.orbax_backend import many_hosts
from tests.orbax_backend.many_hosts import HOSTS, LEAVES
from tests.support.orbax_trees import load
from tests.support.team import team_of


@pytest.fixture(scope="module", params=[None, "crc32c"], ids=["zarr v2", "zarr v3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What twelve hosts saved: their parts of each of forty arrays."""
    folder = tmp_path_factory.mktemp("many")
    assert team_of(1, HOSTS).call(many_hosts.save, str(folder), request.param) == ["saved"]
    return folder / "checkpoint_2"


def _expected() -> dict[str, Any]:
    parts = [np.random.default_rng(host).random(ELEMENTS, np.float32) for host in range(HOSTS)]
    return {f"leaf_{item:06}": np.concatenate([part + np.float32(item) for part in parts]) for item in range(LEAVES)}


def _same(found: Any) -> bool:
    expected = _expected()
    return list(found) == list(expected) and all(np.array_equal(found[name], expected[name]) for name in expected)


def test_every_reader_finds_all_of_it(saved: Path) -> None:
    """TensorStore lists the same keys, below at least two levels; real Orbax and we restore the same values."""
    base = ts.KvStore.open({"driver": "file", "path": f"{saved}/"}).result()
    assert ts.ocdbt.dump(base).result()["versions"][-1]["root_height"] >= 1
    store = ts.KvStore.open({"driver": "ocdbt", "base": base.spec().to_json()}).result()
    keys = sorted(store.list().result())
    assert len(keys) == LEAVES * (HOSTS + 1)
    names = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in _expected()}
    assert _same(ocp.PyTreeCheckpointer().restore(saved, restore_args=names))
    assert _same(load(saved))
    assert list(read_entries(location_of(saved))) == keys


@pytest.mark.parametrize("step", [97, pytest.param(7, marks=pytest.mark.slow)])
def test_flipped_bytes_of_the_index_are_found(saved: Path, step: int) -> None:
    """Nodes and manifest have checksums."""
    for file in (saved / "manifest.ocdbt", *(saved / "d").iterdir()):
        data = file.read_bytes()
        for at in range(0, len(data), step):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            with pytest.raises(CheckpointError):
                read_entries(location_of(saved))
        file.write_bytes(data)
    assert len(read_entries(location_of(saved))) == LEAVES * (HOSTS + 1)


@pytest.mark.parametrize("compression", [None, "crc32c"])
def test_a_lost_chunk_is_told(tmp_path: Path, compression: str | None) -> None:
    """The first leaf is named, and the process whose chunk is not in the index."""
    (found,) = team_of(1, HOSTS).call(many_hosts.save, str(tmp_path), compression, "manifest.ocdbt")
    assert "the leaf 'leaf_000000' is not complete: the chunk [5] of process 0 is missing" in found
    assert found.endswith("leaf=leaf_000000")
