"""Leaves of which an Orbax directory does not say what they were: the target's leaf decides, where it can."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.errors import CorruptCheckpointError
from tests.support.logs import warnings_logged
from tests.support.peers import skip_without_typed_keys
from tests.support.samples import fingerprint

SCALARS = {"i": 3, "f": 2.5, "b": True, "i64": np.int64(4), "f64": np.float64(0.5), "f32": np.float32(1.5)}
KINDS: dict[str, Any] = {
    "python": {"i": 0, "f": 0.0, "b": False, "i64": 0, "f64": 0.0, "f32": 0.0},
    "numpy scalar": {name: np.asarray(value).dtype.type(0) for name, value in SCALARS.items()},
    "array": {name: np.zeros((), np.asarray(value).dtype) for name, value in SCALARS.items()},
}


@pytest.fixture(autouse=True)
def real_orbax_may_warn() -> Any:
    """Deprecations inside Orbax are not ours to mend."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(orbax|jax|etils|flax)\b.*")
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_scalars_of_directories_with_types(tmp_path: Path, kind: str) -> None:
    """A stored scalar is the Python number or the numpy scalar that the target has, and never becomes an array."""
    ocp.PyTreeCheckpointer().save(tmp_path / "c", SCALARS)
    restored = checkpoints.restore_checkpoint(tmp_path / "c", KINDS[kind])
    asked = {"python": lambda a: a.item(), "numpy scalar": lambda a: a[()]}.get(kind)
    plain = SCALARS | {"i64": 4, "f64": 0.5}
    assert fingerprint(restored) == fingerprint(
        {name: asked(np.asarray(value)) for name, value in SCALARS.items()} if asked else plain
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scalars_of_directories_without_types(tmp_path: Path, kind: str) -> None:
    """Before ``_METADATA`` all of them were stored alike, so the target decides among all three."""
    ocp.PyTreeCheckpointer().save(tmp_path / "c", SCALARS)
    (tmp_path / "c" / "_METADATA").unlink()
    (tmp_path / "c" / "checkpoint").write_bytes(msgpack.packb({name: f"PLACEHOLDER://{name}" for name in SCALARS}))
    asked = {"python": lambda a: a.item(), "numpy scalar": lambda a: a[()], "array": lambda a: a}[kind]
    expected = {name: asked(np.asarray(value)) for name, value in SCALARS.items()}
    if kind == "python":
        expected["f32"] = np.asarray(np.float32(1.5))  # no Python number was ever stored so narrow
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path / "c", KINDS[kind])) == fingerprint(expected)
    alone = checkpoints.restore_checkpoint(tmp_path / "c", None)
    assert fingerprint(alone) == fingerprint(
        {"i": 3, "f": 2.5, "b": True, "i64": 4, "f64": 0.5, "f32": np.asarray(np.float32(1.5))}
    )


def test_what_may_be_a_key(tmp_path: Path) -> None:
    """Where the files that tell keys from their data are lost, only a plain array in the target gets the data."""
    skip_without_typed_keys()
    ocp.PyTreeCheckpointer().save(tmp_path / "c", {"key": jax.random.key(3), "a": jnp.arange(3)})
    shutil.rmtree(tmp_path / "c" / "array_metadatas")
    with warnings_logged() as logged:
        for target in (None, {"key": jax.random.key(0)}):
            with pytest.raises(CorruptCheckpointError, match="array_metadatas") as caught:
                checkpoints.restore_checkpoint(tmp_path / "c", target)
            assert caught.value.leaf == "key"
        raw = checkpoints.restore_checkpoint(tmp_path / "c", {"key": np.zeros(2, np.uint32)})["key"]
        assert checkpoints.restore_checkpoint(tmp_path / "c", {"a": np.zeros(3)})["a"].tolist() == [0, 1, 2]
        with (
            flax_ckpt_compat.open_checkpoint(tmp_path / "c") as opened,
            pytest.raises(CorruptCheckpointError, match="array_metadatas"),
        ):
            opened.read("key")
    assert sum("array_metadatas" in text for text in logged) == 5
    assert fingerprint(raw) == fingerprint(np.asarray(jax.random.key_data(jax.random.key(3))))


def test_numbers_behind_arrays_for_numbers(tmp_path: Path) -> None:
    """What was stored as an array, and may have been a number, is one where the target has one; an array stays one."""
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            checkpointer.save(tmp_path / "c", {"a": jnp.float32(1.5), "b": np.float32(2.5)})
        except ValueError:  # 0.10.3
            pytest.skip("this Orbax saves no numpy scalars")
    restored = checkpoints.restore_checkpoint(tmp_path / "c", {"a": np.float32(0), "b": np.float32(0)})
    assert (type(restored["b"]), restored["b"], restored["a"]) == (np.float32, 2.5, 1.5)
