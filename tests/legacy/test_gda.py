"""Arrays of several processes, in the zarr folder that Flax writes beside the msgpack file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgpack
import numpy as np
import pytest
from flax_ckpt_compat.legacy import BACKEND

from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import iter_leaves

_DATA = Path(__file__).parents[1] / "data" / "gda"
_LEAF, _TREE = ("two_processes_leaf", "checkpoint_7"), ("two_processes_tree", "checkpoint_3")


def _copy(case, tmp_path):
    folder, name = case
    shutil.copytree(_DATA / folder, tmp_path / "gda")
    return tmp_path / "gda" / name


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.rename(path.with_name("9.9")),  # as many files as chunks
        # A frame of zstd that says that it holds a TiB, which nobody should ask for.
        lambda path: path.write_bytes(bytes.fromhex("28b52ffde0") + (2**40).to_bytes(8, "little") + b"\1\0\0"),
    ],
)
def test_damaged_chunk(damage, tmp_path):
    """A missing or cut chunk is an error, never zeros, and other arrays can still be read."""
    path = _copy(_TREE, tmp_path)
    damage(Path(f"{path}_gda/params/xy/1.0"))
    params = BACKEND.open(location_of(path)).tree.children["params"].children
    with pytest.raises(CorruptCheckpointError, match="params/xy") as caught:
        params["xy"].read()
    assert caught.value.__cause__ is not None
    assert params["y_i32"].read().tolist() == list(range(8))


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"{}", b"[" * 5000, b'{"shape": [-1], "dtype": "<f4"}', b'{"shape": [], "dtype": 3}'),
        b'{"shape": [1099511627776], "chunks": [1099511627776], "dtype": "<f4", "compressor": {"id": "zstd"}}',
    ],
)
def test_damaged_metadata(text, tmp_path):
    """Metadata that does not decode is an error that names the file."""
    path = _copy(_LEAF, tmp_path)
    Path(f"{path}_gda/.zarray").write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=r"\.zarray|4398046511104 bytes, are needed"):
        BACKEND.open(location_of(path)).tree.read()


@pytest.mark.parametrize("subpath", ["../x", "a/../../x", "/etc", "a\0b", ".."])
def test_escaping_reference(subpath, tmp_path):
    """A reference that leads out of the folder is refused, whether or not something is there."""
    path = tmp_path / "checkpoint_1"
    path.write_bytes(msgpack.packb({"a": f"//GDAPlaceholder:{subpath}"}))
    shutil.copytree(_DATA / _LEAF[0] / f"{_LEAF[1]}_gda", tmp_path / "x")
    (tmp_path / "checkpoint_1_gda").mkdir()
    with pytest.raises(CorruptCheckpointError, match="leads out"):
        BACKEND.open(location_of(path))


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_an_array_that_is_replaced_after_the_file_was_opened(change, tmp_path):
    """What was announced is what comes back: another dtype or shape in the folder is an error, not a conversion."""
    path = _copy(_TREE, tmp_path)
    reader = BACKEND.open(location_of(path))
    handle = next(leaf for _, leaf in iter_leaves(reader.tree) if leaf.in_gda_folder and leaf.dtype == np.float32)
    file = Path(handle.locator.folder.path, ".zarray")
    fields = json.loads(file.read_text())
    fields[change] = "<f8" if change == "dtype" else [length + 1 for length in fields["shape"]]
    file.write_text(json.dumps(fields))
    with pytest.raises(CorruptCheckpointError, match=r"it is now .*, it was float32"):
        reader.read([handle])
