"""Every kind of path against everything that decides what lies at one: the table is ``tests/data/path_kinds.toml``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import path_consumers, path_kinds
from tests.support.path_consumers import Look
from tests.support.path_kinds import Builder, Row
from tests.support.saves import use_flag


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory, unpacked: Path) -> Builder:
    """What builds rows, for all tests of this file."""
    return Builder(tmp_path_factory.mktemp("bases"), unpacked)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Flax's flag off; look-ups warn of most rows."""
    logger = logging.getLogger("flax_ckpt_compat")
    before = logger.level
    logger.setLevel(logging.ERROR)
    with use_flag(False):
        yield
    logger.setLevel(before)


LOCAL = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row["slow"] else [])
    for row in path_kinds.rows()
    if "disk" in row["places"]
]


@pytest.mark.parametrize("row", LOCAL)
def test_on_disk(row: Row, builder: Builder, tmp_path: Path) -> None:
    """Everything that decides what lies at a path decides as its row says."""
    wrong = path_consumers.wrong(Look(builder, row, tmp_path))
    assert not wrong, "\n" + "\n".join(wrong)
