"""Items that are no tree: one array, or one PRNG key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.orbax_layout import (
    ARRAY_METADATA_FILES,
    JAX_KEY,
    JAX_KEY_METADATA,
    SINGLE_ARRAY,
    STEP_METADATA,
)

from .json_files import corrupt, read_json

_ARRAY_HANDLER = "ArrayCheckpointHandler"


def is_single_array(path: str, metadata: Mapping[str, Any], use_ocdbt: bool) -> bool:
    """Whether a directory whose only leaf is called ``checkpoint`` is one array rather than a tree of one leaf.

    The directory itself or the step above it says so, since 0.11.6. Array items have a ``_METADATA`` only since
    0.11.25, so what has one and is older is a tree: where there is a note without handlers, or none of what
    0.10.0 added to ``_METADATA``. Where the note has gone from a later one: trees of such a leaf have been
    OCDBT by default, which array items never are.
    """
    if os.path.basename(path.rstrip("/")) == JAX_KEY:
        return True
    step, item = os.path.split(path.rstrip("/"))
    own = _handlers(path)
    if own is None:
        items = _handlers(step)
        own = items.get(item) if isinstance(items, dict) else items
    if isinstance(own, str):
        return own.endswith("." + _ARRAY_HANDLER)
    return not use_ocdbt and "store_array_data_equal_to_fill_value" in metadata


def holds_array_folder(path: str) -> bool:
    """Whether the directory has the folder of one array, as array items without OCDBT do."""
    return any(paths.isfile(os.path.join(path, SINGLE_ARRAY, name)) for name in ARRAY_METADATA_FILES)


def is_typed_key(path: str) -> bool:
    """Whether the single array in ``path`` is the data of a typed PRNG key.

    Raises:
        CorruptCheckpointError: it is of a key item whose note is missing or damaged.
    """
    item, name = os.path.split(path.rstrip("/"))
    if name != JAX_KEY:
        return False
    note = read_json(item, JAX_KEY_METADATA)
    typed = note.get("typed") if note is not None else None
    if not isinstance(typed, bool):
        what = "is missing" if note is None else "does not say so"
        raise corrupt(os.path.join(item, JAX_KEY_METADATA), f"it tells typed PRNG keys from raw key data, but {what}")
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
    """The handlers that the note in this directory names, '' if it is older than such names, None without a note."""
    try:
        note = read_json(path, STEP_METADATA)
    except CorruptCheckpointError:
        return None
    return note.get("item_handlers", "") if note is not None else None
