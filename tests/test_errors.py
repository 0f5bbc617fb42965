"""Error classes: one root, our message, and pickling; their bases are in ``tests/data/public_signatures.txt``."""

import copy
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import flax.errors
import pytest

from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core import errors as core_errors
from tests.support.saves import refuse

NAMES = sorted({*errors.__all__} - {"CheckpointError"})


# Class → its own attributes; the others have a leaf.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "MissingLeavesError": {"missing": ("a/b", "c")},
    "ProcessTimeoutError": {"absent": (1, 3)},
    "ConversionError": {"conversions": ()},
    **{name: {"errno": 28} for name in ("StorageError", "CleanupError", "ConcurrentWriteError")},
    "PermissionDeniedError": {"errno": 13},
    "MissingPathError": {"errno": 2},
}


def make(name: str) -> Any:
    """One instance with every attribute set."""
    return getattr(errors, name)("the message {with} 100%", path="/p", **ATTRIBUTES.get(name, {"leaf": "a/b"}))


def test_the_list_is_complete() -> None:
    """Every class that has the public module's name is in its list."""
    ours = {name for name, value in vars(core_errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert ours <= set(errors.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_classes(name: str) -> None:
    """Each is what callers of Flax catch, with our message and nothing else; tracebacks name the module to import from.

    Errors cross process borders (multiprocessing, concurrent.futures) with message and attributes. ``cls.__new__(cls)``
    works, which tblib does with unpickled errors: Dask's workers send them that way."""
    error = make(name)
    assert type(error).__module__ == "flax_ckpt_compat.errors"
    assert isinstance(error, errors.CheckpointError)
    assert isinstance(error, getattr(flax.errors, name, errors.CheckpointError))
    assert str(error) == error.args[0] == "the message {with} 100%" and error.path == "/p"
    assert repr(error) == f"{name}('the message {{with}} 100%')"
    assert type(type(error).__new__(type(error))) is type(error)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
        assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_attributes_of_os_errors() -> None:
    """What callers that catch OSError print is there, and the text is the message alone."""
    error, theirs = make("StorageError"), OSError(28, os.strerror(28), "/p")
    for name in ("errno", "strerror", "filename"):
        assert getattr(error, name) == getattr(theirs, name)


def test_a_refused_access_is_a_permission_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in Flax, whose callers catch Python's class."""
    refuse(monkeypatch, "listdir", str(tmp_path))
    with pytest.raises(PermissionError, match="check the permissions") as caught:
        checkpoints.restore_checkpoint(tmp_path, None)
    assert type(caught.value) is errors.PermissionDeniedError and caught.value.errno == errno.EACCES
