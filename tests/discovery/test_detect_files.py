"""Files that are not checkpoints, or only a part of one: named, never executed, never half restored."""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import serialization
from flax_ckpt_compat.orbax_backend import array_items
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat.errors import IncompleteCheckpointError, UnrecognizedFormatError
from tests.support.profiles import examples

TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"n": np.int8([1])}}


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
    "safetensors, as gzip": (lambda p: _safetensors(p, 0x8B1F), "safetensors"),
    "safetensors, empty": (lambda p: p.write_bytes(struct.pack("<Q", 2) + b"{}"), "safetensors"),
    "text, cut in a character": (lambda p: p.write_text("x" + "\u00e9" * 400, encoding="utf-8"), "a text file"),
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
        with pytest.raises(CheckpointError, match=str(tmp_path / "f")):
            checkpoints.restore_checkpoint(tmp_path / "f", None)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=40))
def test_random_bytes(content: bytes, tmp_path: Path) -> None:
    """Arbitrary bytes restore or raise a CheckpointError, and nothing else."""
    (tmp_path / "f").write_bytes(content)
    try:
        checkpoints.restore_checkpoint(tmp_path / "f", None)
    except CheckpointError as error:
        assert str(tmp_path / "f") in str(error)


def test_zero_bytes_asked_for_by_name(tmp_path: Path) -> None:
    """A file without content is an error that says so, by path, by step, and alone; it is never the latest."""
    (tmp_path / "checkpoint_2").touch()
    for arguments in ((tmp_path / "checkpoint_2", None), (tmp_path, None, 2), (tmp_path, None)):
        with pytest.raises(IncompleteCheckpointError, match="empty"):
            checkpoints.restore_checkpoint(*arguments)
    assert checkpoints.latest_checkpoint(tmp_path) is None


def test_an_array_item_without_step_metadata(tmp_path: Path) -> None:
    """Without a handler's name, the key about fill values decides, and OCDBT is of trees."""
    key = {"store_array_data_equal_to_fill_value": True}
    assert array_items.is_single_array(location_of(tmp_path), key, False)
    assert not array_items.is_single_array(location_of(tmp_path), key, True)
    assert not array_items.is_single_array(location_of(tmp_path), {}, False)
