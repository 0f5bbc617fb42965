"""Saves on a network file system: the rules of NFS (network.c), of which no local file system has any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability import shim
from tests.support.interpreters import ROOT

pytestmark = pytest.mark.skipif(bool(shim.why_not()), reason=shim.why_not() or "it is there")

HELD = """
import json, os, sys
import flax
import numpy as np
from flax_ckpt_compat import checkpoints
from tests.reliability import shim

def save(step, value, **options):
    checkpoints.save_checkpoint(run, {"a": np.full(20_000, value), "n": value}, step, **options)
    assert checkpoints.restore_checkpoint(run, None, step)["n"] == value
    seen.append([checkpoints.available_steps(run), len(os.listdir(run))])

def hold():
    return [open(os.path.join(where, name)) for where, _, names in os.walk(run) for name in names]

def check():
    shim.network(sys.argv[1], shim.Network.ONE_MACHINE)
    save(1, 1)
    held = hold()
    save(1, 2, overwrite=True)
    save(2, 3, keep=1)
    save(3, 4, keep=1)
    assert any(name.startswith(".nfs") for _, _, names in os.walk(run) for name in names), "nothing was held"
    for file in held:
        file.close()
    save(4, 5, keep=2)
    print(json.dumps(seen))

# A process each, which the first one has imported everything for.
for format in ("msgpack", "orbax"):
    run, seen = f"{sys.argv[1]}/{format}", []
    flax.config.update("flax_use_orbax_checkpointing", format == "orbax")
    if os.fork() == 0:
        check()
        sys.exit()
    assert os.wait()[1] == 0
"""


@pytest.mark.slow
def test_saves_on_nfs_beside_a_reader(tmp_path: Path) -> None:
    """Neither a missing call nor a file that somebody has open makes a save fail, and what stays is removed later.

    No half-deleted checkpoint gets its name back, as step 1 would, which was set aside and is evicted meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", HELD, str(tmp_path)],
        cwd=ROOT,
        env=shim.environment(),
        capture_output=True,
        text=True,
        check=False,
        process_group=0,  # the shim looks through all of its group for who has a file open
    )
    assert done.returncode == 0, done.stderr
    for format, line in zip(("msgpack", "orbax"), done.stdout.splitlines(), strict=True):
        seen = json.loads(line)
        assert [steps for steps, _ in seen] == [[1], [1], [2], [3], [3, 4]]
        assert seen[-1][1] == 2
        assert len(os.listdir(tmp_path / format)) == 2
    assert done.stderr.count("cannot be synced (Invalid argument)") == 2
