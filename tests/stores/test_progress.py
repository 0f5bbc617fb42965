"""``progress=`` of saves to stores, and of restores from them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import Progress, restore, save
from flax_ckpt_compat._core import progress
from tests.support.layouts import assert_same
from tests.support.store_places import AnyBucket

TREE = {"kernel": np.arange(3_000_000.0), "table": np.ones((1000, 1000), np.int8)}
NBYTES = 8 * 3_000_000 + 1000 * 1000


@pytest.mark.parametrize(
    ("any_bucket", "format"),
    [
        ("s3", "msgpack"),
        pytest.param("gs", "orbax"),
        pytest.param("s3", "orbax", marks=pytest.mark.slow),
        pytest.param("gs", "msgpack", marks=pytest.mark.slow),
        pytest.param("az", "orbax", marks=pytest.mark.slow),
        ("shelf", "orbax"),
    ],
    indirect=["any_bucket"],
)
def test_reports(any_bucket: AnyBucket, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports never fall and end with all bytes; half of a save is the local files, the other half their upload."""
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    reports: list[Progress] = []
    path = f"{any_bucket.url}/c"
    for overwrite in (False, True):
        reports.clear()
        save(path, TREE, format=format, overwrite=overwrite, progress=reports.append)
        done = [one.done for one in reports]
        assert done == sorted(done)
        assert done[-1] == NBYTES > done[-2]
        assert [one.finished for one in reports].count(True) == 1
        assert {one.total for one in reports} == {NBYTES}
        halves = Counter(one.done > NBYTES // 2 for one in reports[:-1])
        assert halves[False] > 0
        if format == "orbax":  # of several files
            assert halves[True] > 0
    reports.clear()
    assert_same(restore(path, progress=reports.append), TREE)
    done = [one.done for one in reports]
    assert done == sorted(done)
    assert done[-1] == NBYTES > done[-2] > 0
