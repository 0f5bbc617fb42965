"""Directories that several processes write together, each its shards, against numpy and real Orbax."""

import functools
import json
import os
import shutil
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_ckpt_compat.orbax_backend.encode_leaves import encode
from flax_ckpt_compat.orbax_backend.shardings import spans_processes
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._core.backend import ProcessInfo, ProcessSave, WriteOptions
from flax_ckpt_compat._core.errors import StorageError, UnsupportedLeafError
from flax_ckpt_compat._core.tree import KeyData
from tests.multiprocess import jobs
from tests.support.orbax_trees import BACKEND, handles, load
from tests.support.peers import needs, ocp_v1, pytree_handler
from tests.support.saves import around
from tests.support.spread import half
from tests.support.team import team_of
from tests.support.trees import fingerprint, to_branches

PLAIN = {
    "np": np.arange(70.0).reshape(7, 10), "step": 7, "rate": 1e-3, "name": "héllo", "none": None,
    "list": [1, {"deep": np.arange(3)}], "no": {},
}  # fmt: skip
LACKING = ("uint4", "empty")  # what real Orbax cannot hold, or not as what it is
real_in_teams = needs("orbax-checkpoint", 0, 12, why="has no typed keys, or tells of a checkpoint in another form")


def tree(kind: str = "plain", *, real: bool = False, blank: bool = False) -> dict[str, Any]:
    """Arrays and keys over all processes, and what is none; ``real``: what real Orbax can hold of that."""
    split = jobs.split_tree(kind, blank=blank)
    return {"split": {name: leaf for name, leaf in split.items() if not real or name not in LACKING}, **PLAIN}


def save_ours(folder: str, compression: str | None = None, in_background: bool = False) -> None:
    """Saves step 1 with ours."""
    jobs.use(True)
    manager = checkpoints.AsyncManager() if in_background else None
    with config.override(compression=compression):
        checkpoints.save_checkpoint_multiprocess(folder, tree(), 1, async_manager=manager)
        if manager is not None:
            manager.wait_previous_save()


def save_real(path: str, options: dict[str, bool]) -> None:
    """Saves with real Orbax."""
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(path, args=ocp.args.PyTreeSave(tree(real=True)))


def restore(path: str, reader: str, onto: str | None = None, real: bool = False) -> None:
    """Restores with a reader, onto a mesh or as it is stored, and checks every bit that this process sees."""
    target = tree(onto or "plain", real=real, blank=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if reader == "ours":
            found: Any = flax_ckpt_compat.restore(path, onto and target)
        elif reader == "v1":
            found = ocp_v1.load(path)
        else:
            arguments = None if onto is None else ocp.checkpoint_utils.construct_restore_args(target)
            if reader == "numpy":
                arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
                arguments["name"] = ocp.RestoreArgs()
            if arguments is not None:
                arguments["split"] |= dict.fromkeys(LACKING, ocp.RestoreArgs(restore_type=np.ndarray))
            found = ocp.PyTreeCheckpointer().restore(path, restore_args=arguments)
    names = found["split"].keys()
    assert names == target["split"].keys()
    keys = jax.random.key_data(jax.random.split(jax.random.key(7), jobs.KEYS))
    for name in names - (LACKING if reader != "ours" else ()):
        leaf, wanted = found["split"][name], jobs.VALUES[name][0] if name in jobs.VALUES else np.asarray(keys)
        if not isinstance(leaf, np.ndarray) and (onto or reader in ("orbax", "v1")):
            assert leaf.sharding.is_equivalent_to(target["split"][name].sharding, leaf.ndim), name
        leaf = leaf if name in jobs.VALUES else jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array):
            jobs.check_shards(name, leaf, wanted)
        else:
            assert (leaf.dtype, leaf.shape, leaf.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), name
    as_numpy = ({name: jax.tree.map(np.asarray, one[name]) for name in PLAIN} for one in (found, PLAIN))
    assert len(set(map(str, as_numpy))) == 1


@pytest.fixture(scope="module", params=["live", "zstd", "copied"])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our save by two processes with two devices each, then renamed; from live arrays or copies, with a codec too."""
    folder = tmp_path_factory.mktemp("shared")
    compression = "zstd" if request.param == "zstd" else None
    team_of(2).call(save_ours, str(folder / "before"), compression, request.param == "copied")
    return str((folder / "before" / "checkpoint_1").rename(folder / "after"))


REAL = {"ocdbt": {}, "zarr3": {"use_zarr3": True}, "files": {"use_ocdbt": False}, "plain": {"use_compression": False}}


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=() if one == "ocdbt" else pytest.mark.slow) for one in REAL]
)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Real Orbax's save by the same two processes, in each of its layouts."""
    pytree_handler(**REAL[request.param])  # skips where there is no such option
    path = str(tmp_path_factory.mktemp("shared") / "real")
    team_of(2).call(save_real, path, REAL[request.param])
    return path


READERS = [
    *(((2, 2), "ours", onto) for onto in ("plain", "turned", "flat")),
    ((1, 2), "ours", None), ((4, 1), "ours", "plain"), ((1, 2), "numpy", None), ((2, 2), "orbax", None),
    ((2, 2), "orbax", "plain"), ((2, 2), "orbax", "turned"), ((2, 2), "v1", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("team", "reader", "onto"),
    [
        pytest.param(*row, marks=[real_in_teams] * (row[1] != "ours") + [pytest.mark.slow] * (number > 6))
        for number, row in enumerate(READERS)
    ],
)
def test_every_reader_finds_what_two_wrote(ours: str, team: tuple[int, int], reader: str, onto: str | None) -> None:
    """One process or several, ours, real Orbax and its v1, onto a mesh, as it is stored, or as numpy."""
    assert reader != "v1" or ocp_v1.load  # skips where it is not there
    team_of(*team).call(restore, ours, reader, onto)


@real_in_teams
@pytest.mark.parametrize(("count", "onto"), [(1, None), (2, "plain"), (2, "turned")])
def test_ours_reads_what_two_of_real_orbax_wrote(real: str, count: int, onto: str | None) -> None:
    """Each process gets the boxes of its shards, and one alone, that lacks the saved devices, all."""
    team_of(count).call(restore, real, "ours", onto, True)


@real_in_teams
def test_shardings_and_shapes_of_shards_are_those_of_real_orbax(ours: str, real: str) -> None:
    """But of arrays that all hold: we have them on all devices, and of those with replicas Orbax cuts the shards."""
    (one, mine), (other, theirs) = (
        (handles(path), json.loads(Path(path, "_METADATA").read_text())["tree_metadata"]) for path in (ours, real)
    )
    names = [name for name in other if '"x"' in (other[name].sharding or "").partition("partition_spec")[2]]
    assert len(names) > 8
    assert {name: one[name].sharding for name in names} == {name: other[name].sharding for name in names}
    assert '"partition_spec": ["x", "y"]' in str(one["split/both"].sharding)
    for name, shape in (("both", [4, 8]), ("merged", [4]), ("bf16", [4, 4]), ("large", [128, 256])):
        found = [found[f"('split', '{name}')"]["value_metadata"]["write_shape"] for found in (mine, theirs)]
        assert found == [shape, shape]


def random_values(seed: int) -> dict[str, tuple[np.ndarray[Any, Any], PartitionSpec]]:
    """Many arrays of any shape and dtype, each with a split that a mesh of two by two can make of it."""
    random = np.random.default_rng(seed)
    dtypes = [np.float32, np.int8, np.uint16, np.bool_, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3]
    found = {}
    for number in range(40):
        axes = [[], ["x"], ["y"], ["x", "y"], ["y", "x"]][random.integers(5)]
        sides: list[list[str]] = [[] for _ in range(random.integers(1, 4))]
        for axis in axes:
            sides[random.integers(len(sides))].append(axis)
        scale = int(random.choice([1, 3, 40]))
        shape = tuple(int(random.integers(0 if number % 9 == 0 else 1, 2 + scale)) * 2 ** len(side) for side in sides)
        value = random.integers(-8, 8, shape).astype(dtypes[random.integers(len(dtypes))])
        found[f"layers/{number}.w é"] = value, PartitionSpec(*(tuple(side) or None for side in sides))
    return found


def save_random(folder: str, seed: int, compression: str | None) -> None:
    """Saves them, on a mesh in which the processes' devices are mixed."""
    jobs.use(True)
    order = np.random.default_rng(seed).permutation(jax.device_count())
    mesh = Mesh(np.array(jax.devices())[order].reshape(2, 2), ("x", "y"))
    tree = {name: jobs.put(value, NamedSharding(mesh, spec)) for name, (value, spec) in random_values(seed).items()}
    with config.override(compression=compression):
        checkpoints.save_checkpoint_multiprocess(folder, tree, 1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_any_split_of_any_array(tmp_path: Path, seed: int) -> None:
    """Random shapes, dtypes and splits over devices in any order come back as numpy had them."""
    team_of(2).call(save_random, str(tmp_path), seed, [None, "zstd", "crc32c"][seed % 3])
    found, expected = load(tmp_path / "checkpoint_1"), {name: value for name, (value, _) in random_values(seed).items()}
    assert fingerprint(found) == fingerprint(expected)


def write_part(path: Path, tree: Any, index: int = 0, count: int = 2) -> ProcessSave:
    """One process's part of a save, up to its merging."""
    process = ProcessInfo(index, count)
    save = ProcessSave(str(path), BACKEND.prepare(to_branches(tree), process), WriteOptions(), process)
    if index == 0:
        BACKEND.begin_multiprocess(save)
    BACKEND.write_process_part(save)
    return save


def lose(path: Path) -> None:
    """Removes a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut(folder: Path, pick: Callable[..., Path] = max) -> None:
    """Cuts the largest file of a folder, or the smallest, which is the index."""
    file = pick(folder.iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


VALUES = np.random.default_rng(0).random((8, 1000)).astype(np.float32)
INCOMPLETE = "what the processes saved is not complete: "


@pytest.mark.parametrize(
    ("spoil", "place", "said"),
    [
        (lose, "ocdbt.process_1", f"{INCOMPLETE}the value 'a/.*' of the leaf 'a' is missing.* of ocdbt.process_1"),
        (lose, "ocdbt.process_1/manifest.ocdbt", INCOMPLETE),
        (lose, "ocdbt.process_1/d", INCOMPLETE),
        (functools.partial(cut, pick=min), "ocdbt.process_1/d", f"{INCOMPLETE}.*ocdbt.process_1"),
        (cut, "ocdbt.process_1/d", f"{INCOMPLETE}the file ocdbt.process_1/d/.* is missing or too short"),
    ],
)
def test_a_lost_share_is_told_at_the_end(tmp_path: Path, spoil: Any, place: str, said: str) -> None:
    """What is gone of process 1's share keeps process 0 from committing, and is named."""
    save, _ = (write_part(tmp_path / "c", {"a": half(VALUES, index)}, index) for index in (0, 1))
    spoil(tmp_path / "c" / place)
    with pytest.raises(StorageError, match=f"{tmp_path / 'c'}: {said}"):
        BACKEND.finish_multiprocess(save)
    assert not (tmp_path / "c" / "commit_success.txt").exists()


@pytest.mark.parametrize(
    ("index", "count", "length", "error", "said"),
    [
        (1, 2, 8, StorageError, "process 1 does not find .*c, which process 0 made"),
        # Before anything is written; there is none in jax, so a sharding plays one.
        (0, 2, 7, UnsupportedLeafError, "a: the array is spread over processes in shards of different"),
        (0, 1, 8, UnsupportedLeafError, "a: this process sees only a part of the array"),
    ],
)
def test_what_is_refused(tmp_path: Path, index: int, count: int, length: int, error: Any, said: str) -> None:
    """A folder that not all share, shards that are no grid, and a save alone of an array that is spread."""
    with pytest.raises(error, match=said):
        write_part(tmp_path / "c", {"a": half(np.arange(float(length)), index)}, index, count)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tree", [{"s": "text", "n": None, "d": {}}, {"a": np.arange(5.0), "i": 3}], ids=["no arrays", "nothing spread"]
)
@pytest.mark.parametrize("count", [1, 2])
def test_process_0_may_have_all(tmp_path: Path, tree: dict[str, Any], count: int) -> None:
    """What no process shares is process 0's; ours and real Orbax restore it. A team may have one process only."""
    save, *_ = [write_part(tmp_path / "c", tree, index, count) for index in range(count)]
    BACKEND.finish_multiprocess(save)
    for found in (load(tmp_path / "c"), ocp.PyTreeCheckpointer().restore(tmp_path / "c")):
        assert str(found) == str(dict(sorted(tree.items())))


def test_a_share_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of its checksums and of its database are on the disk, like their bytes."""
    synced = list[str]()
    around(monkeypatch, os, "fsync", then=lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    write_part(tmp_path / "c", {"a": np.arange(500.0)})
    own = f"{tmp_path}/c/ocdbt.process_0"
    assert synced[-1] == own
    assert {f"{own}/flax_ckpt_compat.checksums", f"{tmp_path}/c/_METADATA"} <= set(synced)


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
