"""The merged index of many hosts has several levels: TensorStore, real Orbax and we read it, and miss no chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend.ocdbt import read_entries

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
    team_of(1, HOSTS).call(many_hosts.save, str(folder), request.param)
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
