"""Write safetensors files, by the library of that name.

Numbers, text, None and empty containers, which the format does not know, are kept as JSON in the header's free text
(``__metadata__``), which other readers pass over.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from flax_ckpt_compat._convert.stored_trees import kind_of
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, LeafKind
from flax_ckpt_compat._core.errors import NameCollisionError, SettingError, UnsupportedLeafError
from flax_ckpt_compat._core.local.temporaries import create_file
from flax_ckpt_compat._core.orbax_layout import leaf_name
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, StoredArray, iter_leaves, map_leaves, show_path
from flax_ckpt_compat._discovery.layouts.safetensors import DTYPE_NAMES, METADATA, OURS, PATHS

_IN_HEADER = {kind for kind in KIND_OF_TYPE.values() if kind is not LeafKind.COMPLEX}


def as_stored(tree: Node) -> tuple[Node, list[str]]:
    """Return a tree of leaf handles as the format holds it, and what to know about it.

    Raise UnsupportedLeafError or NameCollisionError for what it cannot hold."""
    names: dict[str, str] = {METADATA: ""}
    refused, in_header = dict[str, str](), list[str]()

    def leaf_of(path: Path, leaf: Any) -> Any:
        kind, shown, name = kind_of(leaf), show_path(path), leaf_name(path)
        if kind is LeafKind.NUMPY_SCALAR:  # an array without axes
            kind, leaf = LeafKind.ARRAY, dataclasses.replace(leaf, kind=LeafKind.ARRAY)
        if kind is LeafKind.ARRAY and (leaf.dtype.name not in DTYPE_NAMES or leaf.dtype.byteorder == ">"):
            refused[shown] = str(leaf.dtype)
        elif leaf is None or kind in _IN_HEADER:
            in_header.append(shown)
        elif kind not in (None, LeafKind.ARRAY):
            refused[shown] = kind.value
        if (kind is LeafKind.ARRAY or name != METADATA) and names.setdefault(name, shown) != shown:
            other = f"{names[name]} would both be {name}" if names[name] else f"the header would both be {METADATA}"
            raise NameCollisionError(f"{shown} and {other}; rename one", leaf=shown)
        return leaf

    stored = map_leaves(leaf_of, tree)
    if refused:
        raise UnsupportedLeafError(
            f"a safetensors file cannot hold {one_line(f'{leaf} ({what})' for leaf, what in refused.items())}; it has "
            f"arrays of {', '.join(DTYPE_NAMES)}. Leave them out or cast them with target= and transforms=, or "
            "convert to another layout",
            leaf=next(iter(refused)),
        )
    note = f"numbers, text and None are kept as JSON in the file's header: {one_line(in_header)}"
    return stored, [note] if in_header else []


def require_library() -> None:
    """Raise SettingError unless the library that writes the format is there."""
    try:
        import safetensors.numpy  # noqa: F401
    except ImportError:
        raise SettingError(
            "safetensors files are written by safetensors: python -m pip install 'flax-ckpt-compat[safetensors]'"
        ) from None


def write(path: str, tree: Node) -> None:
    """Write and sync a file of arrays to write and other values; names are key paths joined with dots."""
    from safetensors.numpy import save

    arrays, others = dict[str, Any](), list[Any]()
    paths: dict[str, list[str]] = {}
    for keys, leaf in iter_leaves(tree):
        if not isinstance(leaf, StoredArray):
            others.append([list(keys), {"empty": leaf.container.value} if isinstance(leaf, Branch) else leaf])
            continue
        name = leaf_name(keys)
        arrays[name] = np.asarray(leaf, order="C")
        if tuple(name.split(".")) != keys:
            paths[name] = list(keys)
    # The first one is always there, as it tells that the names are key paths.
    kept = {OURS: json.dumps(others)} | ({PATHS: json.dumps(paths)} if paths else {})
    with translated(path, "written"), open(create_file(path), "wb") as file:
        file.write(save(arrays, kept))
        file.flush()
        os.fsync(file.fileno())
