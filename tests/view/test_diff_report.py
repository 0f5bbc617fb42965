"""What the text of a diff folds, leaves out and counts."""

import json
import types
from typing import Any

import numpy as np

from flax_ckpt_compat import checkpoints, diff
from flax_ckpt_compat._view import diff as diff_report


def values(**known: Any) -> Any:
    """How the values of a leaf differ."""
    nothing = {"other_values": 0, "size": 1, "only_one_nan": 0, "other_bits": 0, "max_abs": None, "max_rel": None}
    return types.SimpleNamespace(**(nothing | known))


def lines(*paths: str, kind: str = "type", a: str = "int 1", b: str = "int 2") -> list[str]:
    """The lines for leaves that differ alike."""
    found: Any = [types.SimpleNamespace(path=path, kind=kind, a=a, b=b, values=None) for path in paths]
    return [line.text for line in diff_report.lines_of(found)]


def test_sixty_lines_and_the_number_of_leaves_that_are_left() -> None:
    """A folded line counts as many leaves as it stands for."""
    names = [f"{one}{other}" for one in "abcdefgh" for other in "ijklmnop"]
    assert len(lines(*names[:60])) == 60
    assert lines(*names[:61])[60:] == ["… and 1 more leaves: see .differences, or --json"]
    assert lines(*names[:60], "z/0/w", "z/1/w", "z/2/w")[60:] == ["… and 3 more leaves: see .differences, or --json"]


def test_what_is_on_one_side_only() -> None:
    """Its mark, and its type on that side."""
    assert lines("x", kind="only in a", a="int 1", b="") == ["- x   int 1"]
    assert lines("x", kind="only in b", a="", b="int 2") == ["+ x   int 2"]
    assert lines("x") == ["~ x   int 1 → int 2"]


def test_numbers_of_several_leaves() -> None:
    """Elements are added up, the largest differences are those of any; a scalar alone shows its values."""
    scalar = values(other_values=1, max_abs=2.0, max_rel=0.5)
    assert diff_report.numbers_of([scalar]) == ""
    assert diff_report.numbers_of([scalar, scalar]) == "2 of 2 elements, max abs 2, max rel 0.5"
    assert diff_report.numbers_of([scalar, values(other_values=1, max_abs=1.0, max_rel=3.0, only_one_nan=1), None]) == (
        "2 of 2 elements, max abs 2, max rel 3, 1 NaN in one only"
    )
    bits = "the same values, of other bits (-0.0, NaN)"
    assert diff_report.numbers_of([values(other_bits=1), values()]) == bits
    assert diff_report.numbers_of([values()]) == diff_report.numbers_of([None]) == ""


def test_infinite_numbers_are_text_in_json(tmp_path: Any) -> None:
    """JSON has none."""
    for name, first in (("a", np.inf), ("b", 1.0)):
        checkpoints.save_checkpoint(tmp_path / name, {"x": np.array([first, 1.0])}, 1)
    found = diff_report.to_json(diff(tmp_path / "a" / "checkpoint_1", tmp_path / "b" / "checkpoint_1"))
    assert json.loads(json.dumps(found, allow_nan=False))["differences"][0]["values"]["max_abs"] == "inf"
