"""The JSON files of a checkpoint, as they are written."""

from __future__ import annotations

import base64
import time
from typing import Any

from .leaves import JAX_ARRAY, STRING, Stored
from .plan import Entry, Plan
from .sharding import ShardingTexts
from .zarr import chunk_shape

METADATA, SHARDING, STRINGS = "_METADATA", "_sharding", "_strings.json"
STEP_METADATA, COMMITTED, ARRAY_METADATAS = "_CHECKPOINT_METADATA", "commit_success.txt", "array_metadatas"
SEQUENCE_KEY, DICT_KEY = 1, 2
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def tree_metadata(plan: Plan, use_ocdbt: bool = True) -> dict[str, Any]:
    """The content of ``_METADATA``."""
    return {
        "tree_metadata": {str(tuple(name for name, _ in e.keys)): _tree_entry(e) for e in plan.entries},
        "use_ocdbt": use_ocdbt,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": plan.marks.to_json(),
    }


def _tree_entry(entry: Entry) -> dict[str, Any]:
    keys = [{"key": name, "key_type": SEQUENCE_KEY if is_index else DICT_KEY} for name, is_index in entry.keys]
    stored = entry.stored
    if stored is None:
        return {"key_metadata": keys, "value_metadata": {"value_type": entry.marker, "skip_deserialize": True}}
    value: dict[str, Any] = {"value_type": stored.value_type, "skip_deserialize": False}
    if stored.value_type == JAX_ARRAY:
        value["write_shape"] = stored.part
    return {"key_metadata": keys, "value_metadata": value}


def shardings(plan: Plan) -> dict[str, str]:
    """The content of ``_sharding``: URL-safe base64 of the name → JSON text."""
    texts = ShardingTexts()
    found = ((name, texts.of(stored.sharding)) for name, stored in _jax_arrays(plan))
    return {base64.urlsafe_b64encode(name.encode()).decode(): text for name, text in found if text is not None}


def array_metadatas(plan: Plan, compressed: bool) -> dict[str, Any]:
    """The content of ``array_metadatas/process_N``, which is where Orbax keeps the types of PRNG keys."""
    return {"array_metadatas": [_array_metadata(name, stored, compressed) for name, stored in _jax_arrays(plan)]}


def _array_metadata(name: str, stored: Stored, compressed: bool) -> dict[str, Any]:
    impl = stored.mark.impl if stored.mark else None
    return {
        "array_metadata": {
            "param_name": name,
            "write_shape": stored.part,
            "chunk_shape": chunk_shape(stored.shape, stored.part, stored.dtype.itemsize, compressed),
            "ext_metadata": {"random_key_impl": impl} if impl else None,
        }
    }


def has_jax_arrays(plan: Plan) -> bool:
    """Whether there is anything for ``_sharding`` and ``array_metadatas``."""
    return bool(_jax_arrays(plan))


def _jax_arrays(plan: Plan) -> list[tuple[str, Stored]]:
    leaves = ((e.name, e.stored) for e in plan.entries)
    return [(name, stored) for name, stored in leaves if stored is not None and stored.value_type == JAX_ARRAY]


def step_metadata(started_ns: int) -> dict[str, Any]:
    """The content of ``_CHECKPOINT_METADATA``.

    Args:
        started_ns: when the save began, nanoseconds since 1970.
    """
    return {
        "item_handlers": _HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }


def arrays(plan: Plan) -> list[tuple[str, Stored]]:
    """Name and content of every leaf that lives in the array database."""
    leaves = ((e.name, e.stored) for e in plan.entries)
    return [(name, stored) for name, stored in leaves if stored is not None and stored.value_type != STRING]
