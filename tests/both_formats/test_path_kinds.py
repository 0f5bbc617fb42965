"""Every kind of path against everything that decides what lies at one: the table is ``tests/data/path_kinds.toml``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.cli import main
from tests.support import path_consumers, path_kinds
from tests.support.path_consumers import Look
from tests.support.path_kinds import Builder, Row
from tests.support.peers import version

# Older releases leave out what rows lose; files that they wrote are in tests/data/corpus.
pytestmark = [
    pytest.mark.skipif(version("orbax-checkpoint") < (0, 12), reason="rows are of what this Orbax wrote"),
    pytest.mark.usefixtures("quiet"),
]


LOCAL = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row["slow"] else [])
    for row in path_kinds.rows()
    if "disk" in row["places"]
]


@pytest.mark.parametrize("row", LOCAL)
def test_on_disk(row: Row, row_builder: Builder, tmp_path: Path) -> None:
    """Everything that decides what lies at a path decides as its row says."""
    wrong = path_consumers.wrong(Look(row_builder, row, tmp_path))
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_base_is_used() -> None:
    """What the table does not name is never built."""
    rows = path_kinds.rows()
    assert len(rows) > 150
    # The two older steps are built for each row.
    assert path_kinds.BASES.keys() - {row.base for row in rows} == {"manager", "msgpack, older"}


def test_names_that_are_no_steps(row_builder: Builder, tmp_path: Path) -> None:
    """Content beats names: a model called pi0 is not step 0, and a date is not step 1, wherever they are listed."""
    for row in path_kinds.rows():
        if row.at in ("pi0", "2024-05-01"):
            row_builder.put(row, tmp_path)
    result = CliRunner().invoke(main, ["ls", str(tmp_path), "--recursive", "--json"])
    listed = {one["name"]: (one["step"], one["complete"]) for one in json.loads(result.stdout)}
    assert listed == {"pi0": (None, True), "2024-05-01": (None, True)}
    for find in (checkpoints.latest_checkpoint, checkpoints.available_steps):
        assert not find(tmp_path)
    assert checkpoints.restore_checkpoint(tmp_path, None) is None
