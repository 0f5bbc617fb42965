"""Map formats to backends, imported on first use; no other module names a backend."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, cast

from flax_ckpt_compat._core.backend import Backend, Format, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.thread_pools import run_apart

_LEGACY, _ORBAX = "flax_ckpt_compat.legacy", "flax_ckpt_compat.orbax_backend"


@functools.cache
def backend_for(format: Format) -> Backend:
    """Return the backend that reads and writes a format."""
    if format is Format.MSGPACK:
        return cast(Backend, _imported(_LEGACY).BACKEND)
    # Directories of Orbax before 0.5.16 hold a msgpack file.
    return cast(Backend, _imported(_ORBAX).OrbaxBackend(lambda file: _imported(_LEGACY).open_part_of_orbax(file)))


def open_stream(location: Location) -> Reader:
    """Open msgpack objects one after the other, each a key path and the bytes of a leaf, as EasyLM writes them."""
    return cast(Reader, _imported(_LEGACY).open_stream(location))


def _imported(name: str) -> Any:
    """Import a module on another thread: a signal handler that saves while it is imported here gets half of it."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return run_apart(functools.partial(importlib.import_module, name))
    return module
