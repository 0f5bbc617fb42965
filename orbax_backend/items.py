"""Items that are no tree: one array, or one PRNG key."""

from __future__ import annotations

import os
from typing import Any

from flax_ckpt_compat._core.errors import CorruptCheckpointError

from .json_files import corrupt, read_json
from .metadata import STEP_METADATA

# What Orbax's handler of single arrays calls its array.
ARRAY = "checkpoint"
_ARRAY_HANDLER = "ArrayCheckpointHandler"
# An item of Orbax's handler of jax keys is two directories: the key data as a single array, and a note.
_KEY_DATA, _KEY_NOTE = "jax_random_key", "jax_random_key_metadata/metadata"
_ARRAY_METADATA = (".zarray", "zarr.json")


def is_single_array(path: str, use_ocdbt: bool) -> bool:
    """Whether a directory whose only leaf is called ``checkpoint`` is one array rather than a tree of one leaf.

    The directory itself or the step above it says so. Where that note has gone: trees of one such leaf have
    been OCDBT by default as long as there have been array items with a ``_METADATA`` (0.11.25), which never are.
    """
    if os.path.basename(path.rstrip("/")) == _KEY_DATA:
        return True
    own = _handlers(path)
    if own is None:
        step, item = os.path.split(path.rstrip("/"))
        items = _handlers(step)
        own = items.get(item) if isinstance(items, dict) else None
    return own.endswith("." + _ARRAY_HANDLER) if isinstance(own, str) else not use_ocdbt


def holds_array_folder(path: str) -> bool:
    """Whether the directory has the folder of one array, as array items without OCDBT do."""
    return any(os.path.isfile(os.path.join(path, ARRAY, name)) for name in _ARRAY_METADATA)


def is_typed_key(path: str) -> bool:
    """Whether the single array in ``path`` is the data of a typed PRNG key.

    Raises:
        CorruptCheckpointError: it is of a key item whose note is missing or damaged.
    """
    item, name = os.path.split(path.rstrip("/"))
    if name != _KEY_DATA:
        return False
    note = read_json(item, _KEY_NOTE)
    typed = note.get("typed") if note is not None else None
    if not isinstance(typed, bool):
        what = "is missing" if note is None else "does not say so"
        raise corrupt(os.path.join(item, _KEY_NOTE), f"it tells typed PRNG keys from raw key data, but {what}")
    return typed


def implementation(width: int) -> tuple[str, bool]:
    """jax's name of the PRNG implementation of key data of this width, and whether it is a guess.

    The note of key items does not name it (orbax-checkpoint 0.5.7 to 0.12.8, measured).

    Raises:
        ValueError: no implementation has such keys.
    """
    if width == 2:
        return "threefry2x32", False
    if width == 4:
        return "rbg", True
    raise ValueError(f"key data of width {width} is of no PRNG implementation that is known")


def _handlers(path: str) -> Any:
    try:
        return (read_json(path, STEP_METADATA) or {}).get("item_handlers")
    except CorruptCheckpointError:
        return None
