"""Trees over several processes come back bit for bit: on as many processes, on more, on fewer and on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints
from tests.multiprocess import jobs
from tests.support.team import team_of


@pytest.fixture(params=[False, True], ids=["msgpack", "orbax"])
def orbax(request: pytest.FixtureRequest) -> bool:
    """Flax's flag in the processes of the team."""
    return bool(request.param)


@pytest.mark.parametrize(
    ("writers", "kind", "readers", "onto"),
    [(2, "plain", 2, "plain"), (2, "plain", 4, "turned"), (4, "plain", 2, "flat"), (4, "turned", 4, "plain"), (2, "flat", 1, "plain")],
)
def test_every_bit_comes_back_on_any_number_of_processes(
    orbax: bool, tmp_path: Path, writers: int, kind: str, readers: int, onto: str
) -> None:
    """Every process finds its shards of every array, of its own mesh, and process 0's value of all else."""
    paths = team_of(writers).call(jobs.save_mixed, str(tmp_path), orbax, kind)
    assert paths == [str(tmp_path / "checkpoint_1")] * writers
    for abstract in (False, True):
        team_of(readers).call(jobs.restore_mixed, str(tmp_path), orbax, onto, abstract)
