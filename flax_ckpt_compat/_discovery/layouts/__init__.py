"""Layouts of other programs that are read and never written, each in a file of its own.

To add one: a file here with a `ReadOnlyLayout`, a line in `LAYOUTS`, rows in ``tests/data/path_kinds.toml``, and a row
in the table of ``migration_guide/formats.md``. Readers take nothing in the files for granted, and execute none of
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.layouts import clu, easylm, flax_shards, levanter, npz, pax, safetensors
from flax_ckpt_compat._discovery.layouts.layout import JSON_ITEM, ReadOnlyLayout

__all__ = ["JSON_ITEM", "LAYOUTS", "ReadOnlyLayout", "of_file", "of_folder"]
_MODULES = (safetensors, flax_shards, easylm, npz, clu, pax, levanter)
LAYOUTS: Mapping[str, ReadOnlyLayout] = {module.LAYOUT.name: module.LAYOUT for module in _MODULES}


def of_file(path: Location, look: str) -> ReadOnlyLayout | None:
    """Return the layout of a file whose first bytes look like this; None if it is not read."""
    return next((layout for layout in LAYOUTS.values() if layout.is_file(path, look)), None)


def of_folder(path: Location, names: Set[str]) -> tuple[ReadOnlyLayout, Mapping[str, Location]] | None:
    """Return the layout of a folder with these names, and the items in it; None if it is not read."""
    for layout in LAYOUTS.values():
        if found := layout.in_folder(path, names):
            return layout, found
    return None
