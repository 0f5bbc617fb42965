"""verify: what is ok, what is damaged and why, what does not belong there, and how much memory that takes."""

import functools
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training import checkpoints as flax_checkpoints

import flax_ckpt_compat
from flax_ckpt_compat import VerifiedCheckpoint, checkpoints, errors, verify
from flax_ckpt_compat._core import backend
from flax_ckpt_compat._discovery import opening
from tests.support import corpus
from tests.support.disks import flip
from tests.support.saves import save_items, use_flag

RNG = np.random.default_rng(0)
TREE: dict[str, Any] = {
    "a": {"kernel": RNG.integers(0, 50, (300, 40)).astype(np.float32), "bias": jnp.ones(3, jnp.bfloat16)},
    "b": {"kernel": RNG.integers(0, 50, (300, 40)).astype(np.float32), "step": 7, "name": "run"},
}
LEAVES = {"a/kernel", "a/bias", "b/kernel", "b/step", "b/name"}


def of_orbax(path: Path, **options: Any) -> Path:
    """TREE as real Orbax saves it, compressed in one data file, or in a folder for each array."""
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, TREE)
    return path


def of_flax(directory: Path, step: int = 1) -> Path:
    """TREE as real Flax saves it in msgpack."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    with pytest.warns(DeprecationWarning):
        return Path(flax_checkpoints.save_checkpoint(directory, TREE, step, keep=99))


def only(path: Path) -> VerifiedCheckpoint:
    """The report of one checkpoint."""
    (report,) = verify(path).checkpoints
    return report


@pytest.mark.parametrize("save", [of_orbax, of_flax])
def test_what_real_flax_and_orbax_write_is_unverified(save: Any, tmp_path: Path) -> None:
    """Every leaf decodes; without checksums that is said, of each leaf and of the whole."""
    report = verify(save(tmp_path / "run"))
    (one,) = report.checkpoints
    assert {leaf.path for leaf in one.leaves} == LEAVES
    assert {(leaf.state, leaf.why) for leaf in one.leaves} == {("unverified", "")}
    assert (one.state, one.damage, one.unexpected) == ("unverified", (), ())
    assert (report.state, report.ok, report.damaged, report.verified) == ("unverified", False, False, False)
    assert {leaf.path: leaf.nbytes for leaf in one.leaves}["a/kernel"] == 300 * 40 * 4
    assert "1 checkpoint: 0 ok, 1 unverified.\nUnverified: all leaves decode" in str(report)
    assert "ok" not in str(report).split()[0]


@pytest.mark.slow
def test_every_old_release(tmp_path: Path) -> None:
    """No checkpoint of the oldest and the newest release of the corpus has anything unexpected or damaged."""
    releases = sorted({case.release for case in corpus.cases()}, key=lambda name: corpus.Case(name, "").orbax)
    count = 0
    for release in (releases[0], "flax-0.7.4_orbax-0.4.1", releases[-1]):
        report = verify(corpus.unpack(release, tmp_path / release))
        count += len(report.checkpoints)
        assert [one for one in report.checkpoints if one.state != "unverified" or one.unexpected] == []
    assert count > 100


def chunk(path: Path, leaf: str) -> Path:
    """The only chunk of an array in a folder of its own."""
    (found,) = path.glob(f"{leaf.replace('/', '.')}/0*")
    return found


def lose_data(path: Path) -> None:
    """Remove the largest of the data files that arrays share."""
    max(path.glob("**/d/*"), key=lambda file: file.stat().st_size).unlink()


# What is damaged, in a checkpoint with a folder for each array or with one database; the leaves that are damaged then,
# if any, of ``*`` some, and part of each reason. At 0 and 4, a zstd frame has its magic number and its header.
DAMAGE: dict[str, tuple[Callable[[Path], Any], bool, set[str], str]] = {
    **{
        f"a bit of {leaf} at {at}": (
            functools.partial(lambda leaf, at, path: flip(chunk(path, leaf), at, 3), leaf, at), False, {leaf},
            f"the leaf '{leaf}'",
        )
        for leaf in ("a/kernel", "b/kernel", "a/bias")
        for at in (0, 4)
    },
    "a chunk is lost": (lambda path: chunk(path, "b/kernel").unlink(), False, {"b/kernel"}, "b.kernel"),
    "a data file is lost": (lose_data, True, {"*"}, "/d/"),
    "the index": (lambda path: flip(path / "manifest.ocdbt", 30), True, set(), "manifest.ocdbt"),
    # Restores do without the shardings and do not read every list of jax arrays.
    "shardings": (lambda path: os.truncate(path / "_sharding", 5), True, set(), "_sharding"),
    "a list of jax arrays": (
        lambda path: (path / "array_metadatas/process_1").write_text('{"array_metad'), True, set(),
        "array_metadatas/process_1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(name: str, tmp_path: Path) -> None:
    """What does not decode is told, of the leaves that need it and of no other, or of the whole."""
    damage, use_ocdbt, leaves, words = DAMAGE[name]
    path = of_orbax(tmp_path / "ckpt", use_ocdbt=use_ocdbt)
    if "list" in name and not (path / "array_metadatas").exists():
        pytest.skip("this release of Orbax writes no array_metadatas")
    assert (verify(path).state, only(path).unexpected) == ("unverified", ())
    damage(path)
    report = verify(path)
    (one,) = report.checkpoints
    assert (one.state, report.damaged, report.ok, "DAMAGED" in str(report)) == ("damaged", True, False, True)
    damaged = {leaf.path: leaf.why for leaf in one.leaves if leaf.state == "damaged"}
    assert damaged.keys() == leaves or (damaged and "*" in leaves)
    assert all(words in why for why in (*damaged.values(), *one.damage)) and (damaged or one.damage)
    if name in ("shardings", "a list of jax arrays"):
        assert checkpoints.restore_checkpoint(path, None).keys() == TREE.keys()


def test_a_file_that_is_a_link(tmp_path: Path) -> None:
    """What restores follow, `verify` follows."""
    with use_flag(True):
        path = Path(checkpoints.save_checkpoint(tmp_path / "c", TREE, 1))
    (path / "_CHECKPOINT_METADATA").rename(tmp_path / "outside")
    (path / "_CHECKPOINT_METADATA").symlink_to(tmp_path / "outside")
    assert checkpoints.restore_checkpoint(path, None).keys() == TREE.keys()
    assert verify(path).verified


def test_recorded_checksums(tmp_path: Path) -> None:
    """Of what we saved, every leaf is ok, and every flipped bit of the file is found."""
    with use_flag(False):
        path = Path(checkpoints.save_checkpoint(tmp_path, TREE, 1))
    if not os.listxattr(path):
        pytest.skip("this file system has no extended attributes")
    report = verify(tmp_path)
    assert (report.verified, {leaf.state for leaf in report.checkpoints[0].leaves}) == (True, {"ok"})
    size = path.stat().st_size
    for at in range(0, size, size // 30):
        flip(path, at, at % 8)
        assert only(tmp_path).state == "damaged"
        flip(path, at, at % 8)
    assert verify(tmp_path).verified
    os.removexattr(path, os.listxattr(path)[0])
    assert (only(tmp_path).state, verify(tmp_path).ok, verify(tmp_path).damaged) == ("unverified", False, False)
    with use_flag(True):
        path = Path(checkpoints.save_checkpoint(tmp_path, TREE, 2))
    notes = path / "_CHECKPOINT_METADATA"  # of which no leaf has anything; it decodes as before
    flip(notes, notes.read_bytes().index(b"init_timestamp_nsecs") + 25)
    assert verify(path).damaged and verify(path).checkpoints[0].damage


def test_strange_files_and_orphans(tmp_path: Path) -> None:
    """Files that are not part of the format, and arrays that no leaf refers to, are listed; they are no damage."""
    path = of_orbax(tmp_path / "ckpt")
    (path / ".DS_Store").touch()
    (path / "d" / "note.txt").touch()
    metadata = json.loads((path / "_METADATA").read_text())
    del metadata["tree_metadata"]["('a', 'kernel')"]
    (path / "_METADATA").write_text(json.dumps(metadata))
    report = verify(path)
    (one,) = report.checkpoints
    assert one.unexpected == (".DS_Store", "d/note.txt", "a.kernel (an array of no leaf)")
    assert {leaf.path for leaf in one.leaves} == LEAVES - {"a/kernel"}
    assert (report.state, report.ok, report.damaged, report.verified) == ("unverified", False, False, False)
    path = of_orbax(tmp_path / "folders", use_ocdbt=False)
    shutil.copytree(path / "a.bias", path / "c.bias")
    assert set(only(path).unexpected) == {"c.bias/.zarray", "c.bias/0"}


def test_orphans_beside_msgpack(tmp_path: Path) -> None:
    """Arrays in a ``_gda`` folder that the file does not refer to, and strange files there, are listed."""
    shutil.copytree(corpus.ARCHIVES.parent / "gda" / "two_processes_tree", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint_3_gda"
    assert only(tmp_path / "run").unexpected == ()
    shutil.copytree(folder / "params" / "repl", folder / "old")
    (folder / "params" / "notes").touch()
    assert only(tmp_path / "run").unexpected == (
        "checkpoint_3_gda/old (an array of no leaf)",
        "checkpoint_3_gda/params/notes",
    )
    shutil.rmtree(folder / "params" / "xy")
    assert "xy" in only(tmp_path / "run").damage[0]


def test_a_tree_of_runs(tmp_path: Path) -> None:
    """Every checkpoint below is found once: of any prefix, managers, unfinished ones; nothing else is taken for one."""
    path = of_flax(tmp_path / "runs" / "a", 2)
    of_flax(tmp_path / "runs" / "a", 10)
    with ocp.CheckpointManager(tmp_path / "runs" / "b") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones(3)}))
    (tmp_path / "runs" / "c").mkdir()
    for step in (1, 2):
        (tmp_path / "runs" / "c" / f"gan_{step}").write_bytes(path.read_bytes())
    flip(tmp_path / "runs" / "c" / "gan_2", 0, 7)  # its first byte no longer looks like a checkpoint
    (tmp_path / "runs" / "a" / "checkpoint_4").mkdir()
    (tmp_path / "runs" / "a" / "events.out.tfevents.17000.host.1").write_bytes(b"\x18\0\0\0\0\0\0\0")
    (tmp_path / "runs" / "a" / "config.json").write_text("{}")
    (tmp_path / "runs" / "a" / "checkpoint_11.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "a" / "up").symlink_to(tmp_path / "runs")
    found = {os.path.relpath(one.path, tmp_path): one.state for one in verify(tmp_path / "runs").checkpoints}
    assert found == {
        "runs/a/checkpoint_2": "unverified",
        "runs/a/checkpoint_4": "damaged",
        "runs/a/checkpoint_10": "unverified",
        "runs/b/3": "unverified",
        "runs/c/gan_1": "unverified",
        "runs/c/gan_2": "damaged",
    }


def test_steps(tmp_path: Path) -> None:
    """With a step only that one is verified; one that does not exist is an error with the steps there are."""
    of_flax(tmp_path, 1)
    of_flax(tmp_path, 2)
    assert [Path(one.path).name for one in verify(tmp_path, step=2).checkpoints] == ["checkpoint_2"]
    with pytest.raises(errors.CheckpointNotFoundError, match="available steps: 1, 2; pass one of them"):
        verify(tmp_path, step=3)


def test_one_item_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the checkpoint unreadable, although another one is damaged."""
    save_items(tmp_path, a={"w": np.ones(3)}, b={"w": np.ones(3)})
    found: list[Exception] = [errors.StorageError("refused"), errors.CorruptCheckpointError("damaged")]

    def refuse(*_: Any, **__: Any) -> Any:
        raise found.pop(0)

    monkeypatch.setattr(opening, "open_item", refuse)
    assert only(tmp_path).state == "unreadable"
    found.append(errors.OutOfMemoryError("there is no memory"))
    monkeypatch.setattr(opening, "Opened", refuse)
    assert only(tmp_path).state == "unreadable"


def test_memory_is_bounded(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays larger than a batch are read in slices, also one that msgpack stores in pieces."""
    monkeypatch.setattr(backend, "BATCH_BYTES", 2**20)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 3 * 2**20)
    tree = {"large": np.ones((4, 2**22), np.float32), "row": np.ones((1, 2**21), np.float32)}
    with use_flag(flag):
        path = checkpoints.save_checkpoint(tmp_path, tree, 1)
    tracemalloc.start()
    try:
        assert verify(path).ok
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 36 * 2**20  # checksums are computed in pieces of 16 MiB


def test_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is rotated away while it is verified is not called damaged; a named one is not found."""
    for step in (1, 2):
        of_orbax(tmp_path / f"checkpoint_{step}")
    shutil.copytree(tmp_path / "checkpoint_1", tmp_path / "again")
    handles_of = backend.handles_of

    def rotate(reader: Any) -> Any:
        found = handles_of(reader)
        if Path(reader.path).name == "checkpoint_1":
            shutil.rmtree(reader.path)
        return found

    monkeypatch.setattr(backend, "handles_of", rotate)
    assert [Path(one.path).name for one in verify(tmp_path).checkpoints] == ["again", "checkpoint_2"]
    (tmp_path / "again").rename(tmp_path / "checkpoint_1")
    with pytest.raises(errors.CheckpointNotFoundError, match="was removed"):
        verify(tmp_path / "checkpoint_1")


def test_in_the_order_of_names(tmp_path: Path) -> None:
    """``progress`` gets every report once, in order, though several are verified at the same time."""
    for step in range(12):
        of_flax(tmp_path, step)
    seen: list[VerifiedCheckpoint] = []
    report = flax_ckpt_compat.verify(tmp_path, progress=seen.append)
    assert tuple(seen) == report.checkpoints
    assert [Path(one.path).name for one in seen] == [f"checkpoint_{step}" for step in range(12)]
