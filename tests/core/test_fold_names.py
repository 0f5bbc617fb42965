"""Lists of names: what differs only in numbers is one row that stands for exactly these names."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat._core.fold_names import Row, fold, one_line, shown


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
def test_folded_rows_stand_for_exactly_these_names(names: list[str]) -> None:
    """Nothing is added, nothing lost, and counts add up; columns in step are told by their count alone."""
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
    assert [row.names[0] for row in fold(Row((name,)) for name in ragged)] == [
        "stage_0/block_{0,1}/w",
        "stage_{1..3}/block_{0..2}/w",
    ]
    shapes = [Row((f"k{n}",), ("(3,)" if n < 9 else "(4,)",)) for n in range(20)]
    assert [(row.names, row.detail) for row in fold(shapes)] == [(("k{0..8}",), ("(3,)",)), (("k{9..19}",), ("(4,)",))]
    moved = [Row((f"new_{n}/w", f"old_{n}/w")) for n in range(5)]
    assert fold(moved) == [Row(("new_{0..4}/w", "old_{0..4}/w"), (), 5)]
    assert one_line(f"l{n:02}" for n in range(25)) == "l{00..24}"
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
