"""Layouts of other programs that are read and never written.

To add one: a `ReadOnlyLayout` in a file here, its name among those below, rows in ``tests/data/path_kinds.toml``, and a
row in the table of ``migration_guide/formats.md``. Readers take nothing in the files for granted, and execute none of
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.layouts import flax_shards, folders, npz, safetensors
from flax_ckpt_compat._discovery.layouts.layout import JSON_ITEM, ReadOnlyLayout

__all__ = ["JSON_ITEM", "LAYOUTS", "ReadOnlyLayout", "of_file", "of_folder"]
_OF_FILES = (safetensors.LAYOUT, flax_shards.LAYOUT, folders.EASYLM, npz.LAYOUT)
_OF_FOLDERS = (folders.CLU, folders.PAX, folders.LEVANTER)
LAYOUTS: Mapping[str, ReadOnlyLayout] = {layout.name: layout for layout in (*_OF_FILES, *_OF_FOLDERS)}


def of_file(path: Location, look: str) -> ReadOnlyLayout | None:
    """Return the layout of a file whose first bytes look like this; None if it is not read."""
    return next((layout for layout in _OF_FILES if layout.is_file(path, look)), None)


def of_folder(path: Location, names: Set[str]) -> tuple[ReadOnlyLayout, Mapping[str, Location]] | None:
    """Return the layout of a folder with these names, and the items in it; None if it is not read."""
    for layout in _OF_FOLDERS:
        if found := layout.in_folder(path, names):
            return layout, found
    return None
