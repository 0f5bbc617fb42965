"""Write and read the safetensors format: the length of a JSON header, the header, the bytes of the tensors.

Numbers, text, None and empty containers, which it does not know, are kept as JSON in the header's free text
(``__metadata__``), which other readers pass over.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from flax_ckpt_compat._convert.stored_trees import in_memory
from flax_ckpt_compat._core import array_boxes, memory
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.errors import NameCollisionError, UnsupportedLeafError
from flax_ckpt_compat._core.fold_names import one_line
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.orbax_layout import leaf_name
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.tree import Branch, Node, StoredArray, iter_leaves, map_leaves, show_path

# Those of safetensors 0.8, by numpy's names.
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_OTHERS, _METADATA = "flax_ckpt_compat", "__metadata__"
_ALIGNMENT = 8


def prepared(tree: Node) -> Node:
    """Return a tree as the format holds it: numpy's scalars are arrays without axes."""
    return map_leaves(lambda _, leaf: in_memory(np.asarray(leaf)) if isinstance(leaf, np.generic) else leaf, tree)


def note_of_others(tree: Node) -> list[str]:
    """Return a note that names what is kept beside the arrays, where other readers do not look."""
    others = [path for path, leaf in iter_leaves(tree) if not isinstance(leaf, StoredArray | Branch)]
    if not others:
        return []
    return [f"numbers, text and None are kept as JSON in the file's header: {one_line(map(show_path, others))}"]


def check(tree: Node) -> None:
    """Raise UnsupportedLeafError or NameCollisionError if the format cannot hold a tree."""
    names: dict[str, str] = {}
    refused = []
    for path, leaf in iter_leaves(tree):
        shown = show_path(path)
        if names.setdefault(leaf_name(path), shown) != shown:
            raise NameCollisionError(
                f"{shown} and {names[leaf_name(path)]} would both be {leaf_name(path)}", leaf=shown
            )
        if isinstance(leaf, StoredArray):
            if leaf.dtype.name not in _NAMES or leaf.dtype.byteorder == ">":
                refused.append(f"{shown} ({leaf.dtype})")
            elif leaf_name(path) == _METADATA:
                raise NameCollisionError(f"{shown}: a safetensors file has its own {_METADATA}; rename it", leaf=shown)
        elif not isinstance(leaf, Branch) and leaf is not None and type(leaf) not in (bool, int, float, str):
            refused.append(f"{shown} ({type(leaf).__name__})")
    if refused:
        raise UnsupportedLeafError(
            f"a safetensors file cannot hold {one_line(refused)}; it has arrays of {', '.join(_NAMES)}. Leave them out "
            "or cast them with target= and transforms=, or convert to another layout",
            leaf=refused[0].rpartition(" (")[0],
        )


def write(path: str, tree: Node) -> None:
    """Write and sync a file of a tree that `check` accepts; names are key paths joined with dots."""
    arrays = [(leaf_name(path), leaf) for path, leaf in iter_leaves(tree) if isinstance(leaf, StoredArray)]
    arrays.sort(key=lambda pair: -pair[1].dtype.itemsize)  # so that all are aligned
    header: dict[str, Any] = {}
    others = [[list(path), _value(leaf)] for path, leaf in iter_leaves(tree) if not isinstance(leaf, StoredArray)]
    if others:
        header[_METADATA] = {_OTHERS: json.dumps(others)}
    end = 0
    for name, array in arrays:
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with translated(path, "written"), open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        at = file.tell()
        for _, array in arrays:
            file.write(memory.as_bytes(np.asarray(array, order="C")))
            file.flush()
            atomic.start_writeback(file.fileno(), at, array.nbytes)
            at += array.nbytes
        os.fsync(file.fileno())


def _value(leaf: Any) -> Any:
    return {"empty": leaf.container.value} if isinstance(leaf, Branch) else leaf


@dataclasses.dataclass(frozen=True, slots=True)
class FileArray:
    """An array of a file; its bytes lie at an offset."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Read the array, for ``np.asarray``."""
        return self.part(array_boxes.full_box(self.shape))

    def part(self, box: array_boxes.Box) -> np.ndarray[Any, Any]:
        """Return a part of the array, mapped."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.asarray(np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))[box])


def read(path: str) -> dict[str, Any]:
    """Return name → leaf of a file that `write` wrote, to compare."""
    with translated(path), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found: dict[str, Any] = {}
    for keys, value in json.loads(header.pop(_METADATA, {}).get(_OTHERS, "[]")):
        found[leaf_name(tuple(keys))] = Branch({}) if isinstance(value, dict) else value
    for name, entry in header.items():
        start = 8 + length + entry["data_offsets"][0]
        found[name] = FileArray(path, start, tuple(entry["shape"]), dtype_from_name(_DTYPES[entry["dtype"]]))
    return found
