"""Read the steps of Pax: ``checkpoint_00001000``, with the JSON item ``metadata`` and the arrays of ``state``.

Without OCDBT, ``state`` has a zarr folder for each array, named by its key path joined with dots, and no file that has
the tree: Pax takes it from its program. So a part of a name that has a dot itself becomes two.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from flax_ckpt_compat._core import orbax_layout
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.formats import open_arrays
from flax_ckpt_compat._discovery.layouts.layout import JSON_ITEM, ReadOnlyLayout
from flax_ckpt_compat._discovery.orbax_items import json_file
from flax_ckpt_compat._discovery.orbax_trees import MARKERS, is_folder_of_arrays, names_in

_STATE, _METADATA = "state", JSON_ITEM
_OF_STATE = "mdl_vars."  # the model's variables, in every state of Pax


def _items(path: Location, names: Set[str]) -> Mapping[str, Location]:
    if path.name == _STATE and any(name.startswith(_OF_STATE) for name in names):
        return {"": path} if _items(path.parent, names_in(path.parent)) else {}
    if not names >= {_STATE, _METADATA}:
        return {}
    state = path / _STATE
    inside = names_in(state)
    if inside.intersection((*MARKERS, orbax_layout.MSGPACK_FILE)) or not any(
        name.startswith(_OF_STATE) for name in inside
    ):
        return {}  # with OCDBT it is Orbax's, as is a state that is one msgpack file
    metadata = json_file(path / _METADATA, names_in(path / _METADATA))
    if metadata is None or not is_folder_of_arrays(state, inside):
        return {}
    return {_METADATA: metadata, _STATE: state}


LAYOUT = ReadOnlyLayout(
    "pax", lambda location: open_arrays(location, "."), in_folder=_items, is_step=True, reads_msgpack=False
)
