"""Map formats to backends, imported on first use; no other module names a backend."""

from __future__ import annotations

import functools
import importlib
from typing import cast

from flax_ckpt_compat._core.backend import Backend, Format, Reader
from flax_ckpt_compat._core.load_tensorstore import load_tensorstore

_LEGACY, _ORBAX = "flax_ckpt_compat.legacy", "flax_ckpt_compat.orbax_backend"


@functools.cache
def backend_for(format: Format) -> Backend:
    """Return the backend that reads and writes a format."""
    if format is Format.MSGPACK:
        return cast(Backend, importlib.import_module(_LEGACY).BACKEND)
    load_tensorstore()
    # Directories of Orbax before 0.5.16 hold a msgpack file.
    return cast(Backend, importlib.import_module(_ORBAX).OrbaxBackend(_open_msgpack))


def _open_msgpack(path: str) -> Reader:
    return cast(Reader, importlib.import_module(_LEGACY).open_part_of_orbax(path))
