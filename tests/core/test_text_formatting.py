"""Texts of messages: what is escaped, lists of names whose numbers are folded, and names that are suggested."""

import io
import itertools
import logging
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, errors, open_checkpoint, plan_restore, restore
from flax_ckpt_compat._core.text_formatting import Row, fold, one_line, printable, shown
from flax_ckpt_compat._trees.leaf_sources import nearest
from flax_ckpt_compat.cli import main

EVIL = "w\x1b[2J\x9b31m\u202e\nERROR all is lost\r"
TREE = {EVIL: np.arange(3), "plain": 1}


def test_what_is_escaped() -> None:
    """Control and format characters, surrogates and undecoded bytes; once is enough."""
    texts = ["a/é/日本 ok", "\x1b[31m", "\r\t\x00\x7f\x9b", "be\udcffst", "\ud800", "\u202eabc", "two\nlines"]
    shown = ["a/é/日本 ok", r"\x1b[31m", r"\r\t\x00\x7f\x9b", r"be\xffst", r"\ud800", r"\u202eabc", "two\nlines"]
    assert [printable(text) for text in texts] == [printable(printable(text)) for text in texts] == shown
    assert printable("two\nlines", one_line=True) == r"two\nlines"


def test_messages(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors, logs, plans, open checkpoints and `ls`, on a terminal too; `path`, `leaf` and JSON stay exact."""
    caplog.set_level(logging.INFO)
    folder, empty = tmp_path / EVIL, tmp_path / f"{EVIL}2"
    assert checkpoints.restore_checkpoint(empty, None) is None
    for step in (1, EVIL):
        checkpoints.save_checkpoint(folder, {"a\x1bb": 1, **TREE}, step)
    checkpoints.restore_checkpoint(folder, {"plain": 0}, step=1)
    caught: list[Any] = []
    for call in (
        lambda: checkpoints.save_checkpoint(folder, TREE, 1),
        lambda: checkpoints.save_checkpoint(folder, {EVIL: object()}, 2),
        lambda: checkpoints.restore_checkpoint(folder, None, step=9),
        lambda: checkpoints.restore_checkpoint(folder, {EVIL + "2": 1, "plain": 2}),
        lambda: restore(folder, {EVIL: np.zeros(5)}, step=1),
        lambda: checkpoints.restore_checkpoint(folder, None, prefix=EVIL, step=1),
    ):
        with pytest.raises(errors.CheckpointError) as error:
            call()
        caught.append(error.value)
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert caught[0].path == f"{folder}/checkpoint_1" and caught[1].leaf == EVIL
    plan, out = plan_restore(folder, {EVIL: np.zeros(3), EVIL + "2": 1}, step=1), io.StringIO()
    rich.console.Console(file=out, width=200, force_terminal=False).print(plan)
    with open_checkpoint(folder, step=1) as opened:
        assert EVIL in opened.leaves()
        texts = [*map(str, (*caught, plan)), out.getvalue(), repr(opened)]
    listed, refused, near = (CliRunner().invoke(main, ["ls", f"{folder}{more}"]) for more in ("", "/none", "/w"))
    assert len(listed.stdout.splitlines()) == 3 and refused.exit_code == 2 and "checkpoint_w" in near.stderr
    assert len(caplog.records) >= 3
    texts += [listed.stdout, refused.stderr, near.stderr]
    assert not any("\nERROR" in text for text in texts)
    for text in (*texts, *(record.getMessage() for record in caplog.records)):
        assert text.replace("\n", "").isprintable(), ascii(text)
    caplog.clear()
    logging.getLogger("flax_ckpt_compat").info("%s of %d", "one", 2)
    assert caplog.records[0].args == ("one", 2)  # a record that is printable keeps its parts


def unfolded(text: str) -> Iterator[str]:
    """The names that a folded one stands for, its sets of numbers taken as a product."""
    parts = re.split(r"\{(.*?)\}", text)
    choices = [[part] if at % 2 == 0 else list(_numbers(part)) for at, part in enumerate(parts)]
    yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for word in text.split(","):
        first, _, last = word.partition("..")
        yield from (str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1))


NAMES = st.lists(
    st.builds("{}_{}/{}{}".format, st.sampled_from("ab"), st.integers(0, 3), st.sampled_from("xy"), st.integers(0, 2))
)


@given(NAMES)
def test_folded_rows_stand_for_these_names(names: list[str]) -> None:
    """Nothing is lost, and counts add up; sets of numbers that are no product are told by their count alone."""
    rows = fold(Row((name,)) for name in names)
    assert sum(row.count for row in rows) == len(names)
    named = [name for row in rows for name in unfolded(row.names[0])]
    assert set(named) >= set(names)
    for row in rows:
        meant = list(unfolded(row.names[0]))
        counts = Counter(names)
        assert sum(counts[name] for name in meant) == row.count


def test_layers_are_folded() -> None:
    """Rows of layers, also two deep and ragged; other details, other rows; source and leaf in step."""
    blocks = [f"block_{n}/{leaf}" for n in range(24) for leaf in ("w", "b")]
    assert [(row.names[0], row.count) for row in fold(Row((name,)) for name in blocks)] == [
        ("block_{0..23}/w", 24),
        ("block_{0..23}/b", 24),
    ]
    ragged = [f"stage_{s}/block_{b}/w" for s in range(4) for b in range(3 if s else 2)]
    assert fold(Row((name,)) for name in ragged) == [Row(("stage_{0..3}/block_{0..2}/w",), (), 11)]
    shapes = [Row((f"k{n}",), ("(3,)" if n < 9 else "(4,)",)) for n in range(20)]
    assert [(row.names, row.detail) for row in fold(shapes)] == [(("k{0..8}",), ("(3,)",)), (("k{9..19}",), ("(4,)",))]
    moved = [Row((f"new_{n}/w", f"old_{n}/w")) for n in range(5)]
    assert fold(moved) == [Row(("new_{0..4}/w", "old_{0..4}/w"), (), 5)]
    swapped = [Row((f"new_{n}/w", f"old_{4 - n}/w")) for n in range(5)]
    assert fold(swapped) == swapped
    assert one_line(f"l{n:02}" for n in range(25)) == "l{00..24}"
    assert one_line(f"l_{n}/a_{n}" for n in range(25)) == "l_{0..24}/a_{0..24} (25)"
    assert one_line(f"l{n * n}" for n in range(25)) == "l{0,1,4,9,…,576}"
    assert one_line(f"l{'1' * 5000}{n}" for n in range(25))  # Python converts no such number


def test_few_are_shown_as_they_are() -> None:
    """Up to the limit nothing is folded; what does not fold is counted."""
    assert one_line("abc") == "a, b, c" and one_line(["x1", "x2"]) == "x1, x2"
    words = ["".join(word) for word in itertools.product("abc", repeat=4)]
    rows, more = shown([Row((word,)) for word in words])
    assert (len(rows), more) == (20, 61)
    assert one_line(words).endswith(" and 61 more")
    assert one_line(Row((f"p{n}",), ("float64 to float32",)) for n in range(2)) == (
        "p0: float64 to float32, p1: float64 to float32"
    )


STORED = ["params/Dense_0/kernel", "params/Dense_0/bias", "params/enc/attn/kernel", "opt/trace/enc/kernel", "step"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("params/Dense_0/kernal", ["params/Dense_0/kernel"]),
        ("params/Dense_00/bias", ["params/Dense_0/bias"]),
        ("params/encoder/attn/kernel", ["params/enc/attn/kernel"]),
        ("params/model/Dense_0/kernel", ["params/Dense_0/kernel"]),
        ("model/Dense_0/bias", ["params/Dense_0/bias"]),
        ("steps", ["step"]),
        ("params/head/kernel", []),
        ("params/gate/bias", []),
        ("opt/mu/enc/kernel", []),
        ("params/enc/mlp/kernel", []),
    ],
)
def test_names_that_are_akin(wanted: str, expected: list[str]) -> None:
    """A misspelling, a longer form or another level is told; equal ends alone, which all layers have, are not."""
    assert nearest(wanted, STORED) == expected


def test_items_of_lists_are_like_items_of_lists() -> None:
    """A list that is longer in the target lacks an item, and no name that happens to share letters is it."""
    names = [*(f"flattened_state/{item}" for item in range(6)), "str_pytree_state"]
    assert nearest("flattened_state/6", names) == []
    assert nearest("layer/6", ["layers/6", "layer_6"]) == ["layers/6"]
