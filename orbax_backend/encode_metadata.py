"""Encode the JSON files of a checkpoint."""

from __future__ import annotations

import base64
import time
from typing import Any

from flax_ckpt_compat._core.jax_shards import Memo
from flax_ckpt_compat._core.orbax_layout import DICT_KEY, JAX_ARRAY, SEQUENCE_KEY

from .save_plan import SavePlan
from .shardings import ShardingEncoder
from .zarr import chunk_shape

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def tree_metadata(plan: SavePlan, *, zarr3: bool) -> dict[str, Any]:
    """Return the content of ``_METADATA``."""
    tree: dict[str, Any] = {}
    for entry in plan.entries:
        stored = entry.stored
        value: dict[str, Any] = {
            "value_type": entry.marker if stored is None else stored.value_type,
            "skip_deserialize": stored is None,
        }
        if stored is not None and stored.value_type == JAX_ARRAY:
            value["write_shape"] = stored.write_shape
        keys = [{"key": name, "key_type": SEQUENCE_KEY if is_index else DICT_KEY} for name, is_index in entry.keys]
        tree[str(tuple([name for name, _ in entry.keys]))] = {"key_metadata": keys, "value_metadata": value}
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": plan.annotations.to_json(),
    }


def shardings(plan: SavePlan) -> dict[str, str]:
    """Return the content of ``_sharding``: URL-safe base64 of the name → JSON text."""
    encoder = ShardingEncoder()
    texts = [(name, encoder.of(stored.sharding)) for name, stored in plan.jax_arrays]
    return {base64.urlsafe_b64encode(name.encode()).decode(): text for name, text in texts if text is not None}


def array_metadatas(plan: SavePlan, chunk_bytes: int) -> dict[str, Any]:
    """Return the content of ``array_metadatas/process_N``; ``chunk_bytes`` is the limit of chunks."""
    chunks, arrays = Memo(lambda key: chunk_shape(key[0], key[1], key[2], chunk_bytes)), []
    for name, stored in plan.jax_arrays:
        impl = stored.annotation.impl if stored.annotation else None
        array = {
            "param_name": name,
            "write_shape": stored.write_shape,
            "chunk_shape": chunks[stored.shape, stored.write_shape, stored.dtype.itemsize],
            "ext_metadata": {"random_key_impl": impl} if impl else None,
        }
        arrays.append({"array_metadata": array})
    return {"array_metadatas": arrays}


def step_metadata(started_ns: int) -> dict[str, Any]:
    """Return the content of ``_CHECKPOINT_METADATA`` of a save that started then, in ns since 1970."""
    return {
        "item_handlers": _HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
