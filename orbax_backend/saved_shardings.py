"""The file ``_sharding``: how each jax.Array was spread over devices."""

from __future__ import annotations

import base64
import logging
from collections.abc import Collection
from typing import Any

from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.orbax_layout import SHARDING

from .json_files import read_json

_log = logging.getLogger("flax_ckpt_compat")


def read_shardings(path: str, names: Collection[str]) -> dict[str, str]:
    """The JSON text of each array's sharding, by its stored name.

    Args:
        path: of the checkpoint's directory.
        names: of all leaves. Keys are these names in base64, or, till 0.4.1, the names themselves (measured).
    """
    try:
        stored = read_json(path, SHARDING) or {}
    except CorruptCheckpointError as error:
        _log.warning("%s; restoring without saved shardings", error)
        return {}
    decoded: dict[str, Any] = {_decoded(key): text for key, text in stored.items()}
    # A name can be valid base64 of another text, so the file as a whole decides.
    known = decoded if sum(n in names for n in decoded) >= sum(n in names for n in stored) else stored
    return {name: text for name, text in known.items() if isinstance(text, str)}


def _decoded(key: str) -> str:
    try:
        return base64.urlsafe_b64decode(key).decode()
    except ValueError:
        return key
