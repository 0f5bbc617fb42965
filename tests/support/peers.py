"""The newest parts of real Flax and real Orbax; a test that uses what the installed release lacks is skipped."""

import importlib
import importlib.metadata
import inspect
from typing import Any

import orbax.checkpoint as ocp
import pytest
from flax import core, serialization


class _Missing:
    """Stands for a module; any use of it skips the test that uses it."""

    def __init__(self, why: str):
        self._why = why

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest looks for these in all that a module has
            raise AttributeError(name)
        pytest.skip(self._why)


def version(distribution: str) -> tuple[int, ...]:
    """The installed release of a package, as numbers."""
    return tuple(int(part) for part in importlib.metadata.version(distribution).split(".")[:3])


def pytree_handler(**options: Any) -> Any:
    """Orbax's handler of trees; the test is skipped if this release has not all of the options."""
    lacking = options.keys() - inspect.signature(ocp.PyTreeCheckpointHandler).parameters.keys()
    if lacking:
        release = importlib.metadata.version("orbax-checkpoint")
        pytest.skip(f"orbax-checkpoint {release} has no option {', '.join(lacking)} of its handler")
    return ocp.PyTreeCheckpointHandler(**options)


def _module(name: str, distribution: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return _Missing(f"{distribution} {importlib.metadata.version(distribution)} has no {name}")


def _takes_int_keys() -> bool:
    try:
        return serialization.to_state_dict(core.freeze({1: 2})) == {"1": 2}
    except AssertionError:
        return False


def needs(distribution: str, *least: int, why: str) -> pytest.MarkDecorator:
    """Skips a test under releases of a package before this one."""
    text = ".".join(map(str, least))
    return pytest.mark.skipif(version(distribution) < least, reason=f"{distribution} before {text} {why}")


needs_arrays_without_shards = needs("jax", 0, 7, why="makes no array of which a process holds no shard")


def skip_without_typed_keys() -> None:
    """Skips a test that has real Orbax save or restore typed PRNG keys."""
    if not ORBAX_HAS_TYPED_KEYS:
        pytest.skip("this orbax-checkpoint has no typed PRNG keys")


FROZEN_DICT_TAKES_INT_KEYS = _takes_int_keys()
ORBAX_HAS_TYPED_KEYS = version("orbax-checkpoint") >= (0, 11, 16)
ocp_v1 = _module("orbax.checkpoint.experimental.v1", "orbax-checkpoint")
_UNFINISHED = _Missing("the v1 of this orbax-checkpoint is not finished")
if not isinstance(ocp_v1, _Missing) and not hasattr(ocp_v1, "load"):
    ocp_v1 = _UNFINISHED
# Where it is not an experiment any more.
ocp_released_v1: Any = getattr(ocp, "v1", _Missing("this orbax-checkpoint has v1 as an experiment only"))
if not isinstance(ocp_released_v1, _Missing) and not hasattr(ocp_released_v1, "load"):
    ocp_released_v1 = _UNFINISHED
nnx = _module("flax.nnx", "flax")
