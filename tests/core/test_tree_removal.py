"""Directory trees are deleted whole, without what links lead to, and also when Ctrl-C comes in the middle."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from flax_ckpt_compat._core.local.tree_removal import delete_tree
from tests.support import interrupting


def _tree(path: Path) -> Path:
    (path / "a" / "b").mkdir(parents=True)
    (path / "c").mkdir()
    for name in ("x", "a/y", "a/b/z"):
        (path / name).write_bytes(b"data")
    return path


def test_ctrl_c_comes_out_wherever_it_comes(tmp_path: Path) -> None:
    """It came out as "Bad file descriptor"; what is left goes with the next call, and nothing else is closed."""
    is_place, at = True, 0
    while is_place:
        at += 1
        path = _tree(tmp_path / str(at))
        is_place = interrupting.ctrl_c(lambda path=path: delete_tree(str(path)), at)  # type: ignore[misc]
        delete_tree(str(path))
        assert not path.exists()
    assert at > 50


@pytest.mark.parametrize("to", ["folder", "file", "nothing"])
def test_a_link_is_deleted_and_not_what_it_leads_to(to: str, tmp_path: Path) -> None:
    """Nor does a folder count that one may not open, as long as only a link leads there."""
    aims = {"folder": _tree(tmp_path / "elsewhere"), "file": tmp_path / "elsewhere" / "x", "nothing": tmp_path / "none"}
    path = _tree(tmp_path / "tree")
    (path / "a" / "link").symlink_to(aims[to])
    delete_tree(str(path))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere"]
    assert sorted(found for found in os.listdir(tmp_path / "elsewhere")) == ["a", "c", "x"]


def test_what_goes_meanwhile_is_no_failure(tmp_path: Path) -> None:
    """Another process deletes it at each moment."""
    at, calls = 0, interrupting.count_calls(lambda: delete_tree(str(_tree(tmp_path / "counted"))))
    while at < calls:
        at += 1
        path = _tree(tmp_path / str(at))
        interrupting.interrupted(
            lambda path=path: delete_tree(str(path)),  # type: ignore[misc]
            at,
            lambda path=path: shutil.rmtree(path, ignore_errors=True),  # type: ignore[misc]
        )
        assert not path.exists()


def test_an_error_names_what_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole path, where Python names the last part, or a descriptor."""
    path, real = _tree(tmp_path / "tree"), os.unlink

    def unlink(name: str, **options: int) -> None:
        if name == "z":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), name)
        real(name, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(PermissionError) as caught:
        delete_tree(str(path))
    assert caught.value.filename == str(path / "a" / "b" / "z")
