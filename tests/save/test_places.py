"""Directories that are no place for a checkpoint, within others, as file:// URLs, or that nobody may search."""

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

from flax_ckpt_compat import (
    checkpoints,
    config,
    convert,
    diff,
    errors,
    iter_checkpoints,
    open_checkpoint,
    plan_restore,
    restore,
    rules,
    save,
    verify,
)
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._discovery import contents
from flax_ckpt_compat._discovery.contents import why_inside
from flax_ckpt_compat.cli import main
from tests.support.peers import ocp_v1
from tests.support.saves import as_nobody, names, refuse, save_by, saved_by_peer, tree

SAVES: dict[str, Callable[..., str]] = {
    "save_checkpoint": checkpoints.save_checkpoint,
    "save_checkpoint_multiprocess": checkpoints.save_checkpoint_multiprocess,
    "save": lambda path, target, step: save(path, target, step=step),
    "overwrite": lambda path, target, step: checkpoints.save_checkpoint(path, target, step, overwrite=True),
}
LOOKS: dict[str, Callable[..., Any]] = {
    "restore_checkpoint": lambda path, step: checkpoints.restore_checkpoint(path, None, step),
    "restore": lambda path, step: restore(path, step=step),
    "open_checkpoint": open_checkpoint,
    "plan_restore": lambda path, step: plan_restore(path, tree(), step=step),
}

# A checkpoint's own directory


@pytest.mark.parametrize("function", SAVES)
def test_a_save_into_a_checkpoint_is_refused(flag: bool, tmp_path: Path, function: str) -> None:
    """One level too deep it would never be found; the message names the directory that was meant."""
    path = Path(checkpoints.save_checkpoint(tmp_path, tree(1), 1))
    before = names(path)
    with pytest.raises(errors.InvalidCheckpointError, match=f"itself a checkpoint.*holds it, {tmp_path}$"):
        SAVES[function](path, tree(2), 2)
    assert names(path) == before
    assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == 1


def test_a_directory_named_as_a_step_is_a_directory(flag: bool, tmp_path: Path) -> None:
    """As in Flax: programs that keep every epoch in a directory of its own name it so."""
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path / f"checkpoint_{step}", tree(step), step)
        assert checkpoints.restore_checkpoint(tmp_path / f"checkpoint_{step}", None, step)["n"] == step


@pytest.mark.parametrize("function", LOOKS)
def test_a_checkpoint_and_its_step(flag: bool, tmp_path: Path, function: str) -> None:
    """A checkpoint given together with step= is an error that says which of them to leave out."""
    path = checkpoints.save_checkpoint(tmp_path, tree(10), 10)
    with pytest.raises(errors.CheckpointNotFoundError, match=f"{path} is itself a checkpoint; leave out the step"):
        LOOKS[function](path, 10)


# file://


@pytest.mark.parametrize("scheme", ["file://", "file://localhost"])
def test_file_urls(flag: bool, tmp_path: Path, scheme: str) -> None:
    """They are local paths everywhere, and returned paths have the caller's form."""
    url = f"{scheme}{tmp_path}"
    for step in (1, 2):
        assert checkpoints.save_checkpoint(url, tree(step), step, keep=2) == f"{url}/checkpoint_{step}"
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2"]
    assert checkpoints.latest_checkpoint(url) == f"{url}/checkpoint_2"
    assert checkpoints.available_steps(url + "//") == [1, 2]
    for path in (url, f"{url}/checkpoint_2"):
        assert checkpoints.restore_checkpoint(path, None)["n"] == restore(path)["n"] == 2
        assert not plan_restore(path, tree()).missing
    with open_checkpoint(url, 1) as opened:
        assert opened.path == f"{tmp_path}/checkpoint_1"
    assert [record.path for record in iter_checkpoints(url)] == [f"{url}/checkpoint_1", f"{url}/checkpoint_2"]
    listed = CliRunner().invoke(main, ["ls", url]).stdout.splitlines()
    assert len(listed) == 3 and "20" in listed[1]  # with the year that it was saved in
    assert save(f"{url}/a/../best", tree(3)) == f"{url}/best"
    assert checkpoints.save_checkpoint(url, tree(4), 4, prefix="sub/../c_") == f"{url}/sub/../c_4"
    assert names(tmp_path) == ["best", "c_4", "checkpoint_1", "checkpoint_2"]


@pytest.mark.parametrize("url", ["file://host/tmp", "file:/tmp", "file://", "file://localhost"])
def test_file_urls_that_mean_nothing_here(url: str) -> None:
    """Of another machine, relative, or with a slash that pathlib dropped."""
    for call in (lambda: checkpoints.save_checkpoint(url, {}, 1), lambda: checkpoints.latest_checkpoint(url)):
        with pytest.raises(errors.StorageError):
            call()


# Names that are others to TensorStore, or none

WITH_ARRAYS = {"w": np.arange(3), "big": np.ones(200_000), "text": "x"}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("name", "why"),
    [(os.fsdecode(b"run\xff"), "is not UTF-8"), ("a\\b", "has a backslash"), ("a.__lock", "ends in .__lock")],
)
def test_names_that_tensorstore_does_not_take(
    flag: bool, tmp_path: Path, name: str, why: str, background: bool
) -> None:
    """It writes ``a\\b`` to ``a/b``: Orbax's format is refused before anything is lost, with the reason; msgpack saves.

    What it need not read is read all the same."""
    folder, manager = tmp_path / name, checkpoints.AsyncManager() if background else None
    if not flag:
        save_by(manager, folder, WITH_ARRAYS, 1)
        assert checkpoints.restore_checkpoint(folder, None)["text"] == "x"
        return
    for ckpt_dir, prefix in ((folder, "checkpoint_"), (tmp_path, f"{name}/x_")):
        with pytest.raises(errors.StorageError, match=rf"{why}.*save as msgpack") as caught:
            save_by(manager, ckpt_dir, WITH_ARRAYS, 1, prefix=prefix)
        assert str(caught.value).isprintable() and "tmp-" not in str(caught.value)
    assert names(folder) == [] and names(tmp_path) == [name]
    for step, compression in enumerate((None, "zstd")):
        with config.override(compression=compression):
            saved = Path(checkpoints.save_checkpoint(tmp_path / "run", WITH_ARRAYS, step))
        saved.rename(folder / saved.name)
        for target in (None, {**WITH_ARRAYS, "w": np.zeros(3)}):
            found = checkpoints.restore_checkpoint(folder, target, step)
            for array in ("w", "big"):
                np.testing.assert_array_equal(found[array], WITH_ARRAYS[array])
        with open_checkpoint(folder) as opened:
            assert sorted(opened.leaves()) == sorted(WITH_ARRAYS)


# Paths that no longer lead anywhere


def test_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are refused with what to do; absolute ones work."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (
        lambda: checkpoints.save_checkpoint("run", {}, 1),
        lambda: checkpoints.restore_checkpoint("run", None),
        lambda: checkpoints.latest_checkpoint("."),
    ):
        with pytest.raises(errors.StorageError, match=r"working directory.*was removed; pass an absolute path"):
            call()
    checkpoints.save_checkpoint(tmp_path, WITH_ARRAYS, 1)
    assert checkpoints.restore_checkpoint(tmp_path, None)["text"] == "x"


# Permissions


@pytest.fixture
def unsearchable(tmp_path: Path) -> Iterator[Path]:
    """A directory below one that this process may not search, which root may unless it is somebody else."""
    hidden = tmp_path / "locked" / "run"
    checkpoints.save_checkpoint(hidden, tree(1), 1)
    checkpoints.restore_checkpoint(hidden, tree())  # all modules are loaded
    list(iter_checkpoints(hidden))
    hidden.parent.chmod(0)
    with as_nobody():
        yield hidden
    hidden.parent.chmod(0o700)


CALLS: list[Callable[[Any, Any], Any]] = [
    lambda path, prefix: checkpoints.save_checkpoint(path, tree(), 2, prefix=prefix),
    lambda path, prefix: checkpoints.restore_checkpoint(path, tree(), prefix=prefix),
    lambda path, prefix: checkpoints.restore_checkpoint(path, tree(), 1, prefix=prefix),
    lambda path, prefix: checkpoints.latest_checkpoint(path, prefix),
    lambda path, prefix: checkpoints.available_steps(path, prefix),
    lambda path, prefix: save(path, tree(), step=2, prefix=prefix),
    lambda path, prefix: restore(path, tree(), prefix=prefix),
    lambda path, prefix: plan_restore(path, tree(), prefix=prefix),
    lambda path, prefix: open_checkpoint(path, prefix=prefix),
    lambda path, prefix: list(iter_checkpoints(path, prefix=prefix)),
    lambda path, prefix: verify(path, prefix=prefix),
    lambda path, prefix: diff(path, path, prefix=prefix),
    lambda path, prefix: rules.from_checkpoint(path, "n", prefix=prefix),
]


def test_what_may_not_be_searched_is_not_absent(unsearchable: Path) -> None:
    """No target comes back, and no program starts afresh, because a directory above is closed."""
    for call in (
        *(functools.partial(call, unsearchable, "checkpoint_") for call in CALLS[:-1]),  # a rule looks at nothing
        lambda: checkpoints.restore_checkpoint(unsearchable / "checkpoint_1", tree()),
        lambda: checkpoints.save_checkpoint(unsearchable / "new", tree(), 2),
        lambda: save(unsearchable / "best", tree()),
    ):
        with pytest.raises(errors.StorageError, match="Permission denied; check the permissions of") as caught:
            call()
        assert caught.value.errno == 13 and str(unsearchable) in str(caught.value)


def test_what_is_absent_is_absent(tmp_path: Path) -> None:
    """Names that are too long, below a file, or a loop of links, are not there, also while a save is on its way."""
    manager = checkpoints.AsyncManager()
    checkpoints.save_checkpoint(tmp_path / "other", {"w": np.zeros(1)}, 1, async_manager=manager)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "loop").symlink_to("loop")
    target = {"w": np.zeros(1)}
    for name in ("x" * 300, "file/below", "loop/below", "nothing", "nul\0", "\ud800"):
        assert checkpoints.restore_checkpoint(tmp_path / name, target) is target
        assert checkpoints.latest_checkpoint(tmp_path / name) is None
        assert checkpoints.available_steps(tmp_path / name) == []
    manager.wait_previous_save()


NO_FILES = ("x" * 300, "nul\0", "\ud800", "x" * 200 + "/" + "y" * 5000, "../\0/x", "../\ud800/x")


@pytest.mark.parametrize(
    ("directory", "prefix", "step"),
    [
        *((name, "checkpoint_", 1) for name in NO_FILES),
        *(("", name, 1) for name in NO_FILES),
        # Those of temporaries of Flax and Orbax would never be found again.
        *[("", "c.orbax-checkpoint-tmp_", 1), ("", "c_", "gda"), ("", "c_", "tmp"), ("", "c_", "7_gda")],
    ],
)
def test_names_that_no_checkpoint_can_have(flag: bool, tmp_path: Path, directory: str, prefix: str, step: Any) -> None:
    """Saves raise errors of ours before anything is written, whether the directory or the prefix has such a name."""
    with pytest.raises((errors.StorageError, errors.ArgumentError)):
        checkpoints.save_checkpoint(tmp_path / directory, {"n": 1}, step, prefix=prefix)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("given", [b"runs", None, 3, ["runs"], bytearray(b"runs")], ids=repr)
def test_what_is_no_path(tmp_path: Path, given: Any) -> None:
    """Directories and prefixes that are neither text nor path objects are an error of ours, a TypeError as before."""
    for what, path, prefix in (("path", given, "checkpoint_"), ("prefix", tmp_path, given)):
        for call in CALLS:
            with pytest.raises(errors.ArgumentError, match=f"a {what} is text or a path object, found") as caught:
                call(path, prefix)
            assert isinstance(caught.value, TypeError)


def test_names_without_room_for_the_suffix_of_arrays(flag: bool, tmp_path: Path) -> None:
    """A checkpoint whose name has 255 bytes is evicted like any other."""
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, {"n": step}, step, prefix="é" * 127)
    assert os.listdir(tmp_path) == ["é" * 127 + "2"]


def test_a_directory_whose_link_leads_to_nothing(flag: bool, tmp_path: Path) -> None:
    """As where the disk behind it is not mounted: a save says where it leads, and no restore starts afresh."""
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "disk" / "run")
    for folder in (run, run / "deep"):
        with pytest.raises(errors.StorageError, match=f"{run} is a link to {tmp_path}/disk/run, which does not exist"):
            checkpoints.save_checkpoint(folder, tree(1), 1)
    for step in (None, 1):
        with pytest.raises(errors.CheckpointNotFoundError, match=f"{run} is a link to {tmp_path}/disk/run"):
            checkpoints.restore_checkpoint(run, tree(), step)
    (tmp_path / "disk" / "run").mkdir(parents=True)
    checkpoints.save_checkpoint(run, tree(1), 1)
    assert checkpoints.restore_checkpoint(tmp_path / "disk" / "run", None)["n"] == 1


def test_an_older_step_that_may_not_be_read(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops no save of a newer step, which says so; what looks into it says what was refused."""
    save(tmp_path, WITH_ARRAYS, step=1, format="orbax")
    refuse(monkeypatch, "listdir", "checkpoint_1")
    checkpoints.save_checkpoint(tmp_path, tree(2), 2)
    assert "checkpoint_1 (permission to list it is denied)" in caplog.text
    assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == 2
    (one,) = [one for one in verify(tmp_path).checkpoints if one.state == "unreadable"]
    assert one.path == str(tmp_path / "checkpoint_1")


def test_what_is_set_aside_in_a_directory_of_others(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save on another machine ended while it replaced a step; who may not put the old one back is told so."""
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, tree(step), step, keep=2)
    aside = ".checkpoint_2.0123456789ab-1-2-3old.orbax-checkpoint-tmp_gda"
    (tmp_path / "checkpoint_2").rename(tmp_path / aside)
    monkeypatch.setattr(temporaries, "_STALE_SECONDS", -1.0)
    for refused in ("link", "rename"):
        refuse(monkeypatch, refused, aside)
    with pytest.raises(
        errors.StorageError, match=r"checkpoint_2 could not be put back, after a save that set it aside ended"
    ):
        checkpoints.restore_checkpoint(tmp_path, tree())
    assert checkpoints.restore_checkpoint(tmp_path, None, 1)["n"] == 1


# Checkpoints within others, linked copies, and two formats at one path: none is lost with another


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step that real Orbax wrote."""
    return Path(saved_by_peer(tmp_path, tree(1), real_orbax=True))


@pytest.mark.parametrize("below", ["sub", "sub/deep"])
def test_a_save_below_a_checkpoint_is_refused(flag: bool, step: Path, tmp_path: Path, below: str) -> None:
    """The step's eviction would take it along; the message names a directory outside. So it is with a conversion, also
    of a directory of steps, and a dry run of one."""
    (tmp_path / "link").symlink_to(step)
    src = tmp_path / "src"
    checkpoints.save_checkpoint(src, tree(7), 7)
    before, told = names(step), f"{step} is a checkpoint, and would be removed .* such as {tmp_path}$"
    for call in (
        lambda: checkpoints.save_checkpoint(step / below, tree(2), 2),
        lambda: checkpoints.save_checkpoint(step / below, tree(2), 2, overwrite=True),
        lambda: checkpoints.save_checkpoint(tmp_path, tree(2), 2, prefix=f"{step.name}/{below}/x_"),
        lambda: checkpoints.save_checkpoint(tmp_path / "link" / below, tree(2), 2),
        lambda: save(step / below / "best", tree(2)),
        *(
            functools.partial(convert, source, dst, to, step=number, dry_run=dry_run)
            for to in ("msgpack", "orbax", "manager", "safetensors")
            for source, number in ((src, None), (src / "checkpoint_7", 7))
            for dst in (step / below, tmp_path / "link" / below)
            for dry_run in (True, False)
        ),
    ):
        with pytest.raises(errors.InvalidCheckpointError, match=told):
            call()
    assert names(step) == before


def test_a_folder_above_that_cannot_be_read(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason to refuse a save: whether it is a checkpoint cannot be known."""
    monkeypatch.setattr(contents, "is_certainly_orbax", Mock(side_effect=errors.StorageError("refused")))
    assert why_inside(location_of(step / "sub")) is None


def test_orbax_v1s_marker_is_enough(tmp_path: Path) -> None:
    """Whatever other markers it has as well."""
    ocp_v1.save(tmp_path / "c", {"a": np.ones(2)})
    if not (tmp_path / "c" / "orbax.checkpoint").exists():
        pytest.skip("this release writes none")
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "c" / name).unlink(missing_ok=True)
    assert (why_inside(location_of(tmp_path / "c" / "sub")) or "").startswith(f"{tmp_path}/c is a checkpoint")


def test_a_marker_alone_makes_no_checkpoint(flag: bool, tmp_path: Path) -> None:
    """A folder of a manager's, of which an interrupted removal left only Orbax's marker, holds nothing to lose."""
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    checkpoints.save_checkpoint(tmp_path / "sub", tree(7), 7)
    assert restore(tmp_path / "sub")["n"] == 7


def test_a_link_out_of_a_checkpoint_is_elsewhere(flag: bool, step: Path, tmp_path: Path) -> None:
    """The eviction of the step takes the link, and not where it leads."""
    (tmp_path / "elsewhere").mkdir()
    (step / "sub").symlink_to(tmp_path / "elsewhere")
    checkpoints.save_checkpoint(step / "sub", tree(7), 7)
    checkpoints.save_checkpoint(tmp_path, tree(2), 2)
    assert names(tmp_path) == ["checkpoint_2", "elsewhere"]
    assert checkpoints.restore_checkpoint(tmp_path / "elsewhere", None)["n"] == 7


TREE = {"w": np.arange(20_000.0), "small": np.ones(3), "n": 1}


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mapped", [False, True])
def test_a_linked_copy_stays_as_it_is(flag: bool, mapped: bool, tmp_path: Path) -> None:
    """Saves, overwrites and evictions in one directory change nothing in the other, nor in arrays mapped from it."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    for step in (1, 2):
        checkpoints.save_checkpoint(run, {**TREE, "n": step}, step, keep=2)
    shutil.copytree(run, copy, copy_function=os.link)
    before = _content(copy)
    assert any(os.stat(path).st_nlink == 2 for path in copy.rglob("*") if path.is_file())
    with config.override(mapped=mapped):
        held = [checkpoints.restore_checkpoint(folder, None, 2) for folder in (run, copy)]
        checkpoints.save_checkpoint(run, {**TREE, "w": np.zeros(20_000)}, 2, keep=2, overwrite=True)
        checkpoints.save_checkpoint(run, TREE, 3, keep=1)
        for tree in (*held, checkpoints.restore_checkpoint(copy, None, 2)):
            np.testing.assert_array_equal(tree["w"], TREE["w"])
    assert checkpoints.available_steps(run) == [3]
    assert checkpoints.available_steps(copy) == [1, 2]
    assert _content(copy) == before
    assert all(verify(copy, step=step).ok for step in (1, 2))


def test_threads(tmp_path: Path) -> None:
    """Real threads of both formats; every save succeeds, and what stays is one whole checkpoint."""

    def write(format: Any) -> None:
        for _ in range(6):
            save(tmp_path, tree(1), step=1, overwrite=True, format=format)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, ("msgpack", "orbax") * 2))
    assert names(tmp_path) == ["checkpoint_1"]
    assert restore(tmp_path)["n"] == 1
