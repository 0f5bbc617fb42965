"""What restore recognises, and what it says of everything else: named, never executed, never half restored.

And what errors and warnings say of paths that hold no checkpoint, where one is near."""

import logging
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from flax import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler

from flax_ckpt_compat import checkpoints, cli, config, errors, open_checkpoint, plan_restore, restore, save
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._discovery import foreign, locating, saved_steps
from flax_ckpt_compat._discovery.contents import State, contents_of
from flax_ckpt_compat.errors import CheckpointNotFoundError, UnrecognizedFormatError
from tests.support.peers import ocp_v1
from tests.support.profiles import examples
from tests.support.samples import fingerprint
from tests.support.saves import save_items, tree

TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"n": np.int8([1])}}
ZEROS = {"a": np.zeros((2, 3), np.float32), "b": {"n": np.int8([0])}}


def same(restored: Any, expected: Any = TREE) -> None:
    """Asserts equality to the last bit."""
    assert fingerprint(restored) == fingerprint(expected)


@pytest.mark.parametrize(
    "value",
    [91, 123, 0, {}, [], "", None, True, 2.5, "{", -1, {"a": [1, [np.ones(2)], {}], "b": []}, TREE],
    ids=lambda value: f"{type(value).__name__} {str(value)[:9]!r}",
)
def test_msgpack_files_of_any_name(value: Any, tmp_path: Path) -> None:
    """As real Flax restores them: short ones that look like JSON, and msgpack's arrays, which Flax never writes."""
    content = serialization.msgpack_serialize(value)
    for name in ("model.ckpt", "flax_model.msgpack", "7", "weights", "ViT.v1.0"):
        (tmp_path / name).write_bytes(content)
        same(checkpoints.restore_checkpoint(tmp_path / name, None), serialization.msgpack_restore(content))
        if value is TREE:
            same(checkpoints.restore_checkpoint(str(tmp_path / name), ZEROS))


def test_what_vanishes_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another process removes makes no directory of checkpoints of a checkpoint that was begun."""
    (tmp_path / "state.orbax-checkpoint-tmp-1").mkdir()
    file, may_be = tmp_path / "checkpoint_3", foreign.may_be_msgpack_tree
    file.write_bytes(serialization.to_bytes(TREE))
    assert contents_of(location_of(tmp_path)).state is State.FOREIGN

    def removed(path: str) -> bool:
        file.unlink()
        return may_be(path)

    monkeypatch.setattr(foreign, "may_be_msgpack_tree", removed)
    assert contents_of(location_of(tmp_path)).state is State.INCOMPLETE


def test_steps_of_other_prefixes_are_not_a_managers(tmp_path: Path) -> None:
    """Step directories of another prefix than the caller's, or of several, are nobody's latest; plain numbers are."""
    for name in ("opt_5", "ema_7"):
        ocp_v1.save(tmp_path / name, ZEROS)
        assert checkpoints.restore_checkpoint(tmp_path, None, prefix="model_") is None
    assert checkpoints.restore_checkpoint(tmp_path, None) is None
    same(checkpoints.restore_checkpoint(tmp_path, None, prefix="opt_"), ZEROS)
    ocp_v1.save(tmp_path / "3", TREE)
    same(checkpoints.restore_checkpoint(tmp_path, None))
    same(checkpoints.restore_checkpoint(tmp_path, None, prefix="model_"))
    same(checkpoints.restore_checkpoint(tmp_path, None, step=3))


def test_items_of_other_handlers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Arrays and random keys are items, too; a directory of another kind is named in a warning."""
    key, args = jax.random.key(3), ocp.args
    save_items(tmp_path, 1, arr=args.ArraySave(np.arange(3)), key=args.JaxRandomKeySave(key), state=TREE)
    (tmp_path / "1" / "odd").mkdir()
    (tmp_path / "1" / "descriptor").mkdir()  # internal releases of Orbax made these; nobody misses them
    expected = {"arr": np.arange(3), "key": key, "state": TREE}
    same(checkpoints.restore_checkpoint(tmp_path, None), expected)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "flax_ckpt_compat"]
    assert warning.endswith("left out: odd")
    same(checkpoints.restore_checkpoint(tmp_path, ZEROS))  # the one called state is meant
    for name in ("arr", "key", "state"):
        same(checkpoints.restore_checkpoint(tmp_path / "1" / name, None), expected[name])


@pytest.mark.parametrize("content", [b"see checkpoint_1", b"", msgpack.packb({"x": 1}), b"model_checkpoint_path: 'x'"])
def test_a_stray_file_called_checkpoint(content: bytes, flag: bool, tmp_path: Path) -> None:
    """A file called checkpoint, of whatever content, hides no checkpoints beside it, nor blocks a save."""
    (tmp_path / "checkpoint").write_bytes(content)
    checkpoints.save_checkpoint(tmp_path, TREE, 1)
    same(checkpoints.restore_checkpoint(tmp_path, ZEROS))
    same(checkpoints.restore_checkpoint(tmp_path, ZEROS, step=1))
    assert checkpoints.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_1")


# What lies in a directory without checkpoints → the level at which a restore of Flax tells that.
NOTHING: dict[str, tuple[list[str], int]] = {
    "no directory": ([], logging.INFO),
    "an empty one": ([""], logging.INFO),
    "TensorBoard's files": ([f"events.out.tfevents.170000000{n}.host.17.{n}" for n in range(2)], logging.INFO),
    "a user's": (["notes.txt", "sub/x"], logging.WARNING),
    "a name of Orbax's, and data in zarr": (["config.yaml", "d/notes.txt", "digits.zarr/.zarray"], logging.WARNING),
    "pictures": (["images_2/a.png"], logging.WARNING),
    "an interrupted first save": (["checkpoint_3.orbax-checkpoint-tmp-17/x"], logging.WARNING),
    "an interrupted step": (["7.orbax-checkpoint-tmp/x"], logging.WARNING),
}


@pytest.mark.parametrize("there", NOTHING)
def test_nothing_to_restore(there: str, flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The very target comes back, which is told once; where it must exist, an error is raised; and a save can begin."""
    (contents, level), run, target = NOTHING[there], tmp_path / "run", {"x": 1}
    if contents:
        run.mkdir()
    for name in filter(None, contents):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"\x81\0\0\0\0\0\0\0\x12\x34\x56\x78brain.Event:2")
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        for _ in range(3):
            assert checkpoints.restore_checkpoint(run, target) is target
            assert checkpoints.latest_checkpoint(run) is None
    (record,) = [record for record in caplog.records if record.name == "flax_ckpt_compat"]
    assert record.levelno == level
    assert str(run) in record.getMessage() and "did you mean" not in record.getMessage()
    for one in (None, target):
        assert checkpoints.restore_checkpoint(run, one) is one
        assert restore(run, one, must_exist=False) is one
        with pytest.raises(CheckpointNotFoundError, match="nothing to restore") as caught:
            restore(run, one)
        assert isinstance(caught.value, FileNotFoundError) and isinstance(caught.value, ValueError)
        assert str(run) in str(caught.value)
        with config.override(must_exist=True), pytest.raises(CheckpointNotFoundError, match="nothing to restore"):
            checkpoints.restore_checkpoint(run, one)
        with pytest.raises(CheckpointNotFoundError):
            restore(run, one, step=1, must_exist=False)
    assert run.exists() == bool(contents)
    checkpoints.save_checkpoint(run, {"x": 2}, 1)
    assert checkpoints.restore_checkpoint(run, target) == {"x": 2}


def test_an_array_that_is_named_like_a_database(tmp_path: Path) -> None:
    """Orbax 0.4.4 without OCDBT leaves one process' database, and an empty folder for each array, whatever its name."""
    for name in ("_METADATA", "checkpoint"):
        (tmp_path / name).touch()
    for name in ("ocdbt.process_0", "my.ocdbt.process_1"):
        (tmp_path / name).mkdir()
    assert contents_of(location_of(tmp_path)).is_complete
    (tmp_path / "ocdbt.process_1").mkdir()
    assert "were never merged" in contents_of(location_of(tmp_path)).why


def test_a_directory_of_runs_is_no_managers_root(flag: bool, tmp_path: Path) -> None:
    """Runs in numbered directories, each with checkpoints of its own, are nobody's steps and items."""
    for seed in (0, 1):
        checkpoints.save_checkpoint(tmp_path / str(seed), {"seed": seed}, 10)
    target = {"seed": -1}
    for prefix in ("checkpoint_", "chkpt_"):
        assert checkpoints.restore_checkpoint(tmp_path, target, prefix=prefix) is target
    checkpoints.save_checkpoint(tmp_path / "1", {"seed": 1}, "best")
    assert checkpoints.restore_checkpoint(tmp_path, target) is target
    assert checkpoints.restore_checkpoint(tmp_path / "1", target) == {"seed": 1}


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def _safetensors(path: Path, header_length: int) -> None:
    """A file of the published layout: 8 bytes of length, little-endian, a JSON header padded with spaces, the data."""
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(header_length)
    path.write_bytes(struct.pack("<Q", header_length) + header + np.ones(2, "<f4").tobytes())


# Beside the rows of path_kinds.toml.
FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "safetensors, as pickle": (lambda p: _safetensors(p, 0x0280), "safetensors"),
    "safetensors, as a container": (lambda p: _safetensors(p, 0x01D8), "safetensors"),
    "safetensors, as gzip": (lambda p: _safetensors(p, 0x8B1F), "safetensors"),
    "safetensors, empty": (lambda p: p.write_bytes(struct.pack("<Q", 2) + b"{}"), "safetensors"),
    "text, cut in a character": (lambda p: p.write_text("x" + "\u00e9" * 400, encoding="utf-8"), "a text file"),
    "a map with a list as a key": (lambda p: p.write_bytes(b"\x81\x81\x90\x01\x02" + 600 * b"x"), "msgpack"),
    "python": (lambda p: p.write_text("import jax\n\nprint(jax.devices())\n"), "a text file"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_of_others_are_named(kind: str, tmp_path: Path) -> None:
    """A file that is not a checkpoint is an error that says what it looks like, by path and as the latest."""
    make, word = FOREIGN[kind]
    make(tmp_path / "checkpoint_1")
    for path in (tmp_path / "checkpoint_1", tmp_path):
        with pytest.raises(UnrecognizedFormatError, match=word) as caught:
            checkpoints.restore_checkpoint(path, None)
        assert str(tmp_path / "checkpoint_1") in str(caught.value)
        assert caught.value.__cause__ is None and caught.value.__context__ is None
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_not_opened(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle is refused and never executed."""
    monkeypatch.setenv("BOMB", str(tmp_path / "boom"))
    (tmp_path / "f.ckpt").write_bytes(pickle.dumps(_Bomb(), protocol=protocol))
    with pytest.raises(CheckpointError):
        checkpoints.restore_checkpoint(tmp_path / "f.ckpt", None)
    assert not (tmp_path / "boom").exists()


def test_truncated_files_at_every_length(tmp_path: Path) -> None:
    """A msgpack file cut anywhere is an error that names the file, never a part of the tree."""
    whole = serialization.to_bytes(TREE)
    for length in range(len(whole)):
        (tmp_path / "f").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=str(tmp_path / "f")) as caught:
            checkpoints.restore_checkpoint(tmp_path / "f", None)
        assert caught.value.path == str(tmp_path / "f")


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=40))
def test_random_bytes(content: bytes, tmp_path: Path) -> None:
    """Arbitrary bytes restore or raise a CheckpointError, and nothing else."""
    (tmp_path / "f").write_bytes(content)
    try:
        checkpoints.restore_checkpoint(tmp_path / "f", None)
    except CheckpointError as error:
        assert str(tmp_path / "f") in str(error)


TARGET = {"nothing": 0}
RAISING: dict[str, Callable[..., Any]] = {
    "restore": restore,
    "restore step": lambda path, **prefix: restore(path, step=7, **prefix),
    "restore_checkpoint step": lambda path, **prefix: checkpoints.restore_checkpoint(path, None, 7, **prefix),
    "open_checkpoint": open_checkpoint,
    "open_checkpoint step": lambda path, **prefix: open_checkpoint(path, 7, **prefix),
    "plan_restore": lambda path, **prefix: plan_restore(path, TARGET, **prefix),
}


def refuse(path: str) -> Any:
    """Raise as a system does that lets nobody look."""
    raise PermissionError(13, "Permission denied", path)


def error_of(call: Callable[..., Any], path: Any, **prefix: str) -> str:
    """The message of the error for a path without checkpoints, which says what to do."""
    with pytest.raises(errors.CheckpointNotFoundError) as caught:
        call(path, **prefix)
    assert caught.value.path is not None and os.path.isabs(caught.value.path)
    text = str(caught.value)
    assert re.search(r"[:;,(] ?(so )?(pass|did you mean|check|leave out|restore|available|mount|list)\b", text), text
    return text


def warning_of(path: Any, caplog: pytest.LogCaptureFixture) -> str:
    """The only warning of restore_checkpoint, which returns the target."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flax_ckpt_compat"):
        assert checkpoints.restore_checkpoint(path, TARGET) is TARGET
    (warning,) = caplog.messages
    return warning


def test_a_folder_one_level_up(format: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors and the warning name the folders below that hold checkpoints, or are one."""
    save(tmp_path / "a", tree(1), step=1, format=format)
    save(tmp_path / "b", tree(1), step=1, prefix="best_", format=format)
    (tmp_path / "c").mkdir()
    (tmp_path / "notes.txt").write_text("none")
    expected = f"there are checkpoints at {tmp_path}/a, {tmp_path}/b: pass one of these paths"
    for call in RAISING.values():
        assert expected in error_of(call, tmp_path)
    assert expected in warning_of(tmp_path, caplog)


def test_the_look_below_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Few of many folders are named, none further down is looked for, and no more than the first twenty opened."""
    for number in range(6):
        save(tmp_path / "many" / f"run{number}", tree(1), step=1, format="msgpack")
    assert f"{tmp_path}/many/run4 and 1 more: pass one" in warning_of(tmp_path / "many", caplog)
    assert warning_of(tmp_path, caplog).endswith("holds no checkpoint with the prefix 'checkpoint_'")
    for number in range(20):
        (tmp_path / "many" / f"a{number}").mkdir()
    assert warning_of(tmp_path / "many", caplog).endswith("'checkpoint_'")  # names in natural order: those are first


@pytest.mark.parametrize(("name", "steps"), [("best_", (9, 10)), ("best_11", (10, 9))])
def test_a_step_that_is_not_there(
    name: str, steps: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``runs/best_11`` beside other steps, or ``runs/best_``, is no first run: a warning names those.

    Other runs are no steps."""
    for step in (9, 10):
        save(tmp_path, tree(1), step=step, prefix="best_", format="msgpack", keep=9)
    expected = f"does not exist: did you mean {tmp_path}/best_{steps[0]}, {tmp_path}/best_{steps[1]}?"
    assert expected in error_of(restore, tmp_path / name)
    assert expected in warning_of(tmp_path / name, caplog)
    for run in ("run_1", "run_2"):
        save(tmp_path / run, tree(1), step=1, format="msgpack")
    caplog.clear()
    assert checkpoints.restore_checkpoint(tmp_path / "run_3", None) is None
    assert not caplog.records


def test_a_wrong_last_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors say what is beside it, or similar; a first run, which may begin there, is not a warning."""
    runs = tmp_path / "~alice"  # which is there
    (runs / "large").mkdir(parents=True)
    assert f"does not exist: check the path; {runs} has large" in error_of(restore, runs / "7")
    assert f"did you mean {runs}/large?" in error_of(restore, runs / "lar")
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        assert checkpoints.restore_checkpoint(runs / "7", TARGET) is TARGET
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize("inner", ["d", "w", "absent"])
def test_a_path_inside_a_checkpoint(inner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Data and array folders of an Orbax checkpoint, and names that it lacks, lead to the checkpoint."""
    with Checkpointer(PyTreeCheckpointHandler(use_ocdbt=inner == "d")) as checkpointer:
        checkpointer.save(tmp_path / "run" / "checkpoint_1", {"w": tree(1)["w"]})
    path = tmp_path / "run" / "checkpoint_1" / inner
    expected = f"part of the checkpoint {tmp_path}/run/checkpoint_1: pass that path"
    for call in RAISING.values():
        assert expected in error_of(call, path)
    assert expected in warning_of(path, caplog)
    assert expected in CliRunner().invoke(cli.main, ["ls", str(path)]).output


@pytest.mark.parametrize("path", ["~/runs/a", "~root/runs", Path("~")])
def test_an_unexpanded_home(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Flax, ``~`` is a directory's name: errors and warnings say so."""
    monkeypatch.chdir(tmp_path)
    remedy = f"{tmp_path}/{path} does not exist: '~' is not expanded, so pass os.path.expanduser(path)"
    assert remedy in error_of(restore, path)
    assert remedy in warning_of(path, caplog)
    for step in (1, 2):
        assert checkpoints.save_checkpoint(path, tree(1), step) == f"{path}/checkpoint_{step}"
    assert (tmp_path / path / "checkpoint_2").exists()
    caplog.clear()
    assert checkpoints.restore_checkpoint(path, None) is not None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("first", "found"),
    [({"w": np.zeros(99)}, "found dict; "), (np.zeros((2, 99)), "found ndarray; "), (7, "found int; ")],
)
@pytest.mark.parametrize("call", [restore, save, plan_restore, checkpoints.restore_checkpoint])
def test_swapped_arguments(call: Callable[..., Any], first: Any, found: str) -> None:
    """A tree in the path's place is named by its type, without its values; the path is to come first."""
    end = "pass a str or a pathlib.Path; the path comes first, before the tree$"
    with pytest.raises(errors.ArgumentError, match=found + end):
        call(first, "runs")


def test_a_look_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing near may be listed, the error is the same without a hint."""
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(errors.CheckpointNotFoundError, match=r"absent does not exist; pass a checkpoint"):
        restore(tmp_path / "absent")
    assert checkpoints.restore_checkpoint(tmp_path / "absent", TARGET) is TARGET


def test_what_was_saved_since_the_look(tmp_path: Path) -> None:
    """A message names nothing that was not there when it was decided that there is no checkpoint."""
    save(tmp_path, tree(1), step=1, format="orbax")
    absence = locating.none_in(saved_steps.checkpoint_dir(str(tmp_path), "checkpoint_"), [])
    assert "checkpoint_1" not in str(absence)


@pytest.mark.parametrize("call", RAISING.values(), ids=RAISING)
def test_directories_that_do_not_exist(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is not there is told to be just that, by its absolute path, also below one that is there."""
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path}/absent does not exist" in error_of(call, "absent")
    assert f"the directory {tmp_path}/sub does not exist" in error_of(call, tmp_path, prefix="sub/checkpoint_")


@pytest.mark.parametrize("call", RAISING.values(), ids=RAISING)
def test_checkpoints_of_other_prefixes_are_suggested(
    call: Any, flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only other prefixes have checkpoints, at most five complete ones are named, with the prefix to pass."""
    monkeypatch.chdir(tmp_path)
    for step in (9, 10):
        checkpoints.save_checkpoint("runs", tree(step), step, "checkpoint_", keep=9)
    (tmp_path / "runs" / "notes_7").write_text("nothing of ours")
    (tmp_path / "runs" / "empty_1").mkdir()
    (tmp_path / "runs" / "checkpoint_11").touch()
    (tmp_path / "runs" / "run_3").mkdir()
    message = error_of(call, "runs", prefix="ckpt_")
    expected = "there are checkpoint_9, checkpoint_10: did you mean the prefix 'checkpoint_'?"
    assert f"{tmp_path}/runs holds no checkpoint with the prefix 'ckpt_'; {expected}" in message
    assert "did you mean the prefix 'runs/checkpoint_'?" in error_of(call, ".", prefix="runs/ckpt_")
    for step in range(1, 8):
        checkpoints.save_checkpoint("runs", tree(step), step, "a-", keep=9)
    assert "there are a-1, a-2, a-3, a-4, a-5: did you mean the prefix 'a-'?" in error_of(call, "runs", prefix="ckpt_")


def test_pointers_of_git_lfs(tmp_path: Path) -> None:
    """A model file that git-lfs never fetched is not announced as a checkpoint."""
    (tmp_path / "flax_model.msgpack").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert "flax_model.msgpack:" not in error_of(restore, tmp_path)
    assert f"restore {tmp_path}" not in error_of(restore, tmp_path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no other error than that there is no checkpoint: the target is returned."""
    for name in ("a.npz", "b.npz"):
        (tmp_path / name).write_bytes(b"PK")
    save(tmp_path, tree(1), step=1, prefix="best_", format="msgpack")
    monkeypatch.setattr(presence, "open_regular", refuse)
    assert checkpoints.restore_checkpoint(tmp_path, TARGET) is TARGET
