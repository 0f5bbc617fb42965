"""``oldest_orbax="0.3"``: the files that releases 0.3 to 0.5 need, compared with what those releases wrote themselves.

`python -m tests.readers_matrix` lets the releases read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

import flax_ckpt_compat as fcc
from flax_ckpt_compat import config
from flax_ckpt_compat._core.errors import SettingError
from tests.orbax_backend.test_writer_real_readers import READERS
from tests.support import corpus
from tests.support.orbax_trees import on_host
from tests.support.trees import fingerprint

TREE = {
    "a": {"w": jnp.arange(6.0).reshape(2, 3), "n": np.arange(3), "none": None, "empty": {}},
    "l": [np.ones(2), {"x": 3}, []],
    "t": "text",
    "f": 0.5,
}


def saved(path: Path, tree: Any = None, **settings: Any) -> Path:
    """A save that old releases can read."""
    with config.override(oldest_orbax="0.3", **settings):
        fcc.save(path, TREE if tree is None else tree, format="orbax")
    return path


def unpacked(path: Path) -> Any:
    """The structure file."""
    return msgpack.unpackb((path / "checkpoint").read_bytes())


# Later releases put a placeholder for empty containers too, and read both.
@pytest.mark.parametrize("case", ["full", "train_state", "oddkeys", "sharded"])
def test_the_structure_is_that_of_orbax_041(case: str, tmp_path: Path) -> None:
    """The file says the same as the one that Orbax 0.4.1 wrote for the same tree."""
    release = corpus.unpack("flax-0.7.4_orbax-0.4.1", tmp_path)
    theirs = release / "orbax_pytree_ocdbt" / case / "ckpt" / "c"
    ours = saved(tmp_path / "ours", fcc.restore(theirs))
    assert unpacked(ours) == unpacked(theirs)


def test_the_file_is_opt_in(tmp_path: Path) -> None:
    """By default a directory has what real Orbax of today writes."""
    fcc.save(tmp_path / "c", TREE, format="orbax")
    assert not (tmp_path / "c" / "checkpoint").exists()


def test_shardings_are_named_as_in_old_releases(tmp_path: Path) -> None:
    """0.4.2 and before look up the plain name, and know meshes only; 0.5 knows the devices of jax 0.4."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    placed = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    path = saved(tmp_path / "c", {"a": {"one": jnp.ones(2), "mesh": placed}, "np": np.ones(2)})
    found = {name: json.loads(text) for name, text in json.loads((path / "_sharding").read_text()).items()}
    assert found.keys() == {"a.one", "a.mesh", "YS5vbmU=", "YS5tZXNo"}
    assert found["YS5vbmU="] == {"sharding_type": "SingleDeviceSharding", "device_str": "TFRT_CPU_0"}
    assert {one["sharding_type"] for name, one in found.items() if "." in name} == {"NamedSharding"}
    assert found["a.mesh"]["partition_spec"] == ["d"]


def test_we_do_not_read_it(tmp_path: Path) -> None:
    """A damaged structure file changes nothing that we restore, and verify() names it."""
    path = saved(tmp_path / "c")
    assert fcc.verify(path).verified
    data = (path / "checkpoint").read_bytes()
    (path / "checkpoint").write_bytes(data.replace(b"PLACEHOLDER://f", b"PLACEH0LDER://f"))
    assert fingerprint(on_host(fcc.restore(path))) == fingerprint(on_host(TREE))
    report = fcc.verify(path)
    assert report.damaged and "checkpoint" in str(report)


@pytest.mark.parametrize("reader", READERS)
def test_new_orbax_reads_it_as_before(reader: str, tmp_path: Path) -> None:
    """With the setting, Orbax of today gives exactly what was saved."""
    assert fingerprint(on_host(READERS[reader](saved(tmp_path / "c")))) == fingerprint(on_host(TREE))


def test_conversions_write_it(tmp_path: Path) -> None:
    """`convert` follows the setting: each item of a manager's step has the file."""
    with config.override(oldest_orbax="0.3"):
        fcc.convert(saved(tmp_path / "a" / "checkpoint_3"), tmp_path / "b", to="manager")
    (file,) = (tmp_path / "b").rglob("checkpoint")
    assert msgpack.unpackb(file.read_bytes())["l"] == ["PLACEHOLDER://l.0", {"x": "PLACEHOLDER://l.1.x"}, []]


def test_compression_is_refused(tmp_path: Path) -> None:
    """Our compressed arrays are zarr v3, which those releases lack; nothing is written."""
    with pytest.raises(SettingError, match=r"oldest_orbax='0\.6'"):
        saved(tmp_path / "c", compression="zstd")
    assert list(tmp_path.iterdir()) == []
