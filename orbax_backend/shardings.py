"""Encode shardings of jax.Arrays as Orbax's JSON text, and read the file ``_sharding`` that holds them."""

from __future__ import annotations

import base64
import functools
import json
import logging
import sys
from collections.abc import Collection
from typing import Any

import numpy as np

from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import SHARDING

from .files import Check, read_json

_log = logging.getLogger("flax_ckpt_compat")


def sharding_text(sharding: Any) -> str | None:
    """Return the text of a sharding, None if Orbax's format cannot express it."""
    if isinstance(sharding, str):  # a saved sharding, which stays as it is
        return sharding
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    if isinstance(sharding, jax.sharding.NamedSharding):
        try:
            return json.dumps(_named(sharding))
        except TypeError:  # an unconstrained dimension has no form in JSON
            return None
    devices = jax.local_devices()[:1] if sharding is None else list(sharding.device_set)  # None: jax's first device
    if len(devices) != 1:
        return None
    return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(devices[0])})


def _named(sharding: Any) -> dict[str, Any]:
    mesh = sharding.mesh
    return {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.shape.values()),
        "axis_names": list(mesh.axis_names),
        "axis_types": [str(kind) for kind in mesh.axis_types],
        "partition_spec": list(sharding.spec),
        "device_mesh": {"mesh": np.vectorize(lambda device: {"id": device.id}, [object])(mesh.devices).tolist()},
    }


def shard_shape(shape: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    """Return the shape of one shard, or of the whole array if the shards are not a regular grid."""
    if sharding is None or isinstance(sharding, str) or sharding.is_fully_replicated or 0 in shape:
        return shape
    try:
        part = tuple(sharding.shard_shape(shape))
    except ValueError:
        return shape
    return shape if any(length % piece for length, piece in zip(shape, part, strict=True)) else part


def replicated_sharding() -> Any:
    """Return the sharding that replicates an array over all devices."""
    return _replicated_sharding(tuple(sys.modules["jax"].devices()))


@functools.lru_cache(maxsize=1)
def _replicated_sharding(devices: tuple[Any, ...]) -> Any:
    jax = sys.modules["jax"]
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def spans_processes(sharding: Any) -> bool:
    """Return whether an array must be written by several processes, because process 0 has only a part of it."""
    if sharding is None or isinstance(sharding, str) or sharding.is_fully_addressable:
        return False
    return not (sharding.is_fully_replicated and any(device.process_index == 0 for device in sharding.device_set))


def read_shardings(location: Location, names: Collection[str], check: Check | None = None) -> dict[str, str]:
    """Return stored name → JSON text of the sharding; the file has base64 of names, until 0.4.1 names (measured)."""
    try:
        stored = read_json(location, SHARDING, check) or {}
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
