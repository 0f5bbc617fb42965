"""Checkpoints within others, linked copies, and two formats at one path: none is lost with another."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints, config, convert, errors, restore, save, verify
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._discovery import contents
from flax_ckpt_compat._discovery.contents import why_inside
from tests.support.peers import ocp_v1
from tests.support.saves import names, saved_by_peer, tree


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step that real Orbax wrote."""
    return Path(saved_by_peer(tmp_path, tree(1), real_orbax=True))


@pytest.mark.parametrize("below", ["sub", "sub/deep"])
def test_a_save_below_a_checkpoint_is_refused(flag: bool, step: Path, tmp_path: Path, below: str) -> None:
    """The step's eviction would take it along; the message names a directory outside."""
    (tmp_path / "link").symlink_to(step)
    before, told = names(step), f"{step} is a checkpoint, and would be removed .* such as {tmp_path}$"
    for call in (
        lambda: checkpoints.save_checkpoint(step / below, tree(2), 2),
        lambda: checkpoints.save_checkpoint(step / below, tree(2), 2, overwrite=True),
        lambda: checkpoints.save_checkpoint(tmp_path, tree(2), 2, prefix=f"{step.name}/{below}/x_"),
        lambda: checkpoints.save_checkpoint(tmp_path / "link" / below, tree(2), 2),
        lambda: save(step / below / "best", tree(2)),
    ):
        with pytest.raises(errors.InvalidCheckpointError, match=told):
            call()
    assert names(step) == before


@pytest.mark.parametrize("to", ["msgpack", "orbax", "manager", "safetensors"])
def test_a_conversion_into_a_checkpoint_is_refused(step: Path, tmp_path: Path, to: str) -> None:
    """As a save there, also of a directory of steps; a dry run says so, too."""
    src = tmp_path / "src"
    checkpoints.save_checkpoint(src, tree(7), 7)
    (tmp_path / "link").symlink_to(step)
    before, told = names(step), f"{step} is a checkpoint, and would be removed .* such as {tmp_path}$"
    for source in (src, src / "checkpoint_7"):
        for dst in (step / "sub", step / "sub" / "deep", tmp_path / "link" / "sub"):
            for dry_run in (True, False):
                with pytest.raises(errors.InvalidCheckpointError, match=told):
                    convert(source, dst, to, step=7 if source != src else None, dry_run=dry_run)
    assert names(step) == before


def test_a_folder_above_that_cannot_be_read(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason to refuse a save: whether it is a checkpoint cannot be known."""

    def refuse(_: str) -> bool:
        raise errors.StorageError("refused")

    monkeypatch.setattr(contents, "is_certainly_orbax", refuse)
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


def test_a_directory_of_checkpoints_named_like_a_step(flag: bool, tmp_path: Path) -> None:
    """It is named by look-ups, as by Flax, and neither evicted nor replaced, whatever dead writers left in it."""
    inner = tmp_path / "checkpoint_5"
    checkpoints.save_checkpoint(inner, tree(7), 7)
    (inner / ".checkpoint_8.0123456789ab-1-2-3new.orbax-checkpoint-tmp_gda").write_bytes(b"x")
    assert checkpoints.latest_checkpoint(tmp_path) == flax_checkpoints.latest_checkpoint(tmp_path) == str(inner)
    with pytest.raises(errors.UnrecognizedFormatError, match="checkpoint_7"):
        checkpoints.restore_checkpoint(tmp_path, tree())
    for overwrite in (False, True):
        with pytest.raises(errors.InvalidCheckpointError, match=r"but looks like .* and only checkpoints are replaced"):
            checkpoints.save_checkpoint(tmp_path, tree(5), 5, overwrite=overwrite)
    checkpoints.save_checkpoint(tmp_path, tree(6), 6)
    assert names(tmp_path) == ["checkpoint_5", "checkpoint_6"]
    assert restore(inner)["n"] == 7


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


FORMATS: tuple[Literal["msgpack", "orbax"], ...] = ("msgpack", "orbax")
Call = tuple[Any, str]


def test_threads(tmp_path: Path) -> None:
    """Real threads of both formats; every save succeeds, and what stays is one whole checkpoint."""
    outcomes: Counter[str] = Counter()

    def write(format: Literal["msgpack", "orbax"]) -> None:
        for _ in range(6):
            try:
                save(tmp_path, tree(1), step=1, overwrite=True, format=format)
                outcomes["ok"] += 1
            except BaseException as error:
                outcomes[repr(error)] += 1

    threads = [threading.Thread(target=write, args=(format,)) for format in FORMATS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"ok": 24}
    assert names(tmp_path) == ["checkpoint_1"]
    assert restore(tmp_path)["n"] == 1
