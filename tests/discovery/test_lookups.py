"""Look-ups: which names count as the latest, in which order, and what they log; the same in every function."""

import json
import logging
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from flax.training import checkpoints as flax_checkpoints

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._discovery import saved_steps
from flax_ckpt_compat.cli import main
from tests.support.saves import names, save_items, tree


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test as a fresh process does: with nothing logged yet."""
    monkeypatch.setattr(saved_steps, "_logged", OrderedDict())


def latest_everywhere(directory: Path, prefix: str = "checkpoint_") -> str | None:
    """Return the name of the latest checkpoint, on which all functions have to agree."""
    path = checkpoints.latest_checkpoint(directory, prefix)
    name = None if path is None else os.path.basename(path)
    restored = checkpoints.restore_checkpoint(directory, None, prefix=prefix)
    if name is None:
        assert restored is None
        with pytest.raises(errors.CheckpointNotFoundError):
            flax_ckpt_compat.open_checkpoint(directory, prefix=prefix)
        return None
    with flax_ckpt_compat.open_checkpoint(directory, prefix=prefix) as opened:
        assert os.path.basename(opened.path) == name
        assert opened.read()["n"] == restored["n"]
    assert os.path.basename(flax_ckpt_compat.plan_restore(directory, prefix=prefix).path) == name
    return name


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """Return what our logger said, at this level or above."""
    records = [record for record in caplog.records if record.name == "flax_ckpt_compat" and record.levelno >= level]
    return [record.getMessage() for record in records]


# Text steps, and their order


@pytest.mark.parametrize("text", ["epoch10", "v1.5", "best", "final2"])
def test_a_text_step_is_the_latest_where_there_is_no_other(
    text: str, flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it ends in a number; every function finds it, ``ls`` too, and nothing is warned of."""
    checkpoints.save_checkpoint(tmp_path, tree(3), text)
    assert latest_everywhere(tmp_path) == f"checkpoint_{text}"
    assert [record.step for record in flax_ckpt_compat.iter_checkpoints(tmp_path)] == [None]
    assert f"checkpoint_{text}" in CliRunner().invoke(main, ["ls", str(tmp_path)]).stdout
    assert checkpoints.available_steps(tmp_path) == []
    assert messages(caplog) == []
    checkpoints.save_checkpoint(tmp_path, tree(1), 1)
    assert latest_everywhere(tmp_path) == "checkpoint_1"


@pytest.mark.parametrize(
    "texts", [["9.msgpack", "10.msgpack"], ["epoch9", "epoch10"], ["v1.5", "v1.10e1"], ["9-last", "10-last"]]
)
def test_names_are_in_natural_order(texts: list[str], flag: bool, tmp_path: Path) -> None:
    """Numbers in names that do not end in a step count as numbers, in look-ups and listings."""
    for number, text in enumerate(texts):
        checkpoints.save_checkpoint(tmp_path, tree(number), text)
    assert latest_everywhere(tmp_path) == f"checkpoint_{texts[-1]}"
    listed = [os.path.basename(record.path) for record in flax_ckpt_compat.iter_checkpoints(tmp_path)]
    assert listed == [f"checkpoint_{text}" for text in texts]


# A prefix that is only the beginning


@pytest.mark.parametrize(
    ("saved", "asked"), [("ckpt_step_", "ckpt_step"), ("run_", "run"), ("checkpoint_", "checkpoint"), ("c_", "")]
)
def test_the_beginning_of_a_prefix(
    saved: str, asked: str, flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Look-ups and restores without a step find what Flax finds, with one warning; saving stays literal."""
    for step in (9, 10):
        checkpoints.save_checkpoint(tmp_path, tree(step), step, saved, keep=2)
    assert flax_checkpoints.latest_checkpoint(tmp_path, asked) == str(tmp_path / f"{saved}10")
    assert latest_everywhere(tmp_path, asked) == f"{saved}10"
    (warning,) = messages(caplog)
    assert f"exactly the prefix {asked!r}" in warning and f"{saved}10" in warning
    assert checkpoints.available_steps(tmp_path, asked) == []
    with pytest.raises(errors.CheckpointNotFoundError):
        checkpoints.restore_checkpoint(tmp_path, None, 10, asked)
    checkpoints.save_checkpoint(tmp_path, tree(1), 1, asked)
    assert names(tmp_path) == sorted([f"{saved}9", f"{saved}10", f"{asked}1"])
    assert latest_everywhere(tmp_path, asked) == f"{asked}1"


def test_the_beginning_of_a_prefix_takes_complete_checkpoints_only(flag: bool, tmp_path: Path) -> None:
    """Unfinished ones, folders and files of other programs are passed over; a name of exactly this prefix goes first.

    ``ckpt_best`` is the latest of ``ckpt_``, not ``ckpt_step_3``, which belongs to another prefix."""
    checkpoints.save_checkpoint(tmp_path, tree(3), 3, "ckpt_step_")
    (tmp_path / "ckpt_step_4").touch()
    (tmp_path / "ckpt_step_5").mkdir()
    (tmp_path / "ckpt_step_6").mkdir()
    (tmp_path / "ckpt_step_6" / "weights.bin").write_bytes(b"x")
    (tmp_path / "ckpt_step_7").write_text("loss 0.25\n")
    assert latest_everywhere(tmp_path, "ckpt_step") == "ckpt_step_3"
    assert latest_everywhere(tmp_path, "") == latest_everywhere(tmp_path, "ckpt_") == "ckpt_step_3"
    checkpoints.save_checkpoint(tmp_path, tree(0), "best", "ckpt_")
    assert latest_everywhere(tmp_path, "ckpt_") == "ckpt_best"


# Steps of a CheckpointManager


def manager(root: Path, *steps: int, **options: Any) -> None:
    """Save steps as real Orbax does."""
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options)) as made:
        for step in steps:
            made.save(step, args=ocp.args.PyTreeSave(tree(step)))
            made.wait_until_finished()


@pytest.mark.parametrize("options", [{}, {"step_prefix": "step"}, {"step_format_fixed_length": 5}], ids=str)
def test_a_managers_root(options: dict[str, Any], tmp_path: Path) -> None:
    """All functions find its steps, and a polling program sees that there are any."""
    manager(tmp_path, 9, 10, **options)
    found = checkpoints.latest_checkpoint(tmp_path)
    assert found is not None and found.endswith("10") and latest_everywhere(tmp_path) == os.path.basename(found)
    assert checkpoints.available_steps(tmp_path) == [9, 10]
    assert [record.step for record in flax_ckpt_compat.iter_checkpoints(tmp_path)] == [9, 10]
    for path, step in ((tmp_path, 9.0), (tmp_path, 10), (Path(found), None), (Path(found) / "default", None)):
        for target in (None, tree(0)):
            assert checkpoints.restore_checkpoint(path, target, step)["n"] == (step or 10)
    assert checkpoints.restore_checkpoint(tmp_path, None, 10, prefix="")["n"] == 10
    with pytest.raises(errors.CheckpointNotFoundError, match=r"^Matching checkpoint not found: .*11 .*9, .*10"):
        checkpoints.restore_checkpoint(tmp_path, None, 11)
    listed = json.loads(CliRunner().invoke(main, ["ls", str(tmp_path), "--json"]).stdout)
    assert [record["step"] for record in listed] == [9, 10]


def test_flat_steps_beside_a_managers(flag: bool, tmp_path: Path) -> None:
    """Steps of both order together; of two that are one step, the prefix's is the one that step= names."""
    checkpoints.save_checkpoint(tmp_path, tree(5), 5)
    manager(tmp_path, 7, 10)
    assert latest_everywhere(tmp_path) == "10"
    assert checkpoints.available_steps(tmp_path) == [5, 7, 10]
    checkpoints.save_checkpoint(tmp_path, tree(10.5), 10, keep=9)
    assert latest_everywhere(tmp_path) == "checkpoint_10"
    assert checkpoints.available_steps(tmp_path) == [5, 7, 10]
    assert checkpoints.restore_checkpoint(tmp_path, None, 10)["n"] == 10.5
    assert (
        checkpoints.restore_checkpoint(tmp_path, None, 1e1)["n"] == 10.5
    )  # by the number, which neither name spells so
    checkpoints.save_checkpoint(tmp_path, tree(12), 12, keep=1)
    assert sorted(set(names(tmp_path)) - {"checkpoint_12"}) == ["10", "7"]


def test_flat_directories_in_a_managers_root(tmp_path: Path) -> None:
    """A flat checkpoint whose name is a number is a step where a manager has steps, and else of the empty prefix.

    A manager's steps are directories, so a file is none of them, though it restores by its own path."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "12", tree(12))
    assert latest_everywhere(tmp_path) is None
    manager(tmp_path / "m", 7)
    os.rename(tmp_path / "m" / "7", tmp_path / "7")
    assert latest_everywhere(tmp_path) == "12"
    assert latest_everywhere(tmp_path, "") == "12"
    flax_ckpt_compat.save(tmp_path / "15", tree(15), format="msgpack")
    assert checkpoints.available_steps(tmp_path) == [7, 12]
    assert latest_everywhere(tmp_path) == "12"
    assert checkpoints.restore_checkpoint(tmp_path / "15", None)["n"] == 15


def test_a_step_of_old_releases_with_an_item_of_any_name(tmp_path: Path) -> None:
    """Before Orbax 0.5.11 nothing marked a step; by its own path it was silently not found."""
    save_items(tmp_path, weights=tree(3))
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "3" / name).unlink(missing_ok=True)
    assert checkpoints.restore_checkpoint(tmp_path / "3", None)["n"] == 3
    assert latest_everywhere(tmp_path) == "3"


JSON = {"notes": ocp.args.JsonSave({"x": 1})}
BOTH = {"weights": tree(3), **JSON}


def test_json_beside_one_tree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is left out of a restore without a target is told once."""
    save_items(tmp_path, **BOTH)
    for _ in range(2):
        assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == 3
    (warning,) = messages(caplog)
    assert "JSON of notes" in warning and str(tmp_path / "3" / "notes") in warning


@pytest.mark.parametrize(
    ("items", "target", "expected"),
    [
        (BOTH, {"weights": tree(), "notes": {"x": 0}}, {"weights": tree(3), "notes": {"x": 1}}),
        (BOTH, {"weights": tree()}, {"weights": tree(3)}),
        (BOTH, {"notes": None}, {"notes": {"x": 1}}),
        (BOTH, tree(), tree(3)),
        ({"params": {"params": tree(3)}}, {"params": tree()}, {"params": tree(3)}),
        (JSON, {"notes": None}, {"notes": {"x": 1}}),
        (JSON, tree(), r"only JSON \(notes\)"),
    ],
)
def test_targets_of_items(items: dict[str, Any], target: Any, expected: Any, tmp_path: Path) -> None:
    """A target may name items, JSON too, or be like a tree, also one with a branch of its item's name."""
    save_items(tmp_path, **items)
    if isinstance(expected, str):
        with pytest.raises(errors.CheckpointError, match=expected):
            checkpoints.restore_checkpoint(tmp_path, target)
    else:
        np.testing.assert_equal(checkpoints.restore_checkpoint(tmp_path, target), expected)


# Steps are numbers


@pytest.mark.parametrize(
    ("saved", "asked"),
    [
        *((7, 7.0), (7.0, 7), (7, np.float32(7)), ("007", 7), (100000, 1e5), (0, 0), (2.5, 2.5)),
        *((0, np.int32(0)), (1, jnp.int32(1)), (1, np.array(1))),
    ],
)
def test_steps_are_compared_as_numbers(saved: Any, asked: Any, flag: bool, tmp_path: Path) -> None:
    """However a name spells its step, the number finds it; the exact name goes first, and one overwrites the other."""
    checkpoints.save_checkpoint(tmp_path, tree(1), saved)
    assert checkpoints.restore_checkpoint(tmp_path, None, asked)["n"] == 1
    with flax_ckpt_compat.open_checkpoint(tmp_path, asked) as opened:
        assert opened.step == asked
    assert flax_ckpt_compat.plan_restore(tmp_path, step=asked).path == str(tmp_path / f"checkpoint_{saved}")
    checkpoints.save_checkpoint(tmp_path, tree(2), asked, overwrite=True)
    assert len(names(tmp_path)) == 1


# Formats that are not ours


def hugging_face(path: Path, name: str) -> None:
    """A model folder as transformers writes it: names as in its documentation."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / name).write_bytes(b"\x81\xa1a\x01")


@pytest.mark.parametrize("name", ["flax_model.msgpack", "epoch-3-of-10.msgpack"])
def test_a_hugging_face_folder_as_the_directory(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning points to the file that restores."""
    hugging_face(tmp_path / "model", name)
    target = {"a": 0}
    assert checkpoints.restore_checkpoint(tmp_path / "model", target) is target
    (warning,) = messages(caplog)
    file = re.search(r"such as (\S+\.msgpack)", warning)
    assert file and checkpoints.restore_checkpoint(file[1], target) == {"a": 1}


def test_a_hugging_face_model_in_parts(tmp_path: Path) -> None:
    """Errors about the folder and about the index say how to restore it."""
    hugging_face(model := tmp_path / "model", "flax_model-00001-of-00002.msgpack")
    (model / "flax_model.msgpack.index.json").write_text('{"weight_map": {}}')
    for path in (model, model / "flax_model.msgpack.index.json"):
        with pytest.raises(errors.CheckpointError, match="estore each of its parts by its own path"):
            flax_ckpt_compat.restore(path)


# What is logged


def test_polling_warns_once(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Per directory and prefix, until the reason changes."""
    checkpoints.save_checkpoint(tmp_path, tree(1), 1, "a_")
    for _ in range(3):
        checkpoints.restore_checkpoint(tmp_path, None)
    assert len(messages(caplog)) == 1
    (tmp_path / "checkpoint_3").touch()
    for _ in range(3):
        assert checkpoints.latest_checkpoint(tmp_path) is None
        assert checkpoints.available_steps(tmp_path) == []
    assert len(messages(caplog)) == 2
    checkpoints.restore_checkpoint(tmp_path, None, prefix="b_")
    assert len(messages(caplog)) == 3


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        *{"experimnet/a": "experiment/a", "experimnet/c/d": "experiment", "runs_lagre": "runs_large"}.items(),
        *dict.fromkeys(("runs/b", "runz/b", "exp_b", "2024-05-02", "new")).items(),  # other runs
    ],
)
def test_typos(asked: str, meant: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One letter of a longer word, anywhere in a path, is a warning, once; a new run beside others is none."""
    for name in ("runs/a", "runs_large", "experiment/a", "baselines/a", "exp_a", "2024-05-01"):
        (tmp_path / name).mkdir(parents=True)
    target = {"w": 1}
    for _ in range(2):
        assert checkpoints.restore_checkpoint(tmp_path / asked, target) is target
    expected = [] if meant is None else [f"did you mean {tmp_path / meant}?"]
    assert [text.rpartition(": ")[2] for text in messages(caplog)] == expected


def test_dots_of_a_prefix_behind_a_link(flag: bool, tmp_path: Path) -> None:
    """``link/..`` is the directory above the one that the link leads to, not the one that holds the link."""
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "other" / "inner")
    saved = checkpoints.save_checkpoint(tmp_path / "other" / "run", {"x": 1}, 3)
    found = checkpoints.latest_checkpoint(tmp_path / "link", "../run/checkpoint_")
    assert found is not None
    assert os.path.samefile(found, saved)
