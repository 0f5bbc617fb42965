"""What flax-ckpt ls and verify print, into a pipe, onto a terminal and as JSON, and what they refuse."""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner, Result
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints, iter_checkpoints, save
from flax_ckpt_compat.cli import main
from tests.support import terminal
from tests.support.saves import use_flag

ROOT = Path(__file__).parents[2]
NOVEMBER = 1_700_000_000  # 2023-11-14 22:13:20 UTC
TREE = {"w": np.arange(1000.0, dtype=np.float32)}


def ls(*arguments: object) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(main, ["ls", *map(str, arguments)])


def run_of_flax(directory: Path) -> None:
    """Steps 1 and 3 and ``best`` as Flax itself saves them, 2 as Orbax does, and two that were never finished."""
    with use_flag(False):
        for step in (1, 3, "best"):
            flax_checkpoints.save_checkpoint(directory, TREE, step, keep=9)
    ocp.PyTreeCheckpointer().save(directory / "checkpoint_2", TREE)
    (directory / "checkpoint_4").mkdir()
    (directory / "checkpoint_5").touch()
    for path in directory.iterdir():
        os.utime(path, (NOVEMBER, NOVEMBER))


def test_text_json_and_records(tmp_path: Path) -> None:
    """One line for each checkpoint, in the order of steps, named ones last; `iter_checkpoints` has the same facts.

    ``--json`` gives exact bytes, as ``find`` counts them, and times with their zone."""
    run_of_flax(tmp_path)
    (tmp_path / "checkpoint_6.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "checkpoint_2_gda").mkdir()
    (tmp_path / "other_1").write_bytes(b"\x80")
    orbax, msgpack = tmp_path / "checkpoint_2", tmp_path / "checkpoint_1"
    found = subprocess.run(
        ["find", str(orbax), "-type", "f", "-printf", "%s\n"], capture_output=True, text=True, check=True
    )
    sizes = {"checkpoint_1": msgpack.stat().st_size, "checkpoint_2": sum(map(int, found.stdout.split()))}
    records = [one for one in json.loads(ls(tmp_path, "--json").stdout) if one["kind"] == "checkpoint"]
    facts = ("step", "format", "complete", "why", "name")
    assert [tuple(record[fact] for fact in facts) for record in records] == [
        (1, "msgpack", True, None, "checkpoint_1"),
        (2, "orbax", True, None, "checkpoint_2"),
        (3, "msgpack", True, None, "checkpoint_3"),
        (4, "orbax", False, "the directory is empty", "checkpoint_4"),
        (5, "msgpack", False, "the file is empty", "checkpoint_5"),
        (None, "msgpack", True, None, "checkpoint_best"),
    ]
    assert {one["name"]: one["nbytes"] for one in records if one["name"] in sizes} == sizes
    assert datetime.datetime.fromisoformat(records[1]["saved"]).timestamp() == NOVEMBER
    for record, one in zip(iter_checkpoints(tmp_path), records, strict=True):
        assert (record.path, record.step, record.format, record.complete, record.why or None, record.nbytes) == tuple(
            one[fact] for fact in ("path", "step", "format", "complete", "why", "nbytes")
        )
    assert checkpoints.available_steps(tmp_path) == [1, 2, 3]
    result = ls(tmp_path)
    assert result.exit_code == 0 and "\x1b" not in result.stdout
    heading, *lines = result.stdout.splitlines()
    assert heading.split() == ["step", "format", "size", "saved", "age", "state", "name"]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOVEMBER))
    years = int((time.time() - NOVEMBER) / (365.25 * 86400))
    first = f"1 msgpack {sizes['checkpoint_1'] / 1000:.2f} kB {saved} {years} y complete checkpoint_1"
    assert lines[0].split() == first.split()
    assert [line.split()[0] for line in lines[:6]] == ["1", "2", "3", "4", "5", "-"]
    assert "incomplete: the directory is empty" in lines[3] and "incomplete: the file is empty" in lines[4]
    assert lines[5].split()[-2:] == ["complete", "checkpoint_best"]


def test_paths_are_in_the_callers_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative directories and prefixes with a folder give paths of the same form, which open."""
    monkeypatch.chdir(tmp_path)
    checkpoints.save_checkpoint("runs", TREE, 1, prefix="a/ck_")
    assert [record.path for record in iter_checkpoints("runs", "a/ck_")] == ["runs/a/ck_1"]


def test_leaves(tmp_path: Path) -> None:
    """``--leaves`` opens each complete checkpoint of either format; one that is damaged is told apart."""
    run_of_flax(tmp_path)
    (tmp_path / "checkpoint_6").write_bytes((tmp_path / "checkpoint_1").read_bytes()[:100])
    result = ls(tmp_path, "--leaves", "--json")
    records = {record["name"]: record for record in json.loads(result.stdout)}
    assert [records[f"checkpoint_{step}"]["leaves"] for step in (1, 2, 4, 6)] == [1, 1, None, None]
    assert not records["checkpoint_6"]["complete"] and "truncated" in records["checkpoint_6"]["why"]
    text = ls(tmp_path, "--leaves").stdout
    assert text.splitlines()[0].split()[:4] == ["step", "format", "leaves", "size"]
    assert "truncated" in text.partition("Cannot be opened:")[2]
    assert {record["leaves"] for record in json.loads(ls(tmp_path, "--json").stdout)} == {None}


def test_leftovers_and_strangers_are_apart(tmp_path: Path) -> None:
    """What real Orbax would have left, and a folder with a checkpoint's name, are in no row of the table."""
    run_of_flax(tmp_path)
    shutil.copytree(tmp_path / "checkpoint_2", tmp_path / "checkpoint_8.orbax-checkpoint-tmp")
    (tmp_path / "checkpoint_7").mkdir()
    (tmp_path / "checkpoint_7" / "notes.md").write_text("a folder of notes")
    table, _, rest = ls(tmp_path).stdout.partition("Named like checkpoints:\n")
    strangers, _, left = rest.partition("Left by interrupted saves")
    assert len(table.splitlines()) == 7
    assert "checkpoint_7: not a checkpoint" in strangers
    assert f"flax-ckpt clean {tmp_path}" in left and "checkpoint_8.orbax-checkpoint-tmp: unfinished save" in left
    kinds = [record["kind"] for record in json.loads(ls(tmp_path, "--json").stdout)]
    assert kinds == ["checkpoint"] * 6 + ["stranger", "leftover"]


def test_dashes_before_steps(tmp_path: Path) -> None:
    """A dash is a sign after a separator only: ``convert`` reads 3 of ``ckpt-3``, too."""
    for prefix, step in (("ckpt-", 3), ("ckpt-", 12), ("model_", -2), ("run.", -1.5)):
        checkpoints.save_checkpoint(tmp_path, TREE, step, prefix=prefix, keep=9)
    found = json.loads(ls(tmp_path, "--recursive", "--json").stdout)
    steps = {one["name"]: one["step"] for one in found}
    assert steps == {"ckpt-3": 3, "ckpt-12": 12, "model_-2": -2, "run.-1.5": -1.5}


def test_recursive(tmp_path: Path) -> None:
    """All directories below are listed, each with the checkpoints of all prefixes."""
    with use_flag(False):
        for run, step, prefix in [("a", 1, "checkpoint_"), ("b/deep", 7, "gan_"), ("b/deep", 2, "checkpoint_")]:
            flax_checkpoints.save_checkpoint(tmp_path / run, TREE, step, prefix=prefix)
    assert "there are checkpoints at" in ls(tmp_path).stdout
    found = json.loads(ls(tmp_path, "-r", "--json").stdout)
    paths = [f"{tmp_path}/a/checkpoint_1", f"{tmp_path}/b/deep/checkpoint_2", f"{tmp_path}/b/deep/gan_7"]
    assert [record["path"] for record in found] == paths
    lines = ls(tmp_path, "--recursive").stdout.splitlines()
    assert [line for line in lines if line.endswith(":")] == [f"{tmp_path}/a:", f"{tmp_path}/b/deep:"]
    (tmp_path / "none").mkdir()
    assert ls(tmp_path / "none", "-r").exit_code == 0
    assert ls(tmp_path / "a" / "checkpoint_1", "-r").exit_code == 2
    assert ls(tmp_path / "absent", "-r").exit_code == 2


def test_a_checkpoint_instead_of_its_directory(tmp_path: Path) -> None:
    """A checkpoint's own path is refused with the directory to list instead, in either format."""
    run_of_flax(tmp_path)
    for path, *options in ((tmp_path / "checkpoint_1",), (tmp_path / "checkpoint_2", "--json")):
        result = ls(path, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert str(tmp_path) in result.stderr.replace(str(path), "")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A name that is not UTF-8 is shown with its bytes escaped, and is exact in JSON."""
    (tmp_path / os.fsdecode(b"checkpoint_be\xffst")).write_bytes(b"\x80")
    assert r"checkpoint_be\xffst" in ls(tmp_path).stdout
    (record,) = json.loads(ls(tmp_path, "--json").stdout)
    assert os.fsencode(record["name"]) == b"checkpoint_be\xffst"


@pytest.mark.parametrize(("columns", "saved"), [(120, "2023-11-14 22:13:20"), (62, r"\d+ y ")])
def test_table_on_a_terminal(columns: int, saved: str, tmp_path: Path) -> None:
    """On a terminal the same facts come as a table that does not break names, times or sizes; on a narrow one, ages."""
    run_of_flax(tmp_path)
    environment = {**os.environ, "COLUMNS": str(columns), "TZ": "UTC", "NO_COLOR": "1"}
    code, shown = terminal.raw([sys.executable, "-m", "flax_ckpt_compat", "ls", str(tmp_path)], str(ROOT), environment)
    assert code == 0
    lines = terminal.plain(shown).splitlines()
    (row,) = (line for line in lines if "checkpoint_2" in line)
    assert "orbax" in row
    assert re.search(saved, row)
    assert max(map(len, lines)) <= columns


def test_prefixes(tmp_path: Path) -> None:
    """Another prefix is listed when it is named; without it the message names what there is.

    Below the table, so that nobody takes ``best_0.5`` for lost; folders of runs are none of them."""
    checkpoints.save_checkpoint(tmp_path, TREE, 3, "ema_")
    assert "ema_3" in ls(tmp_path, "--prefix", "ema_").stdout
    result = ls(tmp_path)
    assert result.exit_code == 0 and "there are ema_3" in result.stdout
    assert json.loads(ls(tmp_path, "--json").stdout) == []
    for name, prefix in ((3, "checkpoint_"), (0.5, "best_")):
        checkpoints.save_checkpoint(tmp_path, TREE, name, prefix)
    checkpoints.save_checkpoint(tmp_path / "seed_1", TREE, 1)
    last = "Also here, with other prefixes: best_0.5, ema_3; --recursive lists all."
    assert ls(tmp_path).stdout.splitlines()[2:] == [last]
    assert "Also here" not in ls(tmp_path, "--recursive").stdout
    assert [one["name"] for one in json.loads(ls(tmp_path, "--json").stdout)] == ["checkpoint_3"]


BLOCKS = {f"block_{n}": {"kernel": np.arange(1000.0, dtype=np.float32)} for n in range(30)}


def run(*arguments: object) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Step 1 as real Flax saves it, 2 as real Orbax does, in a folder for each array."""
    with use_flag(False):
        flax_checkpoints.save_checkpoint(tmp_path, BLOCKS, 1)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_2", BLOCKS)
    return tmp_path


def test_all_is_well(saved: Path) -> None:
    """One line for each checkpoint, then how many there are; exit code 0, and 1 if checksums are required."""
    (saved / "checkpoint_18.index").write_bytes(b"\0\0\2\x08\1" + bytes(40))  # TensorFlow's, which is passed over
    result = run(saved)
    assert result.exit_code == 0
    first, second, total, note = result.stdout.splitlines()
    assert first.split() == ["unverified", "30", "leaves", "120", "kB", "msgpack", str(saved / "checkpoint_1")]
    assert second.split()[-2:] == ["orbax", str(saved / "checkpoint_2")]
    assert total == "2 checkpoints: 0 ok, 2 unverified."
    assert note.startswith("Unverified: all leaves decode")
    assert run(saved, "--strict").exit_code == 1


def test_damage(saved: Path) -> None:
    """Damaged leaves are named below their checkpoint, those of numbered layers in one line; JSON has each, and why."""
    for chunk in saved.glob("checkpoint_2/block_*/0"):
        chunk.write_bytes(chunk.read_bytes()[:20])
    result = run(saved)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[1].startswith("DAMAGED")
    assert lines[2].startswith("  damaged: block_{0..29}/kernel   (30 leaves): ")
    assert "2 checkpoints: 0 ok, 1 unverified, 1 damaged." in lines
    result = run(saved, "--json")
    (report,) = json.loads(result.stdout)
    assert (result.exit_code, report["ok"], report["path"]) == (1, False, str(saved))
    one, two = report["checkpoints"]
    assert (one["state"], one["format"], one["nbytes"], len(one["leaves"])) == ("unverified", "msgpack", 120_000, 30)
    assert (two["state"], {leaf["state"] for leaf in two["leaves"]}) == ("damaged", {"damaged"})
    assert {leaf["path"]: leaf["nbytes"] for leaf in two["leaves"]}["block_7/kernel"] == 4000


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
