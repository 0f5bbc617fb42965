"""Shadow mode: each save also writes the other format, which is read back, compared and removed."""

import json
import os
from pathlib import Path

import flax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner, Result
from flax.training import checkpoints as flax_checkpoints
from flax_ckpt_compat.orbax_backend import OrbaxBackend

from flax_ckpt_compat import checkpoints, config, convert, verify
from flax_ckpt_compat._core.errors import CheckpointNotFoundError, CorruptCheckpointError
from flax_ckpt_compat._save import shadow
from flax_ckpt_compat.cli import main
from flax_ckpt_compat.cli.shadow_report import read_records

TREE = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "list": [np.float16(1.5), {"empty": {}, "none": None}],
    "nan": np.array([np.nan, -0.0]),
    "scalar": 3,
    "text": "ü",
    "wide": np.zeros((0, 4), np.int8),
}


@pytest.fixture
def shadowed():
    """Turn shadow mode on."""
    with config.override(shadow=True):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return an absent checkpoint directory."""
    return str(tmp_path / "run")


def save(folder: str, step: int, orbax: bool, **options) -> str:
    """Save with the flag on or off."""
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    try:
        return checkpoints.save_checkpoint(folder, TREE, step, **options)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)


@pytest.mark.parametrize("orbax", [False, True])
def test_record(folder: str, orbax: bool, shadowed) -> None:
    """The copy is compared with the checkpoint and removed; the record has the sizes on disk."""
    path = save(folder, 1, orbax)
    assert sorted(os.listdir(folder)) == [".flax_ckpt_compat_shadow", "checkpoint_1"]  # as the guide names it
    assert sorted(os.listdir(os.path.join(folder, shadow.FOLDER))) == ["checkpoint_1.json"]
    (record,) = read_records(folder)
    files = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names] or [path]
    saved, other = ("orbax", "msgpack") if orbax else ("msgpack", "orbax")
    assert (record["format"], record["shadow"]) == (saved, other)
    assert record["bytes"][saved] == sum(map(os.path.getsize, files)) and record["bytes"][other] > 0
    assert record["differences"] == 0 and record["leaves"] == 8 and "error" not in record
    assert all(record[key][name] > 0 for key in ("write_seconds", "read_seconds") for name in (saved, other))


def test_async_and_retention(folder: str, shadowed) -> None:
    """Background saves are compared as well, and keep counts no copies."""
    manager = checkpoints.AsyncManager()
    for step in range(3):
        save(folder, step, True, keep=1, async_manager=manager)
    manager.wait_previous_save()
    assert ["error" in record for record in read_records(folder)] == [False] * 3
    assert sorted(os.listdir(folder)) == [shadow.FOLDER, "checkpoint_2"]


def test_flax_and_orbax_pass_over_the_folder(folder: str, shadowed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real Flax and a real CheckpointManager see no checkpoint more, not even while a copy lies there."""
    monkeypatch.setattr(shadow, "_compared", lambda request, copy: {"differences": 1, "different_leaves": ["kept"]})
    path = save(folder, 7, False)
    assert os.listdir(os.path.join(folder, shadow.FOLDER, "checkpoint_7"))
    for prefix in ("checkpoint_", "check"):
        assert flax_checkpoints.latest_checkpoint(folder, prefix) == path
    assert flax_checkpoints.available_steps(folder) == [7]
    with ocp.CheckpointManager(folder) as manager:
        assert manager.all_steps() == []


def test_difference(folder: str, shadowed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A byte that differs in the copy is reported with its leaf; the save succeeds, and the copy stays for a look."""
    whole = shadow._compared

    def damaged(request, copy):
        data = bytearray(Path(copy.path).read_bytes())
        at = data.index(TREE["w"].tobytes()) + 4
        data[at] ^= 1
        Path(copy.path).write_bytes(data)
        return whole(request, copy)

    monkeypatch.setattr(shadow, "_compared", damaged)
    path = save(folder, 1, True)
    (record,) = read_records(folder)
    assert record["differences"] == 1 and record["different_leaves"][0].startswith("w: float32 [2, 3]")
    assert "1 leaves differ" in caplog.text
    assert CliRunner().invoke(main, ["shadow-report", str(folder)]).exit_code == 1
    assert os.path.isfile(os.path.join(folder, shadow.FOLDER, "checkpoint_1"))
    assert [one.path for one in verify(folder).checkpoints] == [path]
    assert [one.source for one in convert(folder, f"{folder}-managed", "manager")] == [path]
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(path, None)["w"], TREE["w"])


def test_failure_does_not_disturb(folder: str, shadowed, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    """A copy that cannot be written is recorded and logged; the save returns."""

    def full(path: str, *arguments):
        os.mkdir(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OrbaxBackend, "write", staticmethod(full))
    path = save(folder, 1, False)
    assert "No space left" in read_records(folder)[0]["error"] and "No space left" in caplog.text
    assert os.listdir(os.path.join(folder, shadow.FOLDER)) == ["checkpoint_1.json"]  # nor what fills the disk
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(path, None)["w"], TREE["w"])


def test_unwritable_folder(folder: str, shadowed, caplog: pytest.LogCaptureFixture) -> None:
    """A file in the place of the folder: the save returns, with a warning."""
    os.mkdir(folder)
    Path(folder, shadow.FOLDER).write_text("")
    assert os.path.exists(save(folder, 1, False)) and "Cannot record the shadow" in caplog.text


def test_no_records(folder: str) -> None:
    """Without shadow mode there is no folder; the report says how to turn it on. Damaged records are named."""
    save(folder, 1, False)
    assert not os.path.exists(os.path.join(folder, shadow.FOLDER))
    with pytest.raises(CheckpointNotFoundError, match="FLAX_CKPT_COMPAT_SHADOW=true"):
        read_records(folder)
    os.mkdir(os.path.join(folder, shadow.FOLDER))
    for content in ("", "[]", "{}", '{"name": "a", "differences": "x"}'):
        Path(folder, shadow.FOLDER, "checkpoint_1.json").write_text(content)
        with pytest.raises(CorruptCheckpointError, match=r"checkpoint_1\.json"):
            read_records(folder)


@pytest.mark.parametrize(("orbax", "flip"), [(False, "true"), (True, "false")])
def test_command(folder: str, orbax: bool, flip: str, shadowed) -> None:
    """The command's exit code tells whether the formats agree; the report says how to get the other format."""

    def report(*words: str) -> Result:
        return CliRunner().invoke(main, ["shadow-report", *words])

    save(folder, 1, orbax)
    shown = report(folder)
    assert shown.stdout.endswith(f"To flip: FLAX_USE_ORBAX_CHECKPOINTING={flip}\n")
    assert shown.exit_code == 0 and shown.stdout.startswith("1 save compared, 0 differ, 0 could not"), shown
    (record,) = json.loads(report(folder, "--json").stdout)
    assert record["differences"] == 0
    record["error"] = "full"
    Path(folder, shadow.FOLDER, "checkpoint_1.json").write_text(json.dumps(record))
    assert report(folder).exit_code == 1
    assert report(os.path.dirname(folder)).exit_code == 2
