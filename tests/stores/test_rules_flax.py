"""Which checkpoints are left on S3 after a sequence of saves: ours against real legacy Flax on a local disk."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from flax.training import checkpoints as flax_checkpoints
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints as ours
from tests.save.test_retention_differential import call, one_spelling, run
from tests.support.profiles import examples
from tests.support.s3 import Bucket
from tests.support.saves import names, new_folder, use_flag


@pytest.mark.parametrize("flag", [False, True], ids=["msgpack", "orbax"])
@given(calls=st.lists(call, min_size=1, max_size=7).map(one_spelling))
@settings(max_examples=examples(12, quick=2), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_is_left_as_by_flax(bucket: Bucket, flag: bool, calls: list[dict[str, Any]]) -> None:
    """Every call has the same outcome and leaves the same names; the latest and the steps are the same."""
    prefix = uuid.uuid4().hex
    root = f"{bucket.url}/{prefix}"
    with new_folder() as folder:
        for index, one in enumerate(calls):
            with use_flag(False):
                expected = run(flax_checkpoints, folder, one)
            with use_flag(flag):
                assert run(ours, root, one) == expected, (index, one)
            assert sorted({key.split("/")[1] for key in bucket.keys(f"{prefix}/")}) == names(folder), (index, one)
        for start in {one.get("prefix", "checkpoint_") for one in calls}:
            latest = flax_checkpoints.latest_checkpoint(folder, start)
            assert ours.latest_checkpoint(root, start) == (latest and f"{root}/{Path(latest).name}")
            assert ours.available_steps(root, start, float) == flax_checkpoints.available_steps(folder, start, float)
