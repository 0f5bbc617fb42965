"""The only file that knows which backends exist; they are imported on first use."""

from __future__ import annotations

import importlib
from typing import cast

from flax_ckpt_compat._core.backend import Backend, Format

_BACKENDS = {
    Format.MSGPACK: "flax_ckpt_compat.legacy:BACKEND",
    Format.ORBAX: "flax_ckpt_compat.orbax_backend:BACKEND",
}


def backend_for(format: Format) -> Backend:
    """The backend that reads and writes a format."""
    module, _, name = _BACKENDS[format].partition(":")
    return cast(Backend, getattr(importlib.import_module(module), name))
