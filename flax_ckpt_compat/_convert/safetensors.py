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
from flax_ckpt_compat._core.tree import Branch, Node, StoredArray, iter_leaves, map_leaves, show_path
from flax_ckpt_compat._discovery.layouts.safetensors import DTYPE_NAMES, METADATA, OURS, PATHS

_IN_HEADER = {kind for kind in KIND_OF_TYPE.values() if kind is not LeafKind.COMPLEX}


def prepared(tree: Node) -> Node:
    """Return a tree of leaf handles as the format holds it: numpy's scalars are arrays without axes."""

    def leaf_of(_: Any, leaf: Any) -> Any:
        return dataclasses.replace(leaf, kind=LeafKind.ARRAY) if kind_of(leaf) is LeafKind.NUMPY_SCALAR else leaf

    return map_leaves(leaf_of, tree)


def note_of_others(tree: Node) -> list[str]:
    """Return a note that names what is kept beside the arrays, where other readers do not look."""
    others = [show_path(path) for path, leaf in iter_leaves(tree) if leaf is None or kind_of(leaf) in _IN_HEADER]
    return [f"numbers, text and None are kept as JSON in the file's header: {one_line(others)}"] if others else []


def check(tree: Node) -> None:
    """Raise UnsupportedLeafError or NameCollisionError if the format cannot hold a tree of leaf handles."""
    names: dict[str, str] = {}
    refused = {}
    for path, leaf in iter_leaves(tree):
        shown, name = show_path(path), leaf_name(path)
        kind = kind_of(leaf)
        if names.setdefault(name, shown) != shown:
            raise NameCollisionError(f"{shown} and {names[name]} would both be {name}", leaf=shown)
        if kind is LeafKind.ARRAY and name == METADATA:
            raise NameCollisionError(f"{shown}: a safetensors file has its own {METADATA}; rename it", leaf=shown)
        if kind is LeafKind.ARRAY:
            if leaf.dtype.name not in DTYPE_NAMES or leaf.dtype.byteorder == ">":
                refused[shown] = str(leaf.dtype)
        elif kind is not None and kind not in _IN_HEADER:
            refused[shown] = kind.value
    if refused:
        raise UnsupportedLeafError(
            f"a safetensors file cannot hold {one_line(f'{leaf} ({what})' for leaf, what in refused.items())}; it has "
            f"arrays of {', '.join(DTYPE_NAMES)}. Leave them out or cast them with target= and transforms=, or "
            "convert to another layout",
            leaf=next(iter(refused)),
        )


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
