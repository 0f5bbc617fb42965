"""What the processes of a team do in the tests of what each of them finds."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import jax

from flax_ckpt_compat import checkpoints, restore
from tests.multiprocess.jobs import small, use
from tests.support.logs import warnings_logged

# One path that is another directory in each process, as where a mount is missing on a machine.
OWN_VIEW = "/proc/self/cwd/run"


def restore_own_view(folders: list[str], late: int, strict: bool) -> float:
    """Restores the latest checkpoint of `OWN_VIEW`, which is ``run`` in a folder of each process; one comes later."""
    before = os.getcwd()
    os.chdir(folders[jax.process_index()])
    try:
        if jax.process_index() == late:
            time.sleep(0.7)
        got: Any = restore(OWN_VIEW, small(-1)) if strict else checkpoints.restore_checkpoint(OWN_VIEW, small(-1))
    finally:
        os.chdir(before)
    return float(got["n"])


def restore_and_save(folder: str, orbax: bool) -> list[float]:
    """Looks before, between and after saves, as a training loop does; process 0 also on its own."""
    use(orbax)
    found = []
    for step in range(3):
        found.append(float(checkpoints.restore_checkpoint(folder, small(-1))["n"]))
        checkpoints.save_checkpoint_multiprocess(folder, small(step), step)
        if jax.process_index() == 0:
            checkpoints.restore_checkpoint(folder, small(-1))
    found.append(float(checkpoints.restore_checkpoint(folder, small(-1))["n"]))
    return found


def restore_after_removal(folder: str, late: int) -> float:
    """Restores what was removed since the last look; the ``late`` process does so when the other one has."""
    time.sleep(0.05)  # file systems count time in steps of some milliseconds
    shutil.rmtree(folder, ignore_errors=True)
    if jax.process_index() == late:
        time.sleep(0.3)
    return float(checkpoints.restore_checkpoint(folder, small(-1))["n"])


def restore_steps(folder: str, steps: list[int], late: int) -> list[str]:
    """Restores a step of its own in each process; returns what is warned of there."""
    if jax.process_index() == late:
        time.sleep(0.7)
    with warnings_logged() as logged:
        restore(folder, small(-1), step=steps[jax.process_index()])
    return [text for text in logged if "of this job" in text]
