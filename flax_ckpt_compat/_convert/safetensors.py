"""Write safetensors files, by the library of that name.

Numbers, text, None and empty containers, which the format does not know, are kept as JSON in the header's free text
(``__metadata__``), which other readers pass over.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from flax_ckpt_compat._convert.stored_trees import kind_of
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import NameCollisionError, UnsupportedLeafError
from flax_ckpt_compat._core.local.syncing import write_file
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, map_leaves, show_path
from flax_ckpt_compat._discovery.npz_and_safetensors import DTYPE_NAMES, METADATA, OURS, PATHS

_IN_HEADER = {kind for kind in KIND_OF_TYPE.values() if kind is not LeafKind.COMPLEX}


def as_stored(tree: Node, notes: list[str]) -> Node:
    """Return a tree of leaf handles as the format holds it; add to ``notes`` what to know about it.

    Raise UnsupportedLeafError or NameCollisionError for what it cannot hold."""
    names = {METADATA: "the file's header"}
    refused, in_header = dict[str, str](), list[str]()

    def leaf_of(path: Path, leaf: Any) -> Any:
        kind, shown, name = kind_of(leaf), show_path(path), ".".join(path)
        if kind is LeafKind.NUMPY_SCALAR:  # an array without axes
            kind, leaf = LeafKind.ARRAY, dataclasses.replace(leaf, kind=LeafKind.ARRAY)
        if kind is LeafKind.ARRAY and (leaf.dtype.name not in DTYPE_NAMES or leaf.dtype.byteorder == ">"):
            refused[shown] = str(leaf.dtype)
        elif leaf is None or kind in _IN_HEADER:
            in_header.append(shown)
        elif kind is not LeafKind.ARRAY and not isinstance(leaf, (Branch, str, int, float)):
            refused[shown] = kind.value if kind else type(leaf).__name__
        if (kind is LeafKind.ARRAY or name != METADATA) and names.setdefault(name, shown) != shown:
            raise NameCollisionError(f"{shown} and {names[name]} would both be {name}; rename one", leaf=shown)
        return leaf

    stored = map_leaves(leaf_of, tree)
    if refused:
        raise UnsupportedLeafError(
            f"a safetensors file cannot hold {one_line(f'{leaf} ({what})' for leaf, what in refused.items())}; it has "
            f"arrays of {', '.join(DTYPE_NAMES)}. Leave them out or cast them with target= and transforms=, or "
            "convert to another layout",
            leaf=next(iter(refused)),
        )
    if in_header:
        notes.append(f"numbers, text and None are kept as JSON in the file's header: {one_line(in_header)}")
    return stored


def prepare(tree: Node) -> tuple[dict[str, LeafHandle], dict[str, str]]:
    """Return arrays to write by their names, key paths joined with dots, and the header's free text."""
    arrays, others = dict[str, LeafHandle](), list[Any]()
    paths: dict[str, Path] = {}
    for keys, leaf in iter_leaves(tree):
        if not isinstance(leaf, LeafHandle):
            others.append([keys, {"empty": leaf.container.value} if isinstance(leaf, Branch) else leaf])
            continue
        name = ".".join(keys)
        arrays[name] = leaf
        if tuple(name.split(".")) != keys:
            paths[name] = keys
    # The first one is always there, as it tells that the names are key paths.
    return arrays, {OURS: json.dumps(others)} | ({PATHS: json.dumps(paths)} if paths else {})


def write(path: str, prepared: tuple[dict[str, LeafHandle], dict[str, str]], _: Any) -> None:
    """Write and sync a file of what `prepare` has returned."""
    from safetensors.numpy import save

    arrays, header = prepared
    values = {name: np.asarray(leaf.read(), order="C") for name, leaf in arrays.items()}
    write_file(path, save(values, header))
