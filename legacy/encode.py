"""Encode everything but array data as msgpack bytes."""

from __future__ import annotations

import threading
from typing import Any

import msgpack  # type: ignore[import-untyped]

from . import format

_LOCAL = threading.local()


def scalar(value: Any) -> bytes:
    """Encode a native msgpack value: None, bool, int, float, str or bytes."""
    packed: bytes = _packer().pack(value)
    return packed


def complex_value(value: complex) -> bytes:
    """Encode a Python complex, as Flax 0.9.0 and later do."""
    payload: bytes = _packer().pack([value.real, value.imag])
    return format.ext_header(format.EXT_COMPLEX, len(payload)) + payload


def _packer() -> Any:
    """Return this thread's packer; packers keep a buffer and are not thread-safe."""
    try:
        return _LOCAL.packer
    except AttributeError:
        # strict: Flax's files hold exact types only; validation refuses subclasses.
        _LOCAL.packer = msgpack.Packer(strict_types=True)
        return _LOCAL.packer
