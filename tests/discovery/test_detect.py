"""What restore recognises, and what it says of everything else: named, never executed, never half restored."""

import json
import logging
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._discovery import foreign
from flax_ckpt_compat._discovery.contents import State, contents_of
from flax_ckpt_compat.errors import UnrecognizedFormatError
from tests.support.peers import ocp_v1
from tests.support.profiles import examples
from tests.support.samples import fingerprint
from tests.support.saves import save_items

TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"n": np.int8([1])}}
ZEROS = {"a": np.zeros((2, 3), np.float32), "b": {"n": np.int8([0])}}


def same(restored: Any, expected: Any = TREE) -> None:
    """Asserts equality to the last bit."""
    assert fingerprint(restored) == fingerprint(expected)


@pytest.mark.parametrize("name", ["model.ckpt", "flax_model.msgpack", "7", "weights", "ViT.v1.0"])
def test_a_msgpack_file_of_any_name(name: str, tmp_path: Path) -> None:
    """A path to a file is restored whatever it is called, with and without a target."""
    (tmp_path / name).write_bytes(serialization.to_bytes(TREE))
    same(checkpoints.restore_checkpoint(tmp_path / name, None))
    same(checkpoints.restore_checkpoint(str(tmp_path / name), ZEROS))


@pytest.mark.parametrize(
    "value", [91, 123, 0, {}, [], "", None, True, 2.5, "{", -1], ids=lambda value: f"{type(value).__name__} {value!r}"
)
def test_tiny_msgpack_files(value: Any, tmp_path: Path) -> None:
    """Files of one or a few bytes that are valid msgpack restore, although they look like JSON or a pickle."""
    (tmp_path / "f").write_bytes(msgpack.packb(value))
    assert checkpoints.restore_checkpoint(tmp_path / "f", None) == value


def test_msgpack_arrays(tmp_path: Path) -> None:
    """Arrays of a msgpack file that no Flax function writes are lists, as real Flax restores them."""
    content = serialization.msgpack_serialize({"a": [1, [np.ones(2)], {}], "b": []})
    (tmp_path / "f").write_bytes(content)
    same(checkpoints.restore_checkpoint(tmp_path / "f", None), serialization.msgpack_restore(content))


def test_a_map_with_a_list_as_a_key_is_foreign(tmp_path: Path) -> None:
    """Python cannot make a dict of such a map, which no release of Flax writes."""
    (tmp_path / "checkpoint_3").write_bytes(b"\x81\x81\x90\x01\x02" + 600 * b"x")
    assert contents_of(location_of(tmp_path / "checkpoint_3")).state is State.FOREIGN


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
    for name, tree in (("opt_5", ZEROS), ("ema_7", ZEROS)):
        ocp_v1.save(tmp_path / name, tree)
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


@pytest.mark.parametrize("there", ["nothing", "empty", "foreign"])
def test_nothing_to_restore(there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The very target comes back, logged; as a warning where there is something. must_exist makes it an error."""
    path = tmp_path / "dir"
    if there != "nothing":
        path.mkdir()
    if there == "foreign":
        (path / "notes.txt").write_text("hello")
        (path / "sub").mkdir()
    target = {"x": 1}
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        assert checkpoints.restore_checkpoint(path, target) is target
    (record,) = [record for record in caplog.records if record.name == "flax_ckpt_compat"]
    assert str(path) in record.getMessage()
    assert record.levelno == (logging.WARNING if there == "foreign" else logging.INFO)
    assert checkpoints.restore_checkpoint(path, None) is None
    with config.override(must_exist=True), pytest.raises(FileNotFoundError, match="nothing to restore"):
        checkpoints.restore_checkpoint(path, target)


def test_an_array_that_is_named_like_a_database(tmp_path: Path) -> None:
    """Orbax 0.4.4 without OCDBT leaves one process' database, and an empty folder for each array, whatever its name."""
    for name in ("_METADATA", "checkpoint"):
        (tmp_path / name).touch()
    for name in ("ocdbt.process_0", "my.ocdbt.process_1"):
        (tmp_path / name).mkdir()
    assert contents_of(location_of(tmp_path)).is_complete
    (tmp_path / "ocdbt.process_1").mkdir()
    assert "were never merged" in contents_of(location_of(tmp_path)).why


@pytest.mark.parametrize("fills", [True, False], ids=["stores fills", "may not store fills"])
def test_a_missing_chunk_is_an_error(fills: bool, tmp_path: Path) -> None:
    """A chunk of an array that is gone is an error that names the leaf; real Orbax and Flax read zeros there."""
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_1", TREE)
    if not fills:
        metadata = json.loads((tmp_path / "checkpoint_1" / "_METADATA").read_text())
        del metadata["store_array_data_equal_to_fill_value"]
        (tmp_path / "checkpoint_1" / "_METADATA").write_text(json.dumps(metadata))
    same(checkpoints.restore_checkpoint(tmp_path, ZEROS))
    (tmp_path / "checkpoint_1" / "a" / "0.0").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint_1.*'?a'?"):
        checkpoints.restore_checkpoint(tmp_path, ZEROS, orbax_transforms={})


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


def test_a_fresh_working_directory_stays_one(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder called d, or a data set in zarr, beside a program's other files is not a damaged checkpoint."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    (tmp_path / "digits.zarr").mkdir()
    (tmp_path / "digits.zarr" / ".zarray").write_text("{}")
    (tmp_path / "config.yaml").write_text("lr: 1")
    target = {"a": 1}
    assert checkpoints.restore_checkpoint(tmp_path, target) is target
    assert "holds no checkpoint" in caplog.text
    checkpoints.save_checkpoint(tmp_path, {"a": 2}, 1)
    assert checkpoints.restore_checkpoint(tmp_path, target) == {"a": 2}


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
