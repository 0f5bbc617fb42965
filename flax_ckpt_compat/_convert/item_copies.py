"""Copy items that are not rewritten: arrays, random keys, JSON, and what only its own handler reads."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.local.syncing import sync_directory, sync_tree
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.orbax_items import ItemKind
from flax_ckpt_compat._discovery.orbax_trees import names_in

_PIECE = 8 << 20  # bytes
_V1_JSON = "data.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """An item to copy, file by file.

    The handler that wrote it reads the copy: names and bytes stay, but for those in ``renamed`` and ``changed``."""

    folder: Location  # of the source
    kind: ItemKind
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)  # name in the source → name in the copy
    # Name in the source → other bytes; None leaves the file out.
    changed: dict[str, bytes | None] = dataclasses.field(default_factory=dict)
    is_whole: bool = False  # it was a checkpoint of its own, whose metadata is now that of the step

    def files(self) -> Iterator[tuple[str, Location | bytes]]:
        """Yield the relative path of each file of the copy, and its source or its bytes."""
        for name, file in self._own(self.folder):
            content = self.changed.get(name, file)
            if content is not None:
                yield self.renamed.get(name, name), content
        if self.kind is not ItemKind.UNKNOWN and layout.COMMIT_FILE not in names_in(self.folder):
            yield layout.COMMIT_FILE, layout.COMMITTED

    def write(self, path: str) -> None:
        """Write and sync the copy as a new local directory."""
        os.makedirs(path, exist_ok=True)
        for name in folders_below(self.folder):
            os.makedirs(os.path.join(path, name), exist_ok=True)
        for name, content in self.files():
            copy_file(content, os.path.join(path, name))
        sync_tree(path)

    def difference(self, location: Location) -> str | None:
        """Return how a copy that was written differs, or None."""
        wanted = dict(self.files())
        found = dict(self._own(location))
        for name in sorted(wanted.keys() | found.keys()):
            if name not in found:
                return f"lacks {name}"
            if name not in wanted:
                return f"has {name}"
            if is_other(wanted[name], found[name]):
                return "is other JSON" if self.kind is ItemKind.JSON else f"has other bytes in {name}"
        if not location.is_remote:  # stores have no folders
            lost = set(folders_below(self.folder)) - set(folders_below(location))
            return f"lacks {min(lost)}/" if lost else None
        return None

    def _own(self, folder: Location) -> Iterator[tuple[str, Location]]:
        """Yield the files of the item, without the metadata of one that was a checkpoint of its own.

        What only its own handler reads may have a file of that name."""
        has_metadata = self.is_whole or self.kind is not ItemKind.UNKNOWN
        return (pair for pair in files_below(folder) if not (has_metadata and pair[0] == layout.STEP_METADATA))


def copy_file(content: Location | bytes, path: str) -> None:
    """Write bytes, or those of a file, to a new local file, and sync it."""
    with open(path, "xb") as file:
        file.writelines(_pieces(content))
        file.flush()
        os.fsync(file.fileno())


def copy_files(files: Mapping[str, Location], folder: str) -> None:
    """Copy files to their relative paths in a new local directory, and sync the folders that are made for them."""
    for name, file in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        copy_file(file, path)
    for above in {os.path.dirname(name) for name in files}:
        while above:
            sync_directory(os.path.join(folder, above))
            above = os.path.dirname(above)


def is_other(content: Location | bytes, copied: Location) -> bool:
    """Return whether a file does not hold these bytes, or those of the other file."""
    return any(one != other for one, other in _pairs(_pieces(content), _pieces(copied)))


def with_v0_names(copy: Copy) -> Copy:
    """Return the copy of a JSON item under the file's name of Orbax's v0 handler, which the one of v1 reads, too."""
    names = names_in(copy.folder)
    if _V1_JSON not in names or layout.JSON_FILES[0] in names:
        return copy
    return dataclasses.replace(copy, renamed={_V1_JSON: layout.JSON_FILES[0]})


def without_sharding(copy: Copy) -> Copy:
    """Return the copy of an array or key as one that needs no device: its handler restores a numpy array."""
    folder = {ItemKind.ARRAY: "", ItemKind.KEY: f"{layout.JAX_KEY}/"}.get(copy.kind)
    if folder is None:
        return copy
    sharding, tree = f"{folder}{layout.SHARDING}", f"{folder}{layout.TREE_METADATA}"
    file = copy.folder / tree
    if not (copy.folder / sharding).isfile() or not file.isfile():
        return copy
    described = json.loads(file.read())
    for entry in described["tree_metadata"].values():
        value: dict[str, Any] = entry["value_metadata"]
        value["value_type"] = layout.NP_ARRAY
        value.pop("write_shape", None)
    return dataclasses.replace(copy, changed={sharding: None, tree: json.dumps(described).encode()})


def files_below(folder: Location, above: str = "") -> Iterator[tuple[str, Location]]:
    """Yield the relative path and location of each file below a folder, also by links."""
    for name in sorted(folder.listdir()):
        path = folder / name
        if path.isdir():
            yield from files_below(path, f"{above}{name}/")
        else:
            yield f"{above}{name}", path


def folders_below(folder: Location, above: str = "") -> Iterator[str]:
    """Yield the relative path of each folder below a folder: an item may need one that is empty."""
    for name in sorted(folder.listdir()):
        if (folder / name).isdir():
            yield f"{above}{name}"
            yield from folders_below(folder / name, f"{above}{name}/")


def _pieces(content: Location | bytes) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield from (content[start : start + _PIECE] for start in range(0, len(content), _PIECE))
        return
    size = content.size()
    for start in range(0, size, _PIECE):
        yield content.read(start, min(size, start + _PIECE))


def _pairs(one: Iterator[bytes], other: Iterator[bytes]) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield pieces of two files side by side; None after the end of one."""
    while True:
        pair = next(one, None), next(other, None)
        if pair == (None, None):
            return
        yield pair
