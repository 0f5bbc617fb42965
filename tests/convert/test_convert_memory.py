"""The memory that a conversion takes: that of the largest array, and less than 128 MiB more."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_ckpt_compat
from tests.support.interpreters import start_python
from tests.support.team import team_of

LARGEST, LIMIT = 160 << 20, 128 << 20
# Converts twice, at first something small; prints by how many bytes the peak rose above what was resident before.
JOB = """
import sys
import flax_ckpt_compat

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

source, small, destination, to = sys.argv[1:]
flax_ckpt_compat.convert(small, destination + "-small", to)
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
flax_ckpt_compat.convert(source, destination, to)
print(resident("VmHWM") - before)
"""


def save_sharded(folder: str) -> None:
    """Saves in the processes of a team, with columns over the devices: no chunk is a range of rows."""
    values = np.arange(LARGEST // 4, dtype=np.float32).reshape(-1, 4096)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(None, "x"))
    tree = {"w": jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])}
    flax_ckpt_compat.checkpoints.save_checkpoint_multiprocess(folder, tree, 1)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
@pytest.mark.parametrize("to", ["orbax", "msgpack"])
@pytest.mark.parametrize("source", ["msgpack", "orbax", "sharded"])
def test_peak_is_that_of_the_largest_array(tmp_path: Path, source: str, to: str) -> None:
    """One large array, and as much again in arrays of 4 MiB."""
    if source == "sharded":
        team_of(2, 4).call(save_sharded, str(tmp_path / "run"))
    else:
        tree = {f"part_{n}": np.full(1 << 20, n, np.float32) for n in range(40)}
        tree["largest"] = np.arange(LARGEST // 4, dtype=np.float32).reshape(-1, 4096)
        flax_ckpt_compat.save(tmp_path / "run", tree, step=1, format=source)  # type: ignore[arg-type]
    flax_ckpt_compat.save(tmp_path / "small", {"w": np.zeros(1 << 18)}, step=1, format="msgpack")
    small, large = (tmp_path / name / "checkpoint_1" for name in ("small", "run"))
    output, errors = start_python(JOB, large, small, tmp_path / "out", to).communicate()
    assert int(output) < LARGEST + LIMIT, errors
