"""Names with escape sequences and line breaks never reach a terminal or a log as they are."""

from __future__ import annotations

import io
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
from click.testing import CliRunner

from flax_ckpt_compat import checkpoints, errors, open_checkpoint, plan_restore, restore
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat.cli import main

EVIL = "w\x1b[2J\x9b31m\u202e\nERROR all is lost\r"
TREE = {EVIL: np.arange(3), "plain": 1}


def assert_printable(text: str) -> None:
    """Nothing but printable characters and the message's own line breaks."""
    assert text.replace("\n", "").isprintable(), ascii(text)
    assert "\nERROR" not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/é/日本 ok", "a/é/日本 ok"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\r\t\x00\x7f\x9b", r"\r\t\x00\x7f\x9b"),
        ("be\udcffst", r"be\xffst"),
        ("日本 é\x1b", r"日本 é\x1b"),
        ("\ud800", r"\ud800"),
        ("\u202eabc", r"\u202eabc"),
        ("two\nlines", "two\nlines"),
    ],
)
def test_what_is_escaped(text: str, expected: str) -> None:
    """Control and format characters, surrogates and undecoded bytes; once is enough."""
    assert printable(text) == printable(printable(text)) == expected
    assert printable("two\nlines", one_line=True) == r"two\nlines"


def test_errors(flag: bool, tmp_path: Path) -> None:
    """Messages about directories, leaves and targets; `path` and `leaf` stay exact."""
    folder = tmp_path / EVIL
    checkpoints.save_checkpoint(folder, TREE, 1)
    caught: list[Any] = []
    for call in (
        lambda: checkpoints.save_checkpoint(folder, TREE, 1),
        lambda: checkpoints.save_checkpoint(folder, {EVIL: object()}, 2),
        lambda: checkpoints.restore_checkpoint(folder, None, step=9),
        lambda: checkpoints.restore_checkpoint(folder, {EVIL + "2": 1, "plain": 2}),
        lambda: restore(folder, {EVIL: np.zeros(5)}),
        lambda: checkpoints.restore_checkpoint(folder, None, prefix=EVIL, step=1),
    ):
        with pytest.raises(errors.CheckpointError) as error:
            call()
        caught.append(error.value)
        assert_printable(str(error.value))
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert caught[0].path == f"{folder}/checkpoint_1" and caught[1].leaf == EVIL


def test_logs(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every record, whatever handlers it goes to; a record that is printable keeps its parts."""
    caplog.set_level(logging.INFO)
    folder = tmp_path / EVIL.replace("\n", "")
    checkpoints.restore_checkpoint(folder, None)
    for step in (1, 2):
        checkpoints.save_checkpoint(folder, {"a\x1bb": 1, "c": 2}, step)
    checkpoints.restore_checkpoint(folder, {"c": 0})
    assert len(caplog.records) >= 3
    for record in caplog.records:
        assert_printable(record.getMessage())
    caplog.clear()
    logging.getLogger("flax_ckpt_compat").info("%s of %d", "one", 2)
    assert caplog.records[0].args == ("one", 2)


def test_plans_and_open_checkpoints(flag: bool, tmp_path: Path) -> None:
    """As plain text and on a terminal."""
    folder = tmp_path / EVIL.replace("\n", "")
    checkpoints.save_checkpoint(folder, TREE, 1)
    plan = plan_restore(folder, {EVIL: np.zeros(3), EVIL + "2": 1})
    assert_printable(str(plan))
    out = io.StringIO()
    rich.console.Console(file=out, width=200, force_terminal=False).print(plan)
    assert_printable(out.getvalue())
    with open_checkpoint(folder) as opened:
        assert_printable(repr(opened))
        assert EVIL in opened.leaves()


def test_ls(tmp_path: Path) -> None:
    """One line for each name; JSON keeps the exact ones."""
    checkpoints.save_checkpoint(tmp_path, {"a": 1}, EVIL)
    shown = CliRunner().invoke(main, ["ls", str(tmp_path)])
    assert_printable(shown.stdout)
    assert len(shown.stdout.splitlines()) == 2
    refused = CliRunner().invoke(main, ["ls", str(tmp_path / EVIL)])
    assert refused.exit_code == 2
    assert_printable(refused.stderr)
    near = CliRunner().invoke(main, ["ls", str(tmp_path / "absent")])
    assert "checkpoint_w" in near.stderr
    assert_printable(near.stderr)
