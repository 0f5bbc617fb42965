"""Saves by several processes in which something is missing or does not fit: an error now, not at a restore."""

from __future__ import annotations

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
from flax_ckpt_compat._core.tree import KeyData
from tests.orbax_backend import shared_jobs as jobs
from tests.support.orbax_trees import BACKEND, branches, load
from tests.support.team import team_of

MESH = (2, 2)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("ocdbt.process_1", "StorageError: {path}: the share of process 1 is missing"),
        ("ocdbt.process_1/ended", "StorageError: {path}: the share of process 1 is missing"),
        ("ocdbt.process_1/manifest.ocdbt", "StorageError: {path}: the leaf 'bf16' is not complete: the chunk [0, 1]"),
        ("ocdbt.process_1/d/*", "StorageError: {path}/ocdbt.process_1 could not be merged"),
    ],
)
def test_a_lost_share_is_told_at_the_end(tmp_path: Path, lost: str, said: str) -> None:
    """What is gone of process 1's share keeps process 0 from committing, and is named."""
    path = tmp_path / "c"
    found = team_of(2).call(jobs.save_then_lose, str(path), MESH, lost)[0]
    assert found.startswith(said.format(path=path))
    if "chunk" in said:
        assert "of process 1 is missing" in found
        assert "leaf=bf16" in found
    assert not (path / "commit_success.txt").exists()


def test_a_data_file_that_got_lost_is_told(tmp_path: Path) -> None:
    """Some values are gone, though the B-tree that names them is there."""
    path = tmp_path / "c"
    found = team_of(2).call(jobs.save_then_cut, str(path), MESH)[0]
    assert found.startswith(f"StorageError: {path}: the leaf 'large' is not complete: the chunk [1, ")
    assert "of process 1 should be in ocdbt.process_1/d/" in found
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
