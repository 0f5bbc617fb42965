"""Directories that several processes write together, each its shards, against numpy and real Orbax."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat._core.orbax_layout import CHECKSUMS
from flax_ckpt_compat._core.tree import KeyData
from tests.orbax_backend import shared_jobs as jobs
from tests.support.orbax_trees import load
from tests.support.peers import needs, ocp_v1
from tests.support.team import team_of

MESH = (2, 2)
ALL = sorted(jobs.values())
REALS = sorted(jobs.SPECS)
real_in_teams = needs("orbax-checkpoint", 0, 12, why="has no typed keys, or tells of a checkpoint in another form")


@pytest.fixture(scope="module", params=["live", "zstd", "copied"])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our save by two processes with two devices each, then renamed; from live arrays or copies, with a codec too."""
    before = tmp_path_factory.mktemp("shared") / "before"
    compression = "zstd" if request.param == "zstd" else None
    team_of(2).call(jobs.save_ours, str(before), compression, request.param == "copied", MESH)
    return str(before.rename(before.parent / "after"))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Real Orbax's save by the same two processes."""
    path = tmp_path_factory.mktemp("shared") / "real"
    team_of(2).call(jobs.save_real, str(path), MESH)
    return str(path)


def bits(value: Any) -> Any:
    """What has to be equal: dtype, shape and bytes of arrays."""
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def test_one_process_reads_what_two_wrote(ours: str) -> None:
    """Every leaf is bit for bit what numpy has, arrays and all else, after the directory was renamed."""
    found = load(ours)
    assert {name: bits(found.pop(name)) for name in ALL} == {name: bits(v) for name, v in jobs.values().items()}
    keys = found.pop("keys")
    assert isinstance(keys, KeyData)
    assert keys.impl == "threefry2x32"
    assert np.array_equal(keys.data, jobs.key_data())
    assert np.array_equal(found.pop("here"), np.arange(8))
    assert str(found) == str({name: jobs.plain()[name] for name in sorted(jobs.plain())})


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 4)])
def test_two_processes_read_their_shards(ours: str, mesh: tuple[int, int]) -> None:
    """Onto the same mesh and others, each process gets the boxes of its shards."""
    for wrong in team_of(2).call(jobs.check_ours, ours, mesh, ALL):
        wrong.pop("bytes")
        assert not wrong


def test_four_processes_read_what_two_wrote(ours: str) -> None:
    """Twice as many processes get the boxes of theirs."""
    for wrong in team_of(4, 1).call(jobs.check_ours, ours, MESH, ALL):
        wrong.pop("bytes")
        assert not wrong


@real_in_teams
def test_real_orbax_reads_ours_in_one_process(ours: str) -> None:
    """Real Orbax, alone, gives the same arrays as numpy."""
    checkpointer = ocp.PyTreeCheckpointer()
    metadata = checkpointer.metadata(ours).item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
    args["name"], args["none"] = ocp.RestoreArgs(), ocp.RestoreArgs()
    restored = checkpointer.restore(ours, restore_args=args)
    expected = jobs.values()
    assert {name: bits(restored[name]) for name in REALS} == {name: bits(expected[name]) for name in REALS}
    assert restored["fp8"].tobytes() == expected["fp8"].tobytes()
    assert restored["name"] == jobs.plain()["name"]


@real_in_teams
@pytest.mark.parametrize("mesh", [None, (2, 2), (4, 1)])
def test_real_orbax_reads_ours_in_two_processes(ours: str, mesh: tuple[int, int] | None) -> None:
    """Real Orbax gets every shard right, onto a mesh as onto the shardings that we stored."""
    assert team_of(2).call(jobs.check_real, ours, mesh, REALS, timeout=20) == [{}, {}]


@real_in_teams
def test_orbax_v1_reads_ours(ours: str) -> None:
    """So does its v1."""
    assert ocp_v1.load  # skips where it is not there
    assert team_of(2).call(jobs.check_real_v1, ours, REALS, timeout=20) == [{}, {}]


@real_in_teams
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
def test_ours_reads_real_orbax(real: str, mesh: tuple[int, int]) -> None:
    """Each process gets the boxes of its shards from what two processes of real Orbax wrote."""
    for wrong in team_of(2).call(jobs.check_ours, real, mesh, REALS):
        wrong.pop("bytes")
        assert not wrong


def test_a_process_reads_only_its_shards(tmp_path: Path) -> None:
    """Of an array without a codec, in large shards, no byte is read that no device here holds."""
    path = str(tmp_path / "c")
    team_of(2).call(jobs.save_ours, path, None, False, MESH)
    for wrong in team_of(2).call(jobs.check_ours, path, MESH, ["large", "tall"]):
        read, wanted = wrong.pop("bytes")
        assert not wrong
        assert read == wanted
    assert wanted < sum(jobs.values()[name].nbytes for name in ["large", "tall"])


def test_each_process_writes_its_own_shards(tmp_path: Path) -> None:
    """The values lie in the database of the process that holds them, half in each; nothing is copied at the end."""
    path = tmp_path / "c"
    team_of(2).call(jobs.save_ours, str(path), None, False, MESH)
    own = [sum(f.stat().st_size for f in (path / f"ocdbt.process_{i}" / "d").iterdir()) for i in (0, 1)]
    assert min(own) > jobs.values()["large"].nbytes // 2
    assert sum(f.stat().st_size for f in (path / "d").iterdir()) < 10_000
    assert sorted(os.listdir(path / "array_metadatas")) == ["process_0", "process_1"]
    assert sorted(os.listdir(path / "ocdbt.process_1")) == ["d", CHECKSUMS, "manifest.ocdbt"]


@pytest.mark.parametrize("seed", range(12))
def test_any_split_of_any_array(tmp_path: Path, seed: int) -> None:
    """Random shapes, dtypes and splits over devices in any order come back as numpy had them."""
    path = str(tmp_path / "c")
    team_of(2).call(jobs.save_random, path, seed, [None, "zstd", "crc32c"][seed % 3])
    expected = {name: bits(value) for name, (value, _) in jobs.random_values(seed).items()}
    assert {name: bits(value) for name, value in load(path).items()} == expected
