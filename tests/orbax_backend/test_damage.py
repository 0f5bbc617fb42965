"""Damaged and hostile directories: right values, or an error that says what is wrong; never zeros, never a hang."""

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_ckpt_compat._core.errors import CheckpointError, CorruptCheckpointError
from tests.orbax_backend.conftest import WRITERS as REAL
from tests.orbax_backend.conftest import pytree
from tests.support.logs import warnings_logged
from tests.support.orbax_trees import change_metadata, database, load, on_host, save
from tests.support.peers import skip_without_typed_keys
from tests.support.profiles import examples
from tests.support.trees import fingerprint

TREE = {
    "big": np.arange(50_000.0),
    "mid": jnp.arange(3000.0),
    "small": np.arange(4),
    "text": "hello",
    "key": jax.random.key(1),
    "list": [1, {"x": 2.5}],
    "none": None,
}


WRITERS = {
    "ours": save,
    "ours zstd": lambda path, tree: save(path, tree, "zstd"),
    **{f"real {name}": REAL[name] for name in ("v0", "uncompressed", "files", "zarr3")},
}


@pytest.fixture(scope="module", params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each writer, to be copied before it is damaged."""
    if request.param.startswith("real"):
        skip_without_typed_keys()
    path = tmp_path_factory.mktemp("written") / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WRITERS[request.param](path, TREE)
    return path


def _names(error: CheckpointError, file: Path) -> bool:
    """Whether a message names a file, or else the folder in the checkpoint that it lies in."""
    return file.name in str(error) or (file.parent != Path() and str(file.parent) in str(error))


def _ends(data: bytes) -> Iterator[bytes]:
    """A file that is empty, half there, and there but for its last byte."""
    for length in {0, len(data) // 2, max(0, len(data) - 1)}:
        yield data[:length]


def _flips(data: bytes) -> Iterator[bytes]:
    """A file with a wrong bit somewhere."""
    rng = random.Random(len(data))
    for position in [rng.randrange(len(data)) for _ in range(examples(12, 4))] if data else ():
        yield data[:position] + bytes([data[position] ^ (1 << rng.randrange(8))]) + data[position + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda _: [None], pytest.param(_ends, marks=pytest.mark.slow), pytest.param(_flips, marks=pytest.mark.slow)],
    ids=["missing", "cut off", "flipped"],
)
def test_any_file_may_be_damaged(written: Path, tmp_path: Path, damage: Callable[[bytes], Any]) -> None:
    """The values are right all the same, or the error names the file, but for flips; lost key types are warned of."""
    for number, name in enumerate(sorted(file.relative_to(written) for file in written.rglob("*") if file.is_file())):
        copy = shutil.copytree(written, tmp_path / str(number))
        for wrong in damage((copy / name).read_bytes()):
            (copy / name).unlink() if wrong is None else (copy / name).write_bytes(wrong)
            with warnings_logged() as logged:
                try:
                    restored = load(copy)
                except CheckpointError as error:
                    assert damage is _flips or _names(error, name), (name, str(error))
                    continue
            if damage is not _flips and fingerprint(restored) != fingerprint(on_host(TREE)):
                assert wrong is None and "array_metadatas" in str(name)
                assert any("PRNG" in text and "key" in text for text in logged)


def test_our_keys_survive_the_loss_of_array_metadatas(tmp_path: Path) -> None:
    """Our annotations name PRNG keys too."""
    path = Path(save(tmp_path / "c", TREE))
    shutil.rmtree(path / "array_metadatas")
    assert fingerprint(load(path)) == fingerprint(on_host(TREE))


def test_keys_that_another_process_lists(tmp_path: Path) -> None:
    """Every process should list all arrays; where the first one does not, the others count."""
    skip_without_typed_keys()
    path, tree = tmp_path / "c", {"key": jax.random.key(1), "w": jnp.ones(3)}
    REAL["v0"](path, tree)
    file = path / "array_metadatas" / "process_0"
    listed = json.loads(file.read_text())["array_metadatas"]
    for number, name in enumerate(("w", "key")):
        mine = [one for one in listed if one["array_metadata"]["param_name"] == name]
        file.with_name(f"process_{number}").write_text(json.dumps({"array_metadatas": mine}))
    assert fingerprint(load(path)) == fingerprint(on_host(tree))


@pytest.mark.parametrize("size", [3, 50_000], ids=["in the index", "in a file"])
def test_a_short_or_missing_value(tmp_path: Path, size: int) -> None:
    """What is behind it, in memory or in the file, is not part of the array; even an array of zeros must be there."""
    path = save(tmp_path / "c", {"a": {"w": np.zeros(size)}, "b": np.ones(3)})
    store = database(path)
    short = rf"'a/w'.*{8 * size - 16} bytes, expected {8 * size}"
    for value, said in ((bytes(8 * size - 16), short), (None, r"a/w.*a\.w/0.*missing")):
        store["a.w/0"] = value
        with pytest.raises(CorruptCheckpointError, match=said) as caught:
            load(path)
        assert caught.value.leaf == "a/w"


@pytest.mark.parametrize("zarr3", [True, False])
def test_left_out_chunks_follow_the_convention_of_the_writer(tmp_path: Path, zarr3: bool) -> None:
    """Where chunks that equal a declared fill value were not stored they are that value; else they are missing.

    Of loose files that is told: they may as well have been lost, and empty directories tell nothing, because
    TensorStore makes them for chunks that it then does not store (Orbax 0.5.15, measured).
    """
    path = tmp_path / "c"
    pytree(use_ocdbt=False, use_zarr3=zarr3)(path, {"a": np.arange(6.0)})
    next(file for file in (path / "a").rglob("0")).unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        load(path)
    change_metadata(path, store_array_data_equal_to_fill_value=False)
    if not zarr3:
        with pytest.raises(CorruptCheckpointError, match="missing"):
            load(path)
    else:
        with warnings_logged() as logged:
            assert np.array_equal(load(path)["a"], np.zeros(6))
        assert any("['a']" in text for text in logged)


def test_unknown_entries_are_ignored(tmp_path: Path) -> None:
    """Later releases may say more, and optional files may be empty objects."""
    path = Path(save(tmp_path / "c", TREE))
    metadata = json.loads((path / "_METADATA").read_text())
    for entry in metadata["tree_metadata"].values():
        entry["new"] = {"x": 1}
        entry["value_metadata"]["new"] = [2]
    change_metadata(path, tree_metadata=metadata["tree_metadata"], brand_new={"a": 1})
    (path / "_sharding").write_text("{}")
    (path / "_CHECKPOINT_METADATA").write_text("[]")
    assert fingerprint(load(path)) == fingerprint(on_host(TREE))
