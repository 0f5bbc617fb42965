"""Read the file ``_sharding``: the sharding of each jax.Array."""

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
    """Return stored name → JSON text of the sharding.

    Args:
        path: directory of the checkpoint.
        names: stored names of all leaves. The file has them in base64, until 0.4.1 as they are (measured).
    """
    try:
        stored = read_json(path, SHARDING) or {}
    except CorruptCheckpointError as error:
        _log.warning("%s; restoring without saved shardings", error)
        return {}
    decoded: dict[str, Any] = {_decoded(key): text for key, text in stored.items()}
    # A plain name can be valid base64 too, so the file as a whole decides.
    known = decoded if sum(n in names for n in decoded) >= sum(n in names for n in stored) else stored
    return {name: text for name, text in known.items() if isinstance(text, str)}


def _decoded(key: str) -> str:
    try:
        return base64.urlsafe_b64decode(key).decode()
    except ValueError:
        return key
