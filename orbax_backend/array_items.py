"""Recognize items that are not trees: one array, or one PRNG key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import Location

from .files import corrupt, read_json

_ARRAY_HANDLER = "ArrayCheckpointHandler"


def is_single_array(location: Location, metadata: Mapping[str, Any], use_ocdbt: bool) -> bool:
    """Return whether a directory with the single leaf ``checkpoint`` is one array rather than a tree.

    Since 0.11.6 the step metadata of the directory or of its parent names the handler. Array items have a
    ``_METADATA`` only since 0.11.25, so an older directory with one is a tree: its step metadata has no handlers, or
    its ``_METADATA`` lacks what 0.10.0 added. If the step metadata of a later one is lost: trees of such a leaf are
    OCDBT by default, array items never are.
    """
    if location.name == layout.JAX_KEY:
        return True
    own = _handlers(location)
    if own is None:
        items = _handlers(location.parent)
        own = items.get(location.name) if isinstance(items, dict) else items
    if isinstance(own, str):
        return own.endswith("." + _ARRAY_HANDLER)
    return not use_ocdbt and "store_array_data_equal_to_fill_value" in metadata


def holds_array_folder(location: Location) -> bool:
    """Return whether a directory has a subdirectory with one array, as array items without OCDBT do."""
    return any((location / layout.SINGLE_ARRAY / name).isfile() for name in layout.ARRAY_METADATA_FILES)


def is_typed_key(location: Location) -> bool:
    """Return whether the array of a directory is the data of a typed PRNG key; raise if its metadata is damaged."""
    item = location.parent
    if location.name != layout.JAX_KEY:
        return False
    metadata = read_json(item, layout.JAX_KEY_METADATA)
    typed = metadata.get("typed") if metadata is not None else None
    if not isinstance(typed, bool):
        what = "is missing" if metadata is None else "does not"
        raise corrupt(item / layout.JAX_KEY_METADATA, f"it should say whether the PRNG key is typed, but {what}")
    return typed


def implementation(width: int) -> tuple[str, bool]:
    """Return jax's PRNG implementation for key data of a width, and whether it is a guess.

    The metadata of key items does not name it (orbax-checkpoint 0.5.7 to 0.12.8, measured).
    """
    if width == 2:
        return "threefry2x32", False
    if width == 4:
        return "rbg", True
    raise ValueError(f"expected PRNG key data of width 2 or 4, found {width}")


def _handlers(location: Location) -> Any:
    """Return the handlers in a directory's step metadata: '' if it predates them, None without the file."""
    try:
        metadata = read_json(location, layout.STEP_METADATA)
    except CorruptCheckpointError:
        return None
    return metadata.get("item_handlers", "") if metadata is not None else None
