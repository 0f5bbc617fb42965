"""``flax-ckpt verify``: what it prints, its JSON, and its exit codes."""

import json
from pathlib import Path

import flax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner, Result
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import save
from flax_ckpt_compat.cli import main

TREE = {f"block_{n}": {"kernel": np.arange(1000.0, dtype=np.float32)} for n in range(30)}


def run(*arguments: object) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Step 1 as real Flax saves it, 2 as real Orbax does, in a folder for each array."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    with pytest.warns(DeprecationWarning):
        flax_checkpoints.save_checkpoint(tmp_path, TREE, 1)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_2", TREE)
    return tmp_path


def test_all_is_well(saved: Path) -> None:
    """One line for each checkpoint, then how many there are; exit code 0, and 1 if checksums are required."""
    result = run(saved)
    assert result.exit_code == 0
    first, second, total, note = result.stdout.splitlines()
    assert first.split() == ["unverified", "30", "leaves", "120", "kB", "msgpack", str(saved / "checkpoint_1")]
    assert second.split()[-2:] == ["orbax", str(saved / "checkpoint_2")]
    assert total == "2 checkpoints: 0 ok, 2 unverified."
    assert note.startswith("Unverified: all leaves decode")
    assert run(saved, "--strict").exit_code == 1


def test_damage(saved: Path) -> None:
    """Damaged leaves are named below their checkpoint, leaves of numbered layers in one line; exit code 1."""
    for chunk in saved.glob("checkpoint_2/block_*/0"):
        chunk.write_bytes(chunk.read_bytes()[:20])
    result = run(saved)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[1].startswith("DAMAGED")
    assert lines[2].startswith("  damaged: block_{0..29}/kernel   (30 leaves): ")
    assert "2 checkpoints: 0 ok, 1 unverified, 1 damaged." in lines


def test_json(saved: Path) -> None:
    """JSON has each leaf with its state and reason."""
    (saved / "checkpoint_2" / "block_7.kernel" / "0").unlink()
    result = run(saved, "--json")
    assert result.exit_code == 1
    (report,) = json.loads(result.stdout)
    assert (report["ok"], report["path"]) == (False, str(saved))
    one, two = report["checkpoints"]
    assert (one["state"], one["format"], one["nbytes"], len(one["leaves"])) == ("unverified", "msgpack", 120_000, 30)
    assert two["state"] == "damaged"
    (leaf,) = [leaf for leaf in two["leaves"] if leaf["state"] == "damaged"]
    assert (leaf["path"], leaf["nbytes"]) == ("block_7/kernel", 4000)


@pytest.mark.parametrize("words", [("verify", "run"), ("convert", "run", "out", "--to", "orbax")])
def test_files_that_are_passed_over_are_named(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory's search finds no file that is read by its own path only; parts of checkpoints are no such files."""
    monkeypatch.chdir(tmp_path)
    save("run", {"w": np.ones(2)}, step=1, format="orbax")
    for name in ("model.safetensors", "weights.npz", "checkpoint_1/part.npz", "notes.txt"):
        (tmp_path / "run" / name).write_bytes(b"x")
    told = CliRunner().invoke(main, list(words)).stderr
    (line,) = [line for line in told.splitlines() if line.startswith("Passed over")]
    assert all(name in line for name in ("model.safetensors", "weights.npz"))
    assert "part.npz" not in line and "notes.txt" not in line
