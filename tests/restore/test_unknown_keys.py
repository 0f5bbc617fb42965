"""PRNG keys of an implementation that this jax lacks: their data, or an error that says what to do."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat.errors import UnsupportedLeafError
from tests.support.logs import warnings_logged
from tests.support.peers import skip_without_typed_keys
from tests.support.saves import use_flag

DATA = np.arange(2, dtype=np.uint32)


@pytest.fixture(params=["msgpack", "orbax"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose key is of an implementation of somebody's own."""
    skip_without_typed_keys()
    tree = {"array": np.arange(3), "key": jax.random.wrap_key_data(DATA, impl="threefry2x32")}
    with use_flag(request.param == "orbax"), config.override(checksums="off"):
        checkpoints.save_checkpoint(tmp_path, tree, 1)
    changed = 0
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        before = file.read_bytes()
        file.write_bytes(before.replace(b"threefry2x32", b"theirown2x32"))
        changed += b"threefry2x32" in before
    assert changed
    return tmp_path


def _assert_rest(restored: Any) -> None:
    assert restored["array"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("target", [None, {"array": np.zeros(3, int), "key": np.zeros(2, np.uint32)}], ids=str)
def test_the_rest_restores_and_the_key_as_data(saved: Path, target: Any) -> None:
    """Without a target, or into raw data, nothing is lost; it is warned of."""
    with warnings_logged() as logged:
        restored = checkpoints.restore_checkpoint(saved, target)
    _assert_rest(restored)
    assert type(restored["key"]) is np.ndarray and restored["key"].dtype == np.uint32
    assert restored["key"].tolist() == DATA.tolist()
    assert sum("'key' is a PRNG key of the implementation 'theirown2x32'" in text for text in logged) == 1


def test_a_typed_target_is_an_error(saved: Path) -> None:
    """Nothing makes such a key here; the error names leaf, implementation and remedy, in both ways to restore."""
    target = {"array": np.zeros(3, int), "key": jax.random.key(0)}
    for restore in (checkpoints.restore_checkpoint, flax_ckpt_compat.restore):
        with pytest.raises(UnsupportedLeafError, match=r"'key'.*'theirown2x32'.*uint32 array") as caught:
            restore(saved, target)
        assert caught.value.leaf == "key"


def test_a_target_without_it_never_asks(saved: Path) -> None:
    """A key that nobody wants is nobody's problem."""
    with warnings_logged() as logged:
        _assert_rest(checkpoints.restore_checkpoint(saved, {"array": np.zeros(3, int)}))
    assert not any("theirown" in text for text in logged)


def test_a_view_reads_the_data(saved: Path) -> None:
    """So does looking into it."""
    with flax_ckpt_compat.open_checkpoint(saved) as view, warnings_logged():
        restored = view.read()
    _assert_rest(restored)
    assert np.asarray(restored["key"]).tolist() == DATA.tolist()
