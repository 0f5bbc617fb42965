"""What a save by several processes costs, as formulas; the page on scale says where they come from.

``test_scale.py`` holds them against saves by real processes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

# Of Orbax's format: _METADATA, _sharding, _CHECKPOINT_METADATA, commit_success.txt; the manifest and a node file;
# and flax_ckpt_compat.checksums.
_FILES = 7
# For each process: array_metadatas/process_N, the manifest of its database, its checksums, and data files of 64 MiB.
_FILES_OF_A_PROCESS = 4


def messages(processes: int) -> dict[str, int]:
    """Requests to jax's key-value store during one save, if nobody has to ask twice.

    Whoever waits asks again: process 0 at growing pauses of at most 0.5 s, the others twice a second at most.

    Returns:
        Method of jax's client → number, all processes together.
    """
    others = processes - 1
    return {
        # Each process registers and reports at the second barrier; each gets a result of its own and a common one.
        "key_value_set": others + others + processes + 1,
        "blocking_key_value_get": 2 * others,
        # The registrations, the results, and an earlier failure.
        "key_value_delete": 2 * others + 1,
        "key_value_dir_get": 2,
    }


def messages_of_restore(processes: int) -> dict[str, int]:
    """Requests to jax's key-value store during the first restore of a step; a later one also deletes what each left.

    Each process leaves what it found, and looks at process 0's and, of 256 processes at most, at the others'.

    Returns:
        Method of jax's client → number, all processes together.
    """
    looks = 2 * processes if processes <= 256 else processes + 1
    return {"key_value_set": processes, "key_value_dir_get": looks}


def files(orbax: bool, processes: int, arrays: int, shards: int) -> int:
    """Files of a checkpoint of small arrays that are spread over processes.

    Args:
        orbax: in Orbax's format; else a msgpack file and its folder of arrays.
        processes: that saved it.
        arrays: number of arrays.
        shards: into which each array is cut, without replicas.
    """
    return _FILES + _FILES_OF_A_PROCESS * processes if orbax else 1 + arrays * (1 + shards)


def array_metadatas(processes: int, names: Sequence[str], shard: Sequence[int]) -> int:
    """Bytes in ``array_metadatas``: every process lists all arrays."""
    entry = {"param_name": "", "write_shape": list(shard), "chunk_shape": list(shard), "ext_metadata": None}
    fixed = len(json.dumps({"array_metadata": entry}))
    return processes * (len(json.dumps({"array_metadatas": []})) + _joined(fixed + len(name) for name in names))


def shardings(names: Sequence[str], sharding: Any) -> int:
    """Bytes in ``_sharding``: every array has the ids of all devices of its mesh.

    Args:
        names: of the arrays, as stored.
        sharding: a NamedSharding, of all of them.
    """
    ids = sharding.mesh.devices.tolist()
    text = {
        "sharding_type": "NamedSharding",
        "shape": list(sharding.mesh.devices.shape),
        "axis_names": list(sharding.mesh.axis_names),
        "axis_types": [str(kind) for kind in sharding.mesh.axis_types],
        "partition_spec": list(sharding.spec),
        "device_mesh": {"mesh": _with_ids(ids)},
    }
    value = len(json.dumps(json.dumps(text)))
    keys = (base64.urlsafe_b64encode(name.encode()) for name in names)
    return 2 + _joined(len(key) + 4 + value for key in keys)


def of_devices(devices: int) -> int:
    """Bytes that the devices of a mesh of one axis, whose ids count from 0, take in ``_sharding``, for one array."""
    return len(json.dumps(json.dumps([{"id": number} for number in range(devices)])))


def _with_ids(devices: Any) -> Any:
    return [_with_ids(one) for one in devices] if isinstance(devices, list) else {"id": devices.id}


def _joined(lengths: Any) -> int:
    """Of texts with a comma and a space between them."""
    found = list(lengths)
    return sum(found) + 2 * (len(found) - 1)
