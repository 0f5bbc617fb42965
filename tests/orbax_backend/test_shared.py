"""Directories that several processes write together, each its shards, against numpy and real Orbax."""

from __future__ import annotations

import json
import os
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_ckpt_compat.orbax_backend.encode_leaves import encode
from flax_ckpt_compat.orbax_backend.shardings import spans_processes

from flax_ckpt_compat._core.backend import ProcessInfo, ProcessSave, WriteOptions
from flax_ckpt_compat._core.orbax_layout import CHECKSUMS
from flax_ckpt_compat._core.tree import KeyData
from tests.orbax_backend import shared_jobs as jobs
from tests.support.orbax_trees import BACKEND, branches, handles, load
from tests.support.peers import needs, ocp_v1, pytree_handler
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


REAL = {"ocdbt": {}, "zarr3": {"use_zarr3": True}, "files": {"use_ocdbt": False}, "plain": {"use_compression": False}}


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=() if one == "ocdbt" else pytest.mark.slow) for one in REAL]
)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Real Orbax's save by the same two processes, in each of its layouts."""
    pytree_handler(**REAL[request.param])  # skips where there is no such option
    path = tmp_path_factory.mktemp("shared") / "real"
    team_of(2).call(jobs.save_real, str(path), MESH, REAL[request.param])
    return str(path)


def bits(value: Any) -> Any:
    """What has to be equal: dtype, shape and bytes of arrays."""
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def check_whole(found: dict[str, Any], names: list[str]) -> None:
    """Every leaf is bit for bit what numpy has, arrays and all else."""
    assert {name: bits(found.pop(name)) for name in names} == {name: bits(jobs.values()[name]) for name in names}
    keys = found.pop("keys")
    assert isinstance(keys, KeyData)
    assert keys.impl == "threefry2x32"
    assert np.array_equal(keys.data, jobs.key_data())
    assert str(found) == str({name: jobs.plain()[name] for name in sorted(jobs.plain())})


def test_one_process_reads_what_two_wrote(ours: str) -> None:
    """After the directory was renamed."""
    found = load(ours)
    assert np.array_equal(found.pop("here"), np.arange(8))
    check_whole(found, ALL)


@real_in_teams
def test_one_process_reads_what_two_of_real_orbax_wrote(real: str) -> None:
    """On a machine that lacks the saved devices."""
    check_whole(load(real), REALS)


@real_in_teams
def test_shardings_and_shapes_of_shards_are_those_of_real_orbax(ours: str, real: str) -> None:
    """Of arrays with replicas, real Orbax cuts the shards further."""
    (one, mine), (other, theirs) = (
        (handles(path), json.loads(Path(path, "_METADATA").read_text())["tree_metadata"]) for path in (ours, real)
    )
    assert {name: one[name].sharding for name in REALS} == {name: other[name].sharding for name in REALS}
    assert '"partition_spec": ["x", "y"]' in str(one["both"].sharding)
    for name, shape in (("both", [4, 4]), ("merged", [2, 8]), ("bf16", [4, 4]), ("large", [256, 512])):
        found = [tree[f"('{name}',)"]["value_metadata"]["write_shape"] for tree in (mine, theirs)]
        assert found == [shape, shape]


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
@pytest.mark.parametrize("mesh", [None, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((2, 2), (4, 1)))])
def test_real_orbax_reads_ours_in_two_processes(ours: str, mesh: tuple[int, int] | None) -> None:
    """Real Orbax gets every shard right, onto a mesh as onto the shardings that we stored."""
    assert team_of(2).call(jobs.check_real, ours, mesh, REALS, timeout=20) == [{}, {}]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_split_of_any_array(tmp_path: Path, seed: int) -> None:
    """Random shapes, dtypes and splits over devices in any order come back as numpy had them."""
    path = str(tmp_path / "c")
    team_of(2).call(jobs.save_random, path, seed, [None, "zstd", "crc32c"][seed % 3])
    expected = {name: bits(value) for name, (value, _) in jobs.random_values(seed).items()}
    assert {name: bits(value) for name, value in load(path).items()} == expected


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("ocdbt.process_1", "StorageError: {path}: the share of process 1 is missing"),
        ("ocdbt.process_1/ended", "StorageError: {path}: the share of process 1 is missing"),
        ("ocdbt.process_1/manifest.ocdbt", "StorageError: {path}: what the processes saved is not complete"),
        ("ocdbt.process_1/d/*", "StorageError: {path}: what the processes saved is not complete"),
    ],
)
def test_a_lost_share_is_told_at_the_end(tmp_path: Path, lost: str, said: str) -> None:
    """What is gone of process 1's share keeps process 0 from committing, and is named."""
    path = tmp_path / "c"
    found = team_of(2).call(jobs.save_then_lose, str(path), MESH, lost)[0]
    assert found.startswith(said.format(path=path))
    assert not (path / "commit_success.txt").exists()


def test_a_data_file_that_got_lost_is_told(tmp_path: Path) -> None:
    """Some values are gone, though the B-tree that names them is there."""
    path = tmp_path / "c"
    found = team_of(2).call(jobs.save_then_cut, str(path), MESH)[0]
    assert found.startswith(f"StorageError: {path}: what the processes saved is not complete: the file ocdbt.process_1")
    assert "missing or too short" in found
    assert not (path / "commit_success.txt").exists()


@pytest.mark.parametrize("name", ["both", "large", "bf16"])
def test_other_dtypes_in_another_process_are_told(tmp_path: Path, name: str) -> None:
    """A chunk of int32 would fit into an array of float32 as if nothing were wrong."""
    found = team_of(2).call(jobs.save_different, str(tmp_path / "c"), MESH, name)
    assert found[0].startswith("MultiprocessSaveError")
    assert "process 1" in found[0]
    assert not (tmp_path / "c" / "commit_success.txt").exists()


def test_a_directory_that_not_all_share_is_told(tmp_path: Path) -> None:
    """A process that does not see what process 0 made says so, and makes no directory of its own."""
    found = team_of(2).call(jobs.write_elsewhere, str(tmp_path / "c"), MESH)
    for index, said in enumerate(found):
        assert said.startswith(f"StorageError: process {index} does not find {tmp_path / 'c'}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("copied", [False, True])
def test_a_save_alone_refuses_spread_arrays(copied: bool) -> None:
    """One process cannot save what it sees a part of, as an array or as the copy of one."""
    for said in team_of(2).call(jobs.prepare_alone, MESH, copied):
        assert said.startswith("UnsupportedLeafError: bf16: this process sees only a part of the array")


def test_shards_that_are_no_grid_are_refused(tmp_path: Path) -> None:
    """Before anything is written, in every process."""
    for said in team_of(2).call(jobs.save_uneven, str(tmp_path / "c")):
        assert said.startswith("UnsupportedLeafError: a: the array is spread over processes in shards of different")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tree", [{"s": "text", "n": None, "d": {}}, {"a": np.arange(5.0), "i": 3}], ids=["no arrays", "nothing spread"]
)
def test_process_0_may_have_all(tmp_path: Path, tree: dict[str, Any]) -> None:
    """What no process shares is process 0's; ours and real Orbax restore it."""
    path = str(tmp_path / "c")
    team_of(2).call(jobs.save_plain, path, tree)
    assert str(load(path)) == str(dict(sorted(tree.items())))
    assert str(ocp.PyTreeCheckpointer().restore(path)) == str(dict(sorted(tree.items())))


def test_a_team_of_one(tmp_path: Path) -> None:
    """One process may take the same way."""
    path, share, tree = str(tmp_path / "c"), ProcessInfo(0, 1), {"a": np.arange(5.0), "s": "text"}
    prepared = BACKEND.prepare(branches(tree), share)
    BACKEND.begin_multiprocess(ProcessSave(path, prepared, WriteOptions(), share))
    BACKEND.write_process_part(ProcessSave(path, prepared, WriteOptions(), share))
    BACKEND.finish_multiprocess(ProcessSave(path, prepared, WriteOptions(), share))
    assert str(load(path)) == str(tree)


def test_a_share_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of its checksums and of the file that says that it is complete are on the disk, like their bytes."""
    path, share, synced = str(tmp_path / "c"), ProcessInfo(0, 1), list[str]()
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    prepared = BACKEND.prepare(branches({"a": np.arange(500.0)}), share)
    BACKEND.begin_multiprocess(ProcessSave(path, prepared, WriteOptions(), share))
    monkeypatch.setattr(os, "fsync", noting)
    BACKEND.write_process_part(ProcessSave(path, prepared, WriteOptions(), share))
    own = f"{path}/ocdbt.process_0"
    assert synced[-1] == own
    assert {f"{own}/ended", f"{own}/flax_ckpt_compat.checksums", f"{path}/_METADATA"} <= set(synced)


def test_a_key_of_all_processes_is_on_all_devices() -> None:
    """Real Orbax restores what is recorded for a device of process 0 in no other process (0.12.8, measured)."""
    for data in (np.zeros(2, np.uint32), jnp.zeros(2, jnp.uint32)):
        stored = encode(KeyData("threefry2x32", data), "key", multiprocess=True)
        assert stored.sharding.is_fully_replicated
        assert stored.sharding.device_set == set(jax.devices())


@pytest.mark.parametrize(("processes", "spread"), [([0, 1], False), ([1, 2], True)])
def test_who_writes_what_several_hold_whole(processes: list[int], spread: bool) -> None:
    """Process 0, if it is one of them; else it has nothing to write."""
    devices = [types.SimpleNamespace(process_index=index) for index in processes]
    sharding = types.SimpleNamespace(is_fully_addressable=False, is_fully_replicated=True, device_set=devices)
    assert spans_processes(sharding) == spread
