"""What the processes of a team do in the tests of progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import Progress, checkpoints, config
from flax_ckpt_compat._core import progress
from tests.multiprocess import jobs


def reports_of_save(folder: str, orbax: bool) -> tuple[int, list[int]]:
    """Saves an array that is split over all processes, and one of numpy; the bytes in all, and those of each report."""
    jobs.use(orbax)
    split = jobs.put(jobs.large(), NamedSharding(jobs.mesh(), P(("x", "y"))))
    return _reports(lambda: checkpoints.save_checkpoint_multiprocess(folder, {"split": split, "own": np.ones(3)}, 2))


def reports_of_restore(folder: str) -> tuple[int, list[int]]:
    """Restores both whole."""
    whole = NamedSharding(jobs.mesh(), P())
    target = {"split": jax.ShapeDtypeStruct(jobs.large().shape, np.float32, sharding=whole), "own": np.ones(3)}
    return _reports(lambda: checkpoints.restore_checkpoint(folder, target, 2))


def _reports(call: Callable[[], Any]) -> tuple[int, list[int]]:
    done: list[Progress] = []
    with pytest.MonkeyPatch().context() as patch, config.override(progress=done.append):
        patch.setattr(progress, "_EVERY_SECONDS", 0.0)
        call()
    assert done[-1].finished
    return done[-1].total, [one.done for one in done]
