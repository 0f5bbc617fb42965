"""Read the JSON files of a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.object_store import client

from .files import storage_errors


def read_json(path: str, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file of the directory ``path``, or None if there is no file.

    Raises:
        CorruptCheckpointError: it does not decode.
        StorageError: the file system refused.
    """
    file = os.path.join(path, name)
    if not paths.isfile(file):
        return None
    with storage_errors(file, "read"):
        text = paths.read(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt(file, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise corrupt(file, f"it holds a {type(value).__name__} where an object was expected")
    return value


def read_ahead(path: str, names: Collection[str]) -> None:
    """Prefetch files of a store for `read_json`; do nothing on a local disk."""
    if paths.is_url(path):
        files = [os.path.join(path, name) for name in names]
        with storage_errors(path, "read"):
            client.prefetch_contents([file for file in files if paths.isfile(file)])


def corrupt(file: str, what: str) -> CorruptCheckpointError:
    """Return the error for a file that does not decode."""
    return CorruptCheckpointError(f"{file}: {what}; restore the file from a copy", path=file)
