"""What the system does not tell of is not absent."""

from __future__ import annotations

import errno
import os

import pytest

from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat.errors import PermissionDeniedError, StorageError

_QUESTIONS = [presence.isdir, presence.isfile, presence.exists, presence.lexists, presence.islink]


@pytest.mark.parametrize("ask", _QUESTIONS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EACCES])
def test_an_error_is_no_answer(ask, number, tmp_path, monkeypatch):
    """`os.path` answers False."""

    def fail(path):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(os, "lstat", fail)
    expected = PermissionDeniedError if number == errno.EACCES else StorageError
    with pytest.raises(expected, match=str(tmp_path)) as raised:
        ask(str(tmp_path))
    assert raised.value.errno == number


@pytest.mark.parametrize("ask", _QUESTIONS)
def test_answers_are_those_of_os_path(ask, tmp_path):
    """Of files, directories, links, loops, names below a file, and names that no file system takes."""
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "to directory").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("", "file", "link", "to directory", "dangling", "loop", "file/below", "absent", "n" * 300):
        path = str(tmp_path / name)
        assert ask(path) == getattr(os.path, ask.__name__)(path), name
    assert not ask(str(tmp_path / "a\0b"))
