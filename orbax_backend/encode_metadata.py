"""Encode the JSON files of a checkpoint."""

from __future__ import annotations

import base64
import json
import time
from json.encoder import encode_basestring_ascii as _text  # a text as JSON
from typing import Any

from flax_ckpt_compat._core.jax_shards import Memo
from flax_ckpt_compat._core.orbax_layout import DICT_KEY, JAX_ARRAY, SEQUENCE_KEY

from .encode_leaves import EncodedLeaf
from .save_plan import SavePlan
from .shardings import ShardingEncoder
from .zarr import chunk_shape

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def tree_metadata(plan: SavePlan, *, zarr3: bool) -> str:
    """Return the content of ``_METADATA``."""
    rest = {
        "use_ocdbt": True,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": plan.annotations.to_json(),
    }
    # Memoized texts: with thousands of leaves, JSON took most of a save's time.
    keys, values = Memo(_key), Memo(_value)
    entries = []
    for entry in plan.entries:
        name = str(tuple([name for name, _ in entry.keys]))
        found = ", ".join([keys[key] for key in entry.keys])
        stored = entry.stored
        write_shape = stored.write_shape if stored is not None and stored.value_type == JAX_ARRAY else None
        value = values[entry.marker, None if stored is None else stored.value_type, write_shape]
        entries.append(f'{_text(name)}: {{"key_metadata": [{found}], "value_metadata": {value}}}')
    return f'{{"tree_metadata": {{{", ".join(entries)}}}, {json.dumps(rest)[1:]}'


def _key(key: tuple[str, bool]) -> str:
    name, is_index = key
    return json.dumps({"key": name, "key_type": SEQUENCE_KEY if is_index else DICT_KEY})


def _value(described: tuple[str | None, str | None, tuple[int, ...] | None]) -> str:
    marker, value_type, write_shape = described
    if value_type is None:
        return json.dumps({"value_type": marker, "skip_deserialize": True})
    value: dict[str, Any] = {"value_type": value_type, "skip_deserialize": False}
    return json.dumps(value if write_shape is None else {**value, "write_shape": write_shape})


def shardings(plan: SavePlan) -> str:
    """Return the content of ``_sharding``: URL-safe base64 of the name → JSON text."""
    texts, quoted = ShardingEncoder(), Memo(_text)
    found = {name: text for name, stored in _jax_arrays(plan) if (text := texts.of(stored.sharding)) is not None}
    # Base64 needs no quoting.
    entries = {f'"{base64.urlsafe_b64encode(name.encode()).decode()}"': text for name, text in found.items()}
    return f"{{{', '.join([f'{key}: {quoted[text]}' for key, text in entries.items()])}}}"


def array_metadatas(plan: SavePlan, chunk_bytes: int) -> str:
    """Return the content of ``array_metadatas/process_N``, which has the implementations of PRNG keys.

    ``chunk_bytes`` is the limit of chunks."""
    rests = Memo(_array_metadata)
    entries = []
    for name, stored in _jax_arrays(plan):
        impl = stored.annotation.impl if stored.annotation else None
        rest = rests[stored.shape, stored.write_shape, stored.dtype.itemsize, chunk_bytes, impl]
        entries.append(f'{{"array_metadata": {{"param_name": {_text(name)}, {rest}}}')
    return f'{{"array_metadatas": [{", ".join(entries)}]}}'


def _array_metadata(described: tuple[tuple[int, ...], tuple[int, ...], int, int, str | None]) -> str:
    """Encode an entry without its name and opening brace."""
    shape, write_shape, itemsize, chunk_bytes, impl = described
    rest = {
        "write_shape": write_shape,
        "chunk_shape": chunk_shape(shape, write_shape, itemsize, chunk_bytes),
        "ext_metadata": {"random_key_impl": impl} if impl else None,
    }
    return json.dumps(rest)[1:]


def has_jax_arrays(plan: SavePlan) -> bool:
    """Return whether there are jax arrays, which ``_sharding`` and ``array_metadatas`` list."""
    return JAX_ARRAY in {stored.value_type for _, stored in plan.arrays}


def _jax_arrays(plan: SavePlan) -> list[tuple[str, EncodedLeaf]]:
    return [(entry.name, stored) for entry, stored in plan.arrays if stored.value_type == JAX_ARRAY]


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
