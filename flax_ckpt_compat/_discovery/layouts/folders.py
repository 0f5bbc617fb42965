"""Read the folders of CLU, Pax and levanter, and the streams of EasyLM, with the readers of the two formats.

CLU: ``ckpt-7.flax``, a msgpack file of Flax, beside TensorFlow's state of the input pipeline; TensorFlow's text file
``checkpoint`` names the latest step. Each ``.flax`` file also restores by its own path.

EasyLM: ``streaming_params_80000`` and the like, msgpack objects one after the other, each a key path and a leaf.

Pax: ``checkpoint_00001000``, with the JSON item ``metadata`` and the arrays of ``state``. Without OCDBT, ``state`` has
a zarr folder for each array, named by its key path joined with dots, and no file that has the tree: Pax takes it from
its program. So a part of a name that has a dot itself becomes two.

levanter: a zarr array for each leaf, and ``metadata.json``, the last file of a save. The arrays lie in folders that
spell their key paths, or as keys of one OCDBT database (levanter 2023 to 2025). Leaves that are None or no arrays are
not stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set

from flax_ckpt_compat._core import orbax_layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import foreign
from flax_ckpt_compat._discovery.formats import backend_for, open_arrays, open_stream
from flax_ckpt_compat._discovery.layouts.layout import JSON_ITEM, ReadOnlyLayout, is_step
from flax_ckpt_compat._discovery.orbax_items import json_file
from flax_ckpt_compat._discovery.orbax_trees import MARKERS, is_folder_of_arrays, names_in

_LOOK_UP_FILE, _SUFFIX = "checkpoint", ".flax"  # of CLU
_LATEST = re.compile(rb'\s*model_checkpoint_path:\s*"(?:[^"\\\n]*/)?([^"\\\n/]+)"')
_STATE, _OF_STATE = "state", "mdl_vars."  # of Pax: the model's variables are in every state
_METADATA = "metadata.json"  # of levanter
_FIRST_BYTES, _MAX_METADATA = 4096, 64 * 2**10
_MARKERS_OF_ORBAX = {*MARKERS} - {orbax_layout.MANIFEST}
_OF_ARRAYS = {orbax_layout.MANIFEST, *orbax_layout.ARRAY_METADATA_FILES}
_MAX_DEPTH = 32  # folders on the way to the first array


def _clu(path: Location, names: Set[str]) -> Mapping[str, Location]:
    """Return the file of the latest step; none if the folder is something else, or that file is not there."""
    if is_step(path.name) or _LOOK_UP_FILE not in names or not any(name.endswith(_SUFFIX) for name in names):
        return {}
    file = path / _LOOK_UP_FILE
    found = _LATEST.match(file.read(0, _FIRST_BYTES)) if file.isfile() else None
    name = found[1].decode(errors="replace") + _SUFFIX if found else ""
    return {"": path / name} if name in names else {}


def _pax(path: Location, names: Set[str]) -> Mapping[str, Location]:
    if path.name == _STATE and any(name.startswith(_OF_STATE) for name in names):
        return {"": path} if _pax(path.parent, names_in(path.parent)) else {}
    if not names >= {_STATE, JSON_ITEM}:
        return {}
    state, inside = path / _STATE, names_in(path / _STATE)
    # With OCDBT it is Orbax's, as is a state that is one msgpack file.
    is_of_orbax = inside.intersection((*MARKERS, orbax_layout.MSGPACK_FILE))
    if is_of_orbax or not any(name.startswith(_OF_STATE) for name in inside):
        return {}
    metadata = json_file(path / JSON_ITEM, names_in(path / JSON_ITEM))
    if metadata is None or not is_folder_of_arrays(state, inside):
        return {}
    return {JSON_ITEM: metadata, _STATE: state}


def _levanter(path: Location, names: Set[str]) -> Mapping[str, Location]:
    if _METADATA not in names or names & _MARKERS_OF_ORBAX or is_step(path.name):
        return {}
    return {"": path} if _is_metadata(path / _METADATA) and _leads_to_array(path, names) else {}


def _is_metadata(file: Location) -> bool:
    try:
        found = json.loads(file.read(0, _MAX_METADATA) if file.isfile() else b"")
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("step"), int) and "timestamp" in found


def _leads_to_array(path: Location, names: Set[str]) -> bool:
    """Return whether there is a database, or the first folder on each level leads to an array."""
    for _ in range(_MAX_DEPTH):
        folders = sorted(name for name in names if (path / name).isdir())
        if names & _OF_ARRAYS or not folders:
            break
        path = path / folders[0]
        names = names_in(path)
    return bool(names & _OF_ARRAYS)


CLU = ReadOnlyLayout("clu", lambda location: backend_for(Format.MSGPACK).open(location), in_folder=_clu)
EASYLM = ReadOnlyLayout("stream", open_stream, lambda path, look: look == foreign.STREAM and not is_step(path.name))
LEVANTER = ReadOnlyLayout(
    "levanter", lambda location: open_arrays(location, "/"), in_folder=_levanter, reads_msgpack=False
)
PAX = ReadOnlyLayout(
    "pax", lambda location: open_arrays(location, "."), in_folder=_pax, is_step=True, reads_msgpack=False
)
