"""Plain Python trees in and out of the Orbax backend."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from flax_ckpt_compat._core.backend import Format, LeafHandle, WriteOptions
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import KeyData, iter_leaves
from flax_ckpt_compat._discovery.formats import backend_for
from tests.support.trees import read_whole, to_branches

BACKEND = backend_for(Format.ORBAX)
load = functools.partial(read_whole, BACKEND)


def save(path: Any, tree: Any, compression: str | None = None) -> str:
    """Writes a plain tree with our writer and returns the path as text."""
    node = to_branches(tree)
    BACKEND.write(str(path), BACKEND.prepare(node), WriteOptions(compression))
    return str(path)


def handles(path: Any) -> dict[str, LeafHandle]:
    """The handles of a checkpoint by key path joined with ``/``."""
    reader = BACKEND.open(location_of(path))
    return {"/".join(at): leaf for at, leaf in iter_leaves(reader.tree) if isinstance(leaf, LeafHandle)}


def database(path: Any, prefix: str = "") -> Any:
    """The array database of a directory, or what it has of an array, as TensorStore opens it."""
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/", "path": prefix}).result()


def find(path: Any, content: bytes) -> tuple[Path, int]:
    """The first file below a directory with this content, and its offset."""
    files = (file for file in sorted(Path(path).rglob("*")) if file.is_file())
    return next((file, data.index(content)) for file in files if content in (data := file.read_bytes()))


def change_metadata(path: Path, **changes: Any) -> None:
    """Changes top-level entries of ``_METADATA``."""
    file = path / "_METADATA"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def on_host(tree: Any) -> Any:
    """The same tree with jax arrays as numpy arrays and typed keys as `KeyData`, as our reader returns them."""
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return type(tree)(on_host(value) for value in tree)
    node = to_branches(tree)
    if isinstance(node, KeyData):
        return KeyData(node.impl, np.asarray(node.data))
    return np.asarray(node) if isinstance(node, jax.Array) else node
