"""Writing arrays of several processes beside a msgpack file; one process plays both."""

import errno
import functools
import json
import os
import shutil
import signal
import types
import unicodedata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints
from flax_ckpt_compat.legacy import BACKEND
from flax_ckpt_compat.legacy.gda_write import DistributedArray, choose_subpaths
from hypothesis import example, given
from hypothesis import strategies as st
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.backend import ProcessInfo, ProcessSave
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.errors import StorageError, UnsupportedLeafError
from flax_ckpt_compat._core.local import atomic, gda_folder, temporaries
from flax_ckpt_compat._core.tree import HostCopy, iter_leaves
from tests.support.saves import around, names, use_flag
from tests.support.spread import OPTIONS, Spread, half, load, save, write
from tests.support.trees import to_branches

TEXT = "//GDAPlaceholder:"
GDA = Path(__file__).parents[1] / "data" / "gda"


def test_the_document_names_the_arrays(tmp_path: Path) -> None:
    """The file is Flax's: each array a text with its key path, all else in it, in the order of the tree."""
    path = tmp_path / "checkpoint_1"
    save(path, {"b": {"w": Spread(np.arange(4)), "n": 1}, "a": Spread(np.arange(6.0))})
    document = msgpack.unpackb(path.read_bytes())
    assert list(document.items()) == [("b", {"w": f"{TEXT}b/w", "n": 1}), ("a", f"{TEXT}a")]
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_1_gda"]


@pytest.mark.parametrize("length", [8, 240])
def test_one_array_is_a_checkpoint(length: int, tmp_path: Path) -> None:
    """Its chunks lie in the folder itself; replaced, or where no temporary tells the whole name, in a subfolder."""
    path = tmp_path / ("n" * length)
    for n in (1, 2, 3):
        save(path, Spread(np.full((4, 2), n)))
        assert load(path)[()].tolist() == [[n, n]] * 4
        if n == 1 and length == 8:
            assert names(f"{path}_gda") == [".zarray", "0.0", "1.0"]
            assert msgpack.unpackb(path.read_bytes()) == TEXT
    assert (len(names(f"{path}_gda")), len(names(tmp_path))) == (1, 2)


@pytest.mark.parametrize("file", sorted(GDA.rglob(".zarray")), ids=lambda file: file.parent.name)
def test_the_folder_is_laid_out_as_in_flax(file: Path) -> None:
    """The same metadata and the same names of chunks as in what two processes of real Flax wrote."""
    fields = json.loads(file.read_text())
    sharding = types.SimpleNamespace(shard_shape=lambda _: fields["chunks"])
    copy = HostCopy(tuple(fields["shape"]), dtype_from_name(fields["dtype"]), (), sharding)
    array = DistributedArray("", copy)
    assert json.loads(json.dumps(array.metadata())) == fields
    assert sorted(array.files()) == names(file.parent)


def test_real_flax_restores_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its manager, dtypes and names that are no safe paths included; one process has all devices here."""
    arrays = {
        "w": np.arange(64, dtype=np.float32).reshape(8, 8), "é": np.arange(6).astype(ml_dtypes.bfloat16),
        "..": np.arange(4, dtype=np.int32), "x" * 80: np.arange(8).astype(ml_dtypes.int4),
    }  # fmt: skip
    for n in (1, 2):  # the second one into a subfolder
        save(tmp_path / "checkpoint_1", {"p": {name: Spread(array) for name, array in arrays.items()}, "n": n})
    target = {"p": {name: jax.numpy.zeros(array.shape, array.dtype) for name, array in arrays.items()}, "n": 0}
    monkeypatch.setattr(flax_checkpoints, "_is_multiprocess_array", lambda leaf: isinstance(leaf, jax.Array))
    with use_flag(False):
        manager = GlobalAsyncCheckpointManager()
        found = flax_checkpoints.restore_checkpoint(tmp_path, target, 1, gda_manager=manager)
    assert found["n"] == 2
    for name, array in arrays.items():
        assert (found["p"][name].dtype, np.asarray(found["p"][name]).tobytes()) == (array.dtype, array.tobytes())


FOREIGN = half(np.arange(4), 0)
FOREIGN.sharding.device_set = FOREIGN.sharding.device_set[1:]


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        *((half(np.zeros(4, dtype_from_name(name)), 0), f"w/x.*{name}") for name in ("uint4", "uint2", "float8_e4m3")),
        (TEXT + "a", "GDAPlaceholder"),  # a user's text is never taken for an array
        (FOREIGN, "w/x lies wholly on the devices of process 1"),  # nobody would write it
    ],
)
def test_what_is_refused_before_anything_is_written(leaf: Any, said: str) -> None:
    """By its key path."""
    with pytest.raises(UnsupportedLeafError, match=said) as caught:
        BACKEND.prepare(to_branches({"a": half(np.arange(4), 0), "w": {"x": leaf}}), ProcessInfo(0, 2))
    assert caught.value.leaf == "w/x"


@pytest.mark.parametrize("lost", ["", "b"])
def test_a_process_that_wrote_nothing_is_found_out(tmp_path: Path, lost: str) -> None:
    """The save fails, naming the array, also where its folder is gone; and nothing has the checkpoint's name."""
    temporary, process = atomic.temporary_path(str(tmp_path / "c_1")), ProcessInfo(0, 2)
    prepared = BACKEND.prepare(to_branches({"a": half(np.arange(4), 0), "b": half(np.arange(4), 0)}), process)
    save = ProcessSave(temporary, prepared, OPTIONS, process)
    BACKEND.begin_multiprocess(save)
    if lost:
        shutil.rmtree(f"{temporary}_gda/{lost}")
        with pytest.raises(StorageError, match=r"b/0 could not be written: No such file") as caught:
            BACKEND.write_process_part(save)
        assert caught.value.__cause__ is not None
    else:
        BACKEND.write_process_part(save)
        with pytest.raises(StorageError, match=r"2 files of arrays were not written \(a/1, b/1\)"):
            BACKEND.finish_multiprocess(save)
    atomic.remove_temporary(temporary)
    assert names(tmp_path) == []


HAZARDS: list[Any] = [
    {"..": {"..": 0}}, {"": {"": 0}}, {"a": {"": 0}, "": 1}, {".": 0}, {"a/b": 0, "a": {"b": 1}}, {"/etc": 0},
    {"a\0b": 0}, {"A": 0, "a": 1}, {"a": 0, "A": {"b": 1}}, {"e\u0301": 0, "\u00e9": 1}, {"n" * 300: 0},
    {"arrays": {"0": 0}, "..": 1}, {"Arrays": {"1": 0}, "..": 1, "a/b": 2}, {"y/": 0},
    {".0123456789ab-1-2-3": 0},
    {"a\\b": 0}, {"a\\b": 0, "a": {"b": 1}}, {"x": {"y.__lock": 0}},
    {"x": {"y" * 250: {"z" * 250: {"u" * 250: {"v" * 250: {"w" * 250: 0}}}}}},
]  # fmt: skip


def spread_leaves(tree: Any) -> Any:
    """The tree with an array, told by its number, for every leaf."""
    if isinstance(tree, dict):
        return {name: spread_leaves(child) for name, child in tree.items()}
    return Spread(np.full(2, tree))


@pytest.mark.parametrize("tree", HAZARDS, ids=range(len(HAZARDS)))
def test_names_that_are_no_safe_paths(tmp_path: Path, tree: Any) -> None:
    """Every array comes back under its own key path, and nothing is written outside of the folder."""
    for path in (tmp_path / "in" / "c_1", tmp_path / "in" / "c_2", tmp_path / "in" / "c_1"):
        path.parent.mkdir(exist_ok=True)
        save(path, spread_leaves(tree))
        for keys, value in load(path).items():
            leaf = tree
            for key in keys:
                leaf = leaf[key]
            assert value.tolist() == [leaf] * 2
    assert names(tmp_path) == ["in"]
    assert names(tmp_path / "in") == ["c_1", "c_1_gda", "c_2", "c_2_gda"]


KEYS = st.text("aAbB/.\0é", max_size=3) | st.sampled_from(["arrays", "Arrays", "arrays_", "..", "0", "1"])
KEY_TREES = st.recursive(st.none(), lambda child: st.dictionaries(KEYS, child, min_size=1, max_size=4), max_leaves=8)


@given(KEY_TREES)
@example({"e\u0301": None, "\u00e9": None})  # one name on macOS
def test_subpaths_are_safe_and_lead_to_one_array_alone(tree: Any) -> None:
    """No two are the same or one in the other, even where case does not count; what is plain and safe stays plain."""
    paths = sorted(path for path, _ in iter_leaves(to_branches(tree)))
    chosen = choose_subpaths(paths)
    assert list(chosen) == paths
    folded = [unicodedata.normalize("NFC", text).casefold().split("/") for text in chosen.values()]
    for at, one in enumerate(folded):
        assert paths == [()] or not {"", ".", ".."} & set(one)
        assert not any(other[: len(one)] == one for other in folded[:at] + folded[at + 1 :])
    if all(name in ("a", "b", "0", "é") for path in paths for name in path):
        assert chosen == {path: "/".join(path) for path in paths}


def test_a_key_that_looks_like_a_generation_is_no_folder(tmp_path: Path) -> None:
    """Replacing another array would remove it as what an earlier save left."""
    generation = temporaries.generation_of(atomic.temporary_path(str(tmp_path / "c_1")))
    assert generation is not None
    assert choose_subpaths([(generation, "w")]) == {(generation, "w"): "arrays/0"}
    assert choose_subpaths([("w", generation)]) == {("w", generation): f"w/{generation}"}


def test_what_others_put_into_the_folder_stays(tmp_path: Path) -> None:
    """Replacing removes arrays and nothing that is none."""
    path, folder = tmp_path / "c_1", tmp_path / "c_1_gda"
    save(path, {"a": {"b": Spread(np.arange(4))}, "c": Spread(np.arange(4))})
    for stranger in ("notes.txt", "a/notes.txt", "a/b/notes.txt"):
        (folder / stranger).write_text("mine")
    (folder / "link").symlink_to(tmp_path)
    save(path, {"c": np.arange(3)})
    left = sorted(os.path.relpath(file, folder) for file in folder.rglob("*") if not file.is_dir())
    assert (left, names(tmp_path)) == (["a/b/notes.txt", "a/notes.txt", "notes.txt"], ["c_1", "c_1_gda"])
    assert load(path)[("c",)].tolist() == [0, 1, 2]


def test_a_removal_that_is_interrupted_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks without ``.zarray`` would belong to nobody, and stay for ever."""
    path, folder = tmp_path / "c_1", tmp_path / "c_1_gda"
    save(path, {"a": Spread(np.arange(4))})
    unlink, left = os.unlink, [2]

    def interrupted(file: str, **options: Any) -> None:
        if str(file).startswith(str(folder)):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        unlink(file, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gda_folder.remove_orphan(str(folder))
    assert len(names(folder / "a")) == 1
    gda_folder.remove_orphan(str(folder))
    assert names(tmp_path) == ["c_1"]


@pytest.mark.parametrize("moment", ["before the rename", "after it"])
def test_a_saver_that_is_overtaken(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save of the checkpoint ends between two steps of the first: neither removes the other's live arrays."""
    path = tmp_path / "c_1"
    save(path, {"a": Spread(np.full(4, 1))})
    first, second = temporaries = [atomic.temporary_path(str(path)) for _ in range(2)]
    for n, temporary in enumerate(temporaries):
        write(temporary, {"a": Spread(np.full(4, n + 2))})
    module, name = (os, "replace") if moment == "before the rename" else (gda_folder, "_replaced_generations")
    real = getattr(module, name)

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(module, name, real)
        atomic.publish(second, str(path))
        return real(*arguments)

    monkeypatch.setattr(module, name, overtaken)
    atomic.publish(first, str(path))
    assert load(path)[("a",)].tolist() == [2 if moment == "before the rename" else 3] * 4
    save(path, {"a": Spread(np.full(4, 5))})  # removes what is left
    assert load(path)[("a",)].tolist() == [5] * 4
    assert (len(names(f"{path}_gda")), names(tmp_path)) == (1, ["c_1", "c_1_gda"])


def test_arrays_are_synced_before_the_file_refers_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, folders and the name of a new folder or generation: after a power loss no file leads to lost arrays."""
    path, folder = tmp_path / "c_1", tmp_path / "c_1_gda"
    events: list[tuple[str, int, str]] = []

    def note(name: str, *arguments: Any) -> None:
        events.append((name, os.stat(arguments[-1]).st_ino, str(arguments[-1])))

    for name in ("fsync", "rename", "replace"):
        around(monkeypatch, os, name, then=functools.partial(note, name))
    for n in (1, 2):
        events.clear()
        save(path, {"a": {"b": Spread(np.full(4, n))}})
        (arrays,) = [folder] if n == 1 else folder.iterdir()
        moved, published = (
            next(number for number, (name, _, to) in enumerate(events) if (name, to) == wanted)
            for wanted in (("rename", str(arrays)), ("replace", str(path)))
        )
        synced = {inode for name, inode, _ in events[:published] if name == "fsync"}
        assert [one for one in (path, arrays, *arrays.rglob("*")) if one.stat().st_ino not in synced] == []
        synced = {inode for name, inode, _ in events[moved:published] if name == "fsync"}
        assert {arrays.parent.stat().st_ino, tmp_path.stat().st_ino} <= synced


def test_a_folder_of_arrays_without_its_file_is_in_nobodys_way(tmp_path: Path) -> None:
    """A user's notes keep it from being removed; the checkpoint is saved beside them."""
    path, folder = tmp_path / "c_1", tmp_path / "c_1_gda"
    save(path, {"a": Spread(np.full(4, 1))})
    (folder / "notes.txt").write_text("mine")
    path.unlink()
    save(path, {"a": Spread(np.full(4, 2))})
    assert load(path)[("a",)].tolist() == [2] * 4
    assert (folder / "notes.txt").read_text() == "mine"


def test_arrays_of_a_live_saver_are_no_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean-up of another step's save spares a folder of arrays whose file is about to get its name."""
    replace = os.replace

    def later(*arguments: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        assert names(tmp_path)[-1] == "c_9_gda"
        checkpoints.save_checkpoint(tmp_path, {"x": 1}, 10, prefix="c_", keep=5)
        replace(*arguments)

    monkeypatch.setattr(os, "replace", later)
    save(tmp_path / "c_9", {"a": Spread(np.full(4, 1))})
    assert load(tmp_path / "c_9")[("a",)].tolist() == [1] * 4
    assert names(tmp_path) == ["c_10", "c_9", "c_9_gda"]


def test_two_savers_of_one_new_checkpoint(tmp_path: Path) -> None:
    """The second is told, and the first one's checkpoint stays whole."""
    path = tmp_path / "c_1"
    temporaries = [atomic.temporary_path(str(path)) for _ in range(2)]
    for n, temporary in enumerate(temporaries):
        write(temporary, {"a": Spread(np.full(4, n))})
    atomic.publish(temporaries[0], str(path))
    with pytest.raises(StorageError, match="another"):
        atomic.publish(temporaries[1], str(path))
    atomic.remove_temporary(temporaries[1])
    assert load(path)[("a",)].tolist() == [0] * 4
    assert names(tmp_path) == ["c_1", "c_1_gda"]


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("links", [True, False])
def test_a_failing_rename_of_a_new_checkpoint_leaves_nothing(
    tmp_path: Path, error: BaseException, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system without hard links."""
    path = tmp_path / "c_1"
    temporary = atomic.temporary_path(str(path))
    write(temporary, {"a": Spread(np.full(4, 2))})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=error))
        if not links:
            patch.setattr(os, "link", Mock(side_effect=PermissionError(1, "no links")))
        with pytest.raises((StorageError, KeyboardInterrupt)):
            atomic.publish(temporary, str(path))
    atomic.remove_temporary(temporary)
    assert names(tmp_path) == []
    save(path, {"a": Spread(np.full(4, 3))})
    assert load(path)[("a",)].tolist() == [3] * 4


@pytest.mark.parametrize("state", ["whole", "a link that leads nowhere", "zeroed", "cut", "empty"])
@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("writer", ["fails", "is refused", "dies", "is killed", "is killed before its file"])
def test_what_was_not_replaced_keeps_its_arrays(
    state: str, spread: bool, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing can tell that its file refers to them, which may be damaged, or on a mount that is away."""
    path = tmp_path / "c_1"
    save(path, {"a": Spread(np.arange(4))})
    if state == "a link that leads nowhere":
        path.unlink()
        path.symlink_to("away")
    elif state != "whole":
        path.write_bytes({"zeroed": bytes(path.stat().st_size), "cut": path.read_bytes()[:3], "empty": b""}[state])
    before = path.readlink() if path.is_symlink() else path.read_bytes()
    temporary = atomic.temporary_path(str(path))
    write(temporary, {"a": Spread(np.arange(4)) if spread else 1})
    if writer == "is killed before its file":
        os.unlink(temporary)
    elif writer != "is killed":
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises((KeyboardInterrupt, StorageError)):
                atomic.publish(temporary, str(path), new=writer == "is refused")
    if writer in ("fails", "is refused"):
        atomic.remove_temporary(temporary)
    else:
        temporaries.release(temporary)
        temporaries.release(gda_folder.folder_of(temporary))
        atomic.remove_stale(str(tmp_path))
    assert names(tmp_path) == ["c_1", "c_1_gda"]
    assert (path.readlink() if path.is_symlink() else path.read_bytes()) == before
    assert (names(f"{path}_gda"), names(f"{path}_gda/a")) == (["a"], [".zarray", "0", "1"])


@pytest.mark.parametrize("first", [True, False])
def test_an_interruption_behind_the_rename_takes_no_arrays(
    tmp_path: Path, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has its name already, so its arrays stay; so do the old ones, until that name is on the disk."""
    path, replace = tmp_path / "c_1", os.replace
    monkeypatch.setattr(gda_folder, "_BLOCK", 40)  # bytes read at once: a reference to the arrays lies in two of them
    if not first:
        save(path, {"a": Spread(np.full(4, 1))})
    temporary = atomic.temporary_path(str(path))
    write(temporary, {"a": Spread(np.full(4, 2))})

    def interrupted(*arguments: Any) -> None:
        replace(*arguments)
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            atomic.publish(temporary, str(path))
    assert "a" in os.listdir(f"{path}_gda")
    atomic.remove_temporary(temporary)
    atomic.remove_stale(str(tmp_path))
    assert load(path)[("a",)].tolist() == [2] * 4


def test_a_writer_that_is_killed_before_it_removes_what_it_replaced(tmp_path: Path) -> None:
    """Its folder tells of it, also where a long name leaves little room."""
    path = tmp_path / ("n" * 179)
    save(path, {"a": Spread(np.arange(4))})
    temporary = atomic.temporary_path(str(path))
    write(temporary, {"a": Spread(np.arange(4))})
    folder, generation = gda_folder.folder_of(temporary), temporaries.generation_of(temporary)
    os.rename(f"{folder}/{generation}", f"{path}_gda/{generation}")
    os.replace(temporary, path)
    for left in (temporary, folder):
        temporaries.release(left)
    atomic.remove_stale(str(tmp_path))
    assert (names(f"{path}_gda"), len(names(tmp_path))) == ([generation], 2)
