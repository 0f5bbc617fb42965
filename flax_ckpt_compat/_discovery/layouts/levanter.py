"""Read the steps of levanter: a zarr array for each leaf, and ``metadata.json``, the last file of a save.

The arrays lie in folders that spell their key paths, or as keys of one OCDBT database (levanter 2023 to 2025). Leaves
that are None or no arrays are not stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set

from flax_ckpt_compat._core import orbax_layout
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.formats import open_arrays
from flax_ckpt_compat._discovery.layouts.layout import ReadOnlyLayout, is_step
from flax_ckpt_compat._discovery.orbax_trees import names_in

_METADATA, _MAX_BYTES = "metadata.json", 64 * 2**10
_MARKERS = {orbax_layout.TREE_METADATA, orbax_layout.STEP_METADATA, orbax_layout.V1_MARKER}
_OF_ARRAYS = {orbax_layout.MANIFEST, *orbax_layout.ARRAY_METADATA_FILES}
_MAX_DEPTH = 32  # folders on the way to the first array


def _arrays(path: Location, names: Set[str]) -> Mapping[str, Location]:
    if _METADATA not in names or names & _MARKERS or is_step(path.name):
        return {}
    return {"": path} if _is_metadata(path / _METADATA) and _holds_array(path, names) else {}


def _is_metadata(file: Location) -> bool:
    content = file.read(0, _MAX_BYTES) if file.isfile() else b""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("step"), int) and "timestamp" in found


def _holds_array(path: Location, names: Set[str]) -> bool:
    """Return whether there is a database, or the first folder on each level leads to an array."""
    for _ in range(_MAX_DEPTH):
        if names & _OF_ARRAYS:
            return True
        folders = sorted(name for name in names if (path / name).isdir())
        if not folders:
            return False
        path = path / folders[0]
        names = names_in(path)
    return False


LAYOUT = ReadOnlyLayout("levanter", lambda location: open_arrays(location, "/"), in_folder=_arrays, reads_msgpack=False)
