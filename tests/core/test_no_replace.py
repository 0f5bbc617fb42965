"""Two writers save one step without ``overwrite`` at the same time: exactly one is refused, whatever the format."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.local.atomic import temporary_path
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._save import pipeline as save_pipeline
from flax_ckpt_compat._save.request import of_step
from tests.support.saves import use_flag

PAIRS = list(itertools.product(Format, repeat=2))


@pytest.fixture
def both_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has written waits until the other has, too, so that both have passed the check before."""
    meeting = threading.Barrier(2, timeout=30)
    for format in Format:
        backend = backend_for(format)
        monkeypatch.setattr(backend, "write", _then(backend.write, meeting.wait))


def _then(write: Callable[..., None], wait: Callable[[], Any]) -> Callable[..., None]:
    def write_and_wait(*args: Any) -> None:
        write(*args)
        wait()

    return write_and_wait


@pytest.mark.usefixtures("both_written")
@pytest.mark.parametrize("pair", PAIRS)
def test_one_of_two_saves_of_a_step_is_refused(tmp_path: Path, pair: tuple[Format, Format]) -> None:
    """As a step that exists is refused; what is restored is the tree of the one that said that it saved."""

    def save(number: int) -> str:
        tree = {"n": number, "v": np.full(3, number)}
        # As save_checkpoint, whose flag two threads cannot set to different values.
        request = of_step(
            str(tmp_path), 1, "checkpoint_", keep=1, keep_every_n_steps=None, overwrite=False, format=pair[number]
        )
        return save_pipeline.save(request, tree)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(save, number) for number in (0, 1)]
    failed = [future.exception() for future in futures]
    assert sum(error is None for error in failed) == 1, failed
    refused = next(error for error in failed if error is not None)
    assert isinstance(refused, errors.InvalidCheckpointError)
    assert "already exists; pass overwrite=True" in str(refused)
    assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == failed.index(None)
    assert os.listdir(tmp_path) == ["checkpoint_1"]


@pytest.mark.parametrize("format", Format)
def test_a_folder_of_something_else_that_appears_during_a_save_stays(
    tmp_path: Path, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an overwrite replaces only checkpoints, and looks again before it does."""
    model = tmp_path / "checkpoint_1"

    def download() -> None:
        model.mkdir()
        for name in ("config.json", "model.safetensors"):
            (model / name).write_text("{}")

    backend = backend_for(format)
    monkeypatch.setattr(backend, "write", _then(backend.write, download))
    flag = format is Format.ORBAX
    with use_flag(flag), pytest.raises(errors.InvalidCheckpointError, match="Hugging Face"):
        checkpoints.save_checkpoint(tmp_path, {"n": 1}, 1, overwrite=True)
    assert sorted(os.listdir(model)) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["checkpoint_1"]


@pytest.mark.parametrize("directory", [False, True])
@pytest.mark.parametrize("there", ["nothing", "empty directory", "empty file", "file", "directory", "link"])
def test_only_what_is_void_is_replaced(tmp_path: Path, directory: bool, there: str) -> None:
    """A file of no size and an empty directory give way, as before; all else, and links, is refused and stays."""
    final = tmp_path / "c_1"
    temporary = Path(temporary_path(str(final)))
    (temporary if directory else tmp_path).mkdir(exist_ok=True)
    (temporary / "new" if directory else temporary).write_text("new")
    if "directory" in there:
        final.mkdir()
    if there == "directory":
        (final / "old").touch()
    if "file" in there:
        final.write_text("" if "empty" in there else "old")
    if there == "link":
        (tmp_path / "elsewhere").mkdir() if directory else (tmp_path / "elsewhere").touch()
        final.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(errors.StorageError, match="another process has saved"):
            atomic.publish(str(temporary), str(final), new=True)
        assert final.readlink() == tmp_path / "elsewhere"
    elif there in ("file", "directory"):
        with pytest.raises(errors.StorageError, match="another process has saved"):
            atomic.publish(str(temporary), str(final), new=True)
        assert temporary.exists()
        assert (final / "old").exists() if there == "directory" else final.read_text() == "old"
    else:
        atomic.publish(str(temporary), str(final), new=True)
        assert os.listdir(tmp_path) == ["c_1"]
        assert (final / "new" if directory else final).read_text() == "new"


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file gets its name by a rename there, and one that is taken is refused."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    final = tmp_path / "checkpoint_1"
    for content in (b"first", b"second"):
        temporary = Path(temporary_path(str(final)))
        temporary.write_bytes(content)
        if content == b"first":
            atomic.publish(str(temporary), str(final), new=True)
            assert not temporary.exists()
        else:
            with pytest.raises(errors.StorageError, match="another process has saved"):
                atomic.publish(str(temporary), str(final), new=True)
    assert final.read_bytes() == b"first"
