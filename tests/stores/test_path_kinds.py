"""Kinds of paths in object stores against everything that decides what lies at one: see tests/data/path_kinds.toml."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import path_consumers, path_kinds
from tests.support.path_consumers import Look
from tests.support.path_kinds import Builder, Row
from tests.support.peers import version
from tests.support.store_places import AnyBucket

# Older releases leave out what rows lose; files that they wrote are in tests/data/corpus.
pytestmark = [
    pytest.mark.skipif(version("orbax-checkpoint") < (0, 12), reason="rows are of what this Orbax wrote"),
    pytest.mark.usefixtures("quiet"),
]


def _cases() -> Iterator[Any]:
    """Rows, each in one store, since one client serves them all: the quick ones in one that answers quickly."""
    for number, row in enumerate(row for row in path_kinds.rows() if row["places"] != ["disk"]):
        stores = [store for store in ("s3", "gs") if {"store", store}.intersection(row["places"])]
        if "store" in row["places"] and not row["quick_in_store"]:
            stores.append("shelf")
        store = stores[number % len(stores)]
        if store == "shelf" and number % 5 == 0:  # Azurite is slow to answer
            store = "az"
        yield pytest.param(row, store, id=f"{row.name}, {store}")


@pytest.mark.slow
@pytest.mark.parametrize(("row", "any_bucket"), list(_cases()), indirect=["any_bucket"])
def test_in_stores(row: Row, any_bucket: AnyBucket, row_builder: Builder, tmp_path: Path) -> None:
    """Everything that decides what lies at a path decides as its row says."""
    wrong = path_consumers.wrong(Look(row_builder, row, tmp_path, any_bucket))
    assert not wrong, "\n" + "\n".join(wrong)
