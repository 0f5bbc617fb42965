"""Large conversions, and those of what several processes saved: what was split stays so, and memory is bounded."""

import sys
import warnings
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax.training import checkpoints
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_ckpt_compat
from flax_ckpt_compat import config
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


VALUES = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)
ODD = VALUES.astype(jax.numpy.bfloat16)


def save(folder: str, use_orbax: bool) -> None:
    """Saves with real Flax: rows over x, columns over y; in bfloat16 too, which has other words on the disk."""
    flax.config.update("flax_use_orbax_checkpointing", use_orbax)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    tree = {}
    for name, values, spec in (
        ("w", VALUES, PartitionSpec("x", "y")),
        ("odd", np.tile(ODD, (1, 2)), PartitionSpec("x")),
    ):
        sharding = NamedSharding(mesh, spec)
        tree[name] = jax.make_array_from_callback(values.shape, sharding, lambda index, values=values: values[index])
    manager = None if use_orbax else GlobalAsyncCheckpointManager()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.save_checkpoint_multiprocess(folder, tree, 1, gda_manager=manager)
        if manager is not None:
            manager.wait_until_finished()


def chunks(path: Path, name: str, driver: str) -> tuple[int, ...]:
    """The shape of the chunks of an array, as TensorStore tells it."""
    store = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
    shape: tuple[int, ...] = ts.open({"driver": driver, "kvstore": store}).result().chunk_layout.read_chunk.shape
    return shape


@pytest.fixture(scope="module", params=[True, False], ids=["orbax", "gda"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes with four devices each."""
    folder = tmp_path_factory.mktemp("sharded")
    team_of(2, 4).call(save, str(folder), request.param)
    return folder / "checkpoint_1"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.filterwarnings("ignore:Couldn't find sharding info")
@pytest.mark.parametrize(
    ("compression", "driver"), [(None, "zarr"), pytest.param("zstd", "zarr3", marks=pytest.mark.slow)]
)
def test_chunks_stay(source: Path, tmp_path: Path, compression: Any, driver: str) -> None:
    """Each shard of the source is a chunk of the result, whose values real Orbax reads."""
    with config.override(compression=compression):
        flax_ckpt_compat.convert(source, tmp_path / "out", "orbax")
    assert chunks(tmp_path / "out", "w", driver) == (128, 128)
    # Newer releases of real Orbax also split what two columns of devices hold twice; the folder of arrays does not.
    expected = chunks(source, "odd", "zarr") if source.is_dir() else (128, 512)
    assert chunks(tmp_path / "out", "odd", driver) == expected
    arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in ("w", "odd")}
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "out", restore_args=arguments)
    assert found["w"].tobytes() == VALUES.tobytes()
    assert found["odd"].tobytes() == np.tile(ODD, (1, 2)).tobytes() and found["odd"].dtype == ODD.dtype


@pytest.mark.slow
def test_there_and_back(source: Path, tmp_path: Path) -> None:
    """Formats without chunks get whole arrays; each result was compared with its source."""
    for to in ("msgpack", "safetensors"):
        flax_ckpt_compat.convert(source, tmp_path / to, to)  # type: ignore[arg-type]
    flax_ckpt_compat.convert(source, tmp_path / "orbax", "orbax")
    flax_ckpt_compat.convert(tmp_path / "orbax", tmp_path / "file", "msgpack")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "msgpack").read_bytes()
    found: Any = flax_ckpt_compat.restore(tmp_path / "file")
    assert np.asarray(found["w"]).tobytes() == VALUES.tobytes()
