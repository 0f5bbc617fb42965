"""Names, listing, overwrite and retention: the rules that both formats share, also in one directory."""

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import errors as flax_errors
from flax.training import checkpoints as flax_checkpoints
from hypothesis import example, given, settings

from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat._core.local import atomic, temporaries
from flax_ckpt_compat._discovery import saved_steps
from flax_ckpt_compat._save import retention
from tests.random_cases import saves
from tests.support.logs import warnings_logged
from tests.support.profiles import examples
from tests.support.saves import around, names, save_by, tree, use_flag

LITERAL_PREFIXES = ["ck[1]_", "ck*_", "a-", "v1.", "run2", "sub/ck_", "sub/deep/", "", "x y_", "é_"]


def restored(path: Any, **arguments: Any) -> float:
    """Which save a restored tree is from."""
    found = ours.restore_checkpoint(path, None, **arguments)
    np.testing.assert_array_equal(found["w"], np.full(3, found["n"], np.float32))
    return float(found["n"])


def half_written(folder: Path, name: str = "checkpoint_9") -> Path:
    """An Orbax directory whose writer died before it merged and described what it had written."""
    with use_flag(True):
        path = Path(ours.save_checkpoint(folder / "elsewhere", tree(9), 9))
    (path / "_METADATA").unlink()
    (path / "manifest.ocdbt").unlink()
    (path / "default.orbax-checkpoint-tmp").mkdir()
    return path.rename(folder / name)


# Rule 1


def test_steps_of_a_replicated_state(flag: bool, tmp_path: Path) -> None:
    """Flax names them after the whole array, which its own flag then cannot restore; here they are numbers."""
    with use_flag(False):
        flax_checkpoints.save_checkpoint(tmp_path, tree(9), np.array([9, 9]), overwrite=True)
    assert ours.latest_checkpoint(tmp_path) == f"{tmp_path}/checkpoint_[9 9]"
    assert restored(tmp_path, step=np.array([9, 9])) == 9
    for step in (10, 11, 12):
        saved = ours.save_checkpoint(tmp_path, tree(step), jax.numpy.array([step, step]), keep=2)
        assert saved == f"{tmp_path}/checkpoint_{step}" == ours.latest_checkpoint(tmp_path)
    assert ours.available_steps(tmp_path) == [11, 12]
    assert restored(tmp_path, step=np.array([[11], [11]])) == 11
    with pytest.raises(errors.ArgumentError, match=r"one number, or an array of equal ones, found .* \(2,\)"):
        ours.save_checkpoint(tmp_path, tree(13), np.array([13, 14]))


@pytest.mark.parametrize("prefix", LITERAL_PREFIXES)
def test_prefixes_are_literal_text(flag: bool, tmp_path: Path, prefix: str) -> None:
    """Globs, signs, points, digits and slashes in a prefix mean themselves in every call."""
    for step in (8, 9, 10):
        path = ours.save_checkpoint(tmp_path, tree(step), step, prefix=prefix, keep=2)
        assert path == str(tmp_path / f"{prefix}{step}")
    assert ours.available_steps(tmp_path, prefix) == [9, 10]
    assert ours.latest_checkpoint(tmp_path, prefix) == str(tmp_path / f"{prefix}10")
    assert restored(tmp_path, prefix=prefix) == 10
    assert restored(tmp_path, prefix=prefix, step=9) == 9
    with pytest.raises(errors.InvalidCheckpointError):
        ours.save_checkpoint(tmp_path, tree(9), 9, prefix=prefix)
    ours.save_checkpoint(tmp_path, tree(9.5), 9, prefix=prefix, keep=2, overwrite=True)
    assert ours.available_steps(tmp_path, prefix) == [9]
    assert restored(tmp_path, prefix=prefix) == 9.5


def test_a_link_to_the_directory_is_the_directory(flag: bool, tmp_path: Path) -> None:
    """Saving through a symbolic link, and restoring through it or past it, see the same checkpoints; ``..`` in a prefix
    means what it means to the file system, so that the returned path is where the save is."""
    real, link = tmp_path / "real" / "inner", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    for step in (1, 2):
        assert ours.save_checkpoint(link, tree(step), step) == str(link / f"checkpoint_{step}")
    assert names(real) == ["checkpoint_2"]
    assert restored(real) == restored(link) == 2
    assert os.path.exists(ours.save_checkpoint(link, tree(3), 3, prefix="../c_"))
    assert names(tmp_path / "real") == ["c_3", "inner"]
    assert restored(link, prefix="../c_") == 3


# Rule 2


def test_named_checkpoints_stand_outside_the_order(flag: bool, tmp_path: Path) -> None:
    """``checkpoint_best`` is restored by name, never evicted, blocks nothing, and is latest only when alone."""
    ours.save_checkpoint(tmp_path, tree(0.5), "best")
    assert restored(tmp_path) == 0.5
    for step in (1, 2, 3):
        ours.save_checkpoint(tmp_path, tree(step), step)
    ours.save_checkpoint(tmp_path, tree(2), 2, overwrite=True)
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_best"]
    assert restored(tmp_path) == 2
    assert restored(tmp_path, step="best") == 0.5
    assert restored(tmp_path / "checkpoint_best") == 0.5
    with pytest.raises(errors.InvalidCheckpointError):
        ours.save_checkpoint(tmp_path, tree(0.7), "best")
    ours.save_checkpoint(tmp_path, tree(0.7), "best", overwrite=True)
    assert restored(tmp_path, step="best") == 0.7
    assert ours.available_steps(tmp_path) == [2]


# Rule 3


@pytest.mark.parametrize("kind", ["half written", "touch", "mkdir"])
def test_an_incomplete_checkpoint_is_told_once(
    kind: str, flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By each save and each restore that skips it: half written, an empty file, an empty folder."""
    half_written(tmp_path) if kind == "half written" else getattr(tmp_path / "checkpoint_9", kind)()
    for step in (7, 8):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "flax_ckpt_compat"):
            ours.save_checkpoint(tmp_path, tree(step), step, keep=2)
        assert sum("checkpoint_9" in record.getMessage() for record in caplog.records) == 1
    caplog.clear()
    assert restored(tmp_path) == 8
    assert sum("checkpoint_9" in record.getMessage() for record in caplog.records) == 1
    ours.save_checkpoint(tmp_path, tree(11), 11, keep=9)
    ours.save_checkpoint(tmp_path, tree(10), 10, keep=2, overwrite=True)  # removes 11; 9 is none of the two that stay
    assert ours.available_steps(tmp_path) == [8, 10]


# Rules 4 to 6


@pytest.mark.parametrize("step", [5, 3, 5.0, -1, 4.5])
def test_an_outdated_step_is_refused_before_anything_is_written(flag: bool, tmp_path: Path, step: float) -> None:
    """The error is Flax's and a ValueError, and the directory stays as it was, to the last byte."""
    ours.save_checkpoint(tmp_path, tree(5), 5)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for manager in (None, ours.AsyncManager()):
        with pytest.raises(errors.InvalidCheckpointError) as caught:
            ours.save_checkpoint(tmp_path, tree(step), step, async_manager=manager)
        assert isinstance(caught.value, flax_errors.InvalidCheckpointError) and isinstance(caught.value, ValueError)
        assert "checkpoint_5" in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_refusal_names_what_overwrite_would_remove(
    flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps with items are a manager's own: they stay, and are not named."""
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(step_prefix="checkpoint")) as manager:
        manager.save(8, args=ocp.args.Composite(a=ocp.args.StandardSave(tree()), b=ocp.args.JsonSave({"c": 1})))
    for step in (9, 10):
        ours.save_checkpoint(tmp_path, tree(step), step, keep=5)
    with pytest.raises(errors.InvalidCheckpointError, match=r"and to remove checkpoint_9, checkpoint_10\."):
        ours.save_checkpoint(tmp_path, tree(7), 7)
    for step in (11, 12, 13):
        ours.save_checkpoint(tmp_path, tree(step), step, keep=9)
    half_written(tmp_path, "checkpoint_12.5")  # only the first four are looked at, of what may be thousands
    with pytest.raises(errors.InvalidCheckpointError, match=r"_9, checkpoint_10, checkpoint_11, newer ones up to .*13"):
        ours.save_checkpoint(tmp_path, tree(7), 7)
    assert "checkpoint_12.5" not in caplog.text
    (tmp_path / "elsewhere").rmdir()
    shutil.rmtree(tmp_path / "checkpoint_12.5")
    ours.save_checkpoint(tmp_path, tree(7), 7, overwrite=True)
    assert names(tmp_path) == ["checkpoint_7", "checkpoint_8"]


def test_two_spellings_of_a_step_are_one_step(flag: bool, tmp_path: Path) -> None:
    """7.0 exists where 7 does; overwriting one of them leaves only the one just saved."""
    ours.save_checkpoint(tmp_path, tree(1), 7.0)
    with pytest.raises(errors.InvalidCheckpointError, match="same step"):
        ours.save_checkpoint(tmp_path, tree(2), 7)
    ours.save_checkpoint(tmp_path, tree(2), 7, keep=5, overwrite=True)
    assert (names(tmp_path), restored(tmp_path)) == (["checkpoint_7"], 2)
    ours.save_checkpoint(tmp_path, tree(3), 7.0, keep=5, overwrite=True)
    assert (names(tmp_path), restored(tmp_path)) == (["checkpoint_7.0"], 3)


def test_huge_steps_are_told_apart(flag: bool, tmp_path: Path) -> None:
    """Clock readings in nanoseconds differ by less than a float can show, and still are different steps."""
    first = 1_795_210_434_730_666_001
    for step in (first, first + 1, first + 2):
        ours.save_checkpoint(tmp_path, tree(), step, keep=2)
    assert ours.available_steps(tmp_path) == [first + 1, first + 2]


# Rules 7 and 8


def test_array_folders_go_with_their_checkpoint(flag: bool, tmp_path: Path) -> None:
    """Eviction takes the ``_gda`` folder along; those of other prefixes are left."""
    for name in ("checkpoint_1_gda", "checkpoint_best_gda", "other_1_gda", "checkpoint_2_gda"):
        (tmp_path / name / "w").mkdir(parents=True)
    for step in (1, 2):
        with use_flag(False):
            flax_checkpoints.save_checkpoint(tmp_path, tree(step), step, keep=9)
    ours.save_checkpoint(tmp_path, tree(3), 3, keep=2)
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_2_gda", "checkpoint_3", "checkpoint_best_gda", "other_1_gda"]


def test_a_file_goes_before_its_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is stopped between the two leaves no step that looks whole, and lacks its arrays."""
    ours.save_checkpoint(tmp_path, tree(1), 1)
    (tmp_path / "checkpoint_1_gda" / "w").mkdir(parents=True)
    around(monkeypatch, atomic, "discard", then=Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ours.save_checkpoint(tmp_path, tree(2), 2)
    assert names(tmp_path) == ["checkpoint_1_gda", "checkpoint_2"]


def test_an_eviction_that_another_process_does_first_is_no_error(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that clean one directory do not make each other's saves fail."""
    for step in (1, 2):
        ours.save_checkpoint(tmp_path, tree(step), step, keep=2)
    discard = atomic.discard

    def too_late(directory: str, doomed: Iterable[str]) -> dict[str, errors.StorageError]:
        doomed = list(doomed)
        for path in (Path(directory, name) for name in doomed):
            if os.path.lexists(path):
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        return discard(directory, doomed)

    monkeypatch.setattr(atomic, "discard", too_late)
    ours.save_checkpoint(tmp_path, tree(3), 3, keep=1)
    assert names(tmp_path) == ["checkpoint_3"]


@pytest.mark.parametrize("listed", [False, True])
def test_two_writers_that_evict_each_others_leave_something(
    flag: bool, listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the other one, as its ``overwrite`` or ``keep`` says, removes what was just saved, the rest stays."""
    for step in (1, 2):
        ours.save_checkpoint(tmp_path, tree(step), step, keep=2)
    counted_steps = saved_steps.counted_steps

    def then_evicted(*arguments: Any, **options: Any) -> dict[str, bool]:
        found = counted_steps(*arguments, **options)
        saved = tmp_path / "checkpoint_3"
        shutil.rmtree(saved) if saved.is_dir() else saved.unlink(missing_ok=True)
        return {name: counts for name, counts in found.items() if listed or name != "checkpoint_3"}

    monkeypatch.setattr(saved_steps, "counted_steps", then_evicted)
    ours.save_checkpoint(tmp_path, tree(3), 3, keep=1, overwrite=True)
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.slow
def test_two_writers_that_evict_each_others_at_the_same_time_leave_one(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One removes what is newer, the other what is older, and each has just seen that its own is there."""
    published, removes = threading.Event(), threading.Event()
    hide, remove_others = atomic._hide, retention._remove_others

    def remove_later(request: Any, *listing: Any) -> None:
        if request.name == "checkpoint_7":
            published.set()
            assert removes.wait(60)
        remove_others(request, *listing)

    def hide_later(path: str, *rest: Any) -> Any:
        if path.endswith("checkpoint_7"):
            removes.set()
            other.join(0.5)
        return hide(path, *rest)

    monkeypatch.setattr(retention, "_remove_others", remove_later)
    monkeypatch.setattr(atomic, "_hide", hide_later)
    other = threading.Thread(target=lambda: ours.save_checkpoint(tmp_path, tree(7), 7, keep=1))
    other.start()
    assert published.wait(60)
    ours.save_checkpoint(tmp_path, tree(5), 5, overwrite=True)
    other.join()
    assert names(tmp_path) == ["checkpoint_5"]


def test_a_writer_that_is_stopped_while_it_evicts_stops_no_other(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is given up after a while, and a file system without locks needs none; a link to it has the same."""
    monkeypatch.setattr(atomic, "_LOCK_SECONDS", 0.1)
    ours.save_checkpoint(tmp_path, tree(1), 1)
    with atomic.locked(str(tmp_path)):
        ours.save_checkpoint(tmp_path, tree(2), 2)
    (tmp_path / "link").symlink_to(tmp_path)
    with atomic.locked(str(tmp_path / "link")), temporaries.locked_if_free(str(tmp_path)) as is_free:
        assert is_free is False
    (tmp_path / "link").unlink()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    ours.save_checkpoint(tmp_path, tree(3), 3)
    assert names(tmp_path) == ["checkpoint_3"]


# Rules 9 and 10


@pytest.mark.parametrize("form", ["rel", "rel/", "./rel", "rel/sub/../sub//", "{abs}", "{abs}/", "path"])
def test_paths_come_back_as_flax_returns_them(
    flag: bool, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths, trailing slashes and PathLikes work; the returned path is the one that Flax returns."""
    monkeypatch.chdir(tmp_path)
    given: Any = Path("rel") if form == "path" else form.format(abs=tmp_path / "x")
    for prefix in ("checkpoint_", "sub/c_"):
        path = ours.save_checkpoint(given, tree(4), 4, prefix=prefix)
        latest = ours.latest_checkpoint(given, prefix)
        assert restored(given, prefix=prefix) == 4
        shutil.rmtree(given)
        with use_flag(False):
            assert flax_checkpoints.save_checkpoint(given, tree(4), 4, prefix=prefix) == path
        if prefix == "checkpoint_":  # with a slash in the prefix, Flax finds none
            assert flax_checkpoints.latest_checkpoint(given) == latest


def test_available_steps_are_of_the_asked_type(flag: bool, tmp_path: Path) -> None:
    """Numbers of ``step_type`` in order, or an error that names what does not fit."""
    for step in (1, 2.5, np.float32(-1.5)):
        ours.save_checkpoint(tmp_path / "mixed", tree(), step, keep=0, overwrite=step == -1.5)
    for step in (-1, 2.5):
        ours.save_checkpoint(tmp_path, tree(), step, keep=0)
    assert ours.available_steps(tmp_path, step_type=float) == [-1.0, 2.5]
    with pytest.raises(ValueError, match=r"checkpoint_2\.5"):
        ours.available_steps(tmp_path)
    assert ours.available_steps(tmp_path / "mixed", step_type=float) == [-1.5]
    assert ours.available_steps(tmp_path / "nowhere") == []


# Which checkpoints are left after a sequence of saves: ours on both formats against real legacy Flax


def of_both(calls: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """A case of saves with one prefix, in both formats by turns."""
    return [{"prefix": "checkpoint_", "flag": bool(n % 2), **call} for n, call in enumerate(calls)], []


@settings(max_examples=examples(50, quick=1))
@given(saves.SEPARATE)
@example(of_both([{"step": 5}, {"step": 3}]))
@example(of_both([{"step": 5}, {"step": 9, "keep": 3}, {"step": 7, "keep": 3, "overwrite": True}]))
@example(of_both([{"step": 0.9}, {"step": 0.7}, {"step": 0.7, "overwrite": True}]))
@example(of_both([{"step": step, "keep_every_n_steps": 20} for step in range(0, 60, 5)]))
@example(of_both([{"step": step, "keep_every_n_steps": 100} for step in (100, 205, 250, 299, 310, 420)]))
@example(of_both([{"step": step, "keep": 2, "keep_every_n_steps": 3} for step in range(-6, 11)]))
@example(of_both([{"step": step, "keep": keep} for step, keep in enumerate((0, np.inf, 1e6, 3, 2))]))
@example(of_both([{"step": step, "keep": 3} for step in (1, 2, 3, 2.5, 4, 5, 4.5, 6)]))
@example(of_both([{"step": 2, "flag": one, "overwrite": True} for one in (True, False, True)]))  # files and folders
def test_any_sequence_of_saves_leaves_what_flax_leaves(case: tuple[list[dict[str, Any]], list[str]]) -> None:
    """Steps, prefixes, keep, overwrite and keep_every_n_steps act as in legacy Flax, errors included."""
    saves.check_separate(*case)


# Two prefixes of which one is the beginning of the other, in one directory


@pytest.mark.parametrize(("short", "long"), [("v", "v2"), ("", "7"), ("run-1", "run-1.5"), ("a", "a-"), ("m", "m1e")])
def test_neither_evicts_nor_blocks_the_other(flag: bool, tmp_path: Path, short: str, long: str) -> None:
    """Whatever their order, each keeps its own newest, although the names of one read as steps of the other."""
    with warnings_logged() as warnings:
        for step in (3, 4, 5):
            ours.save_checkpoint(tmp_path, tree(step), step, prefix=long)
            ours.save_checkpoint(tmp_path, tree(-step), step, prefix=short)
    assert names(tmp_path) == sorted([f"{long}5", f"{short}5"])
    assert ours.restore_checkpoint(tmp_path, None, 5, prefix=long)["n"] == 5
    assert ours.restore_checkpoint(tmp_path, None, 5, prefix=short)["n"] == -5
    (warning,) = warnings
    assert f"The prefixes {short!r} and {long!r}" in warning and str(tmp_path) in warning


def test_overwrite_removes_only_its_own(flag: bool, tmp_path: Path) -> None:
    """What is newer under the other prefix stays, and an older step of one's own is refused as ever."""
    ours.save_checkpoint(tmp_path, tree(3), 3, prefix="v2")
    for step in (6, 7):
        ours.save_checkpoint(tmp_path, tree(step), step, prefix="v", keep=0)
    with pytest.raises(errors.InvalidCheckpointError, match="v7 is newer"):
        ours.save_checkpoint(tmp_path, tree(5), 5, prefix="v")
    ours.save_checkpoint(tmp_path, tree(5), 5, prefix="v", overwrite=True)
    assert names(tmp_path) == ["v23", "v5"]


def test_prefixes_that_share_no_name_are_not_mentioned(flag: bool, tmp_path: Path) -> None:
    """Nor are the same prefixes in two directories."""
    with warnings_logged() as warnings:
        for prefix in ("ckpt_", "ckpt_best_", "ckpt"):
            ours.save_checkpoint(tmp_path, tree(1), 1, prefix=prefix)
        ours.save_checkpoint(tmp_path / "a", tree(1), 1, prefix="v")
        ours.save_checkpoint(tmp_path / "b", tree(1), 1, prefix="v2")
    assert not warnings


# The clock jumps between saves: steps are ordered by their numbers, never by time


@pytest.mark.parametrize("jump", [-3600.0, 2 * 24 * 3600.0])
@pytest.mark.parametrize("background", [False, True])
def test_the_clock_jumps_in_the_middle_of_a_save(
    flag: bool, jump: float, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the commit and retention: an hour back, and further than a dead writer's temporaries stay."""
    now, manager = time.time(), checkpoints.AsyncManager() if background else None

    def jumped() -> float:
        return now + jump * (tmp_path / "checkpoint_3").exists()

    monkeypatch.setattr(time, "time", jumped)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumped() * 1e9))
    for step in range(1, 6):
        live = tmp_path / f".checkpoint_9.{'0' * 12}-1-1-0new.orbax-checkpoint-tmp_gda"  # of another machine
        live.touch()
        save_by(manager, tmp_path, tree(step), step, keep=2)
        assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == step
    assert names(tmp_path) == [live.name, "checkpoint_4", "checkpoint_5"]
