"""Open a checkpoint: its trees and JSON items, each with its own reader."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, Format, LeafHandle, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path
from flax_ckpt_compat._discovery import contents, foreign, formats, orbax_directory
from flax_ckpt_compat._discovery.orbax_directory import Item, ItemKind, arrays_below, names_in

_log = logging.getLogger("flax_ckpt_compat")


class Opened:
    """An open checkpoint of one tree or several; each item is opened on first use."""

    def __init__(
        self,
        path: Location,
        *,
        verify: bool,
        item: str | None = None,
        items: Iterable[str] | None = None,
        warns: bool = True,
        allows_unknown: bool = False,
        read_by: Callable[[Location, str, Reader | None], Reader] | None = None,
    ):
        """Detect what is there: all, ``item`` as one tree, or ``items`` by name; `Backend.open` has ``verify``.

        Raise UnrecognizedFormatError if only handlers of others read it, unless ``allows_unknown``; then '' is all of
        it. Items of unknown kinds are left out; if this ``warns``, with a warning. ``read_by`` makes the reader of each
        tree, of the checkpoint, the item's name and our own reader."""
        self._verify, self._read_by = verify, read_by
        self._readers: dict[str, Reader] = {}
        self._open = ExitStack()
        found = _without_lookalikes(contents.checkpoint_at(path.listed()))
        if item is not None:
            found = _chosen(found, [item])
            found = dataclasses.replace(found, items={"": found.items[item]})
        elif items is not None:
            found = _chosen(found, items, allows_unknown=allows_unknown)
        elif not found.items and read_by is not None:
            found = dataclasses.replace(found, items={"": Item(Format.ORBAX, found.location)}, unknown=())
            self._readers[""] = read_by(path.unlisted(), "", None)
        elif not found.items and not allows_unknown:
            what = f"{path} was written by Orbax, but holds no tree, array or JSON item that is known here"
            remedy = "restore it with the orbax_checkpointer that wrote it."
            raise errors.UnrecognizedFormatError(f"{what}; {remedy}", path=path.path)
        self.contents = found
        self.location = path.unlisted()  # of the checkpoint
        # Name → format and location; a checkpoint that is one tree has the single item ''.
        self.items: dict[str, Item] = dict(found.items)
        if path.is_remote and len(found.items) == 1:
            self.reader(*found.items)  # now, while the listing is new
        for name, one in found.items.items():
            self.items[name] = dataclasses.replace(one, location=one.location.unlisted())
        if found.unknown and warns:
            _log.warning("%s: items of an unknown kind are left out: %s", path, one_line(found.unknown))

    @property
    def path(self) -> str:
        """Return the path of the checkpoint."""
        return self.location.path

    @property
    def trees(self) -> dict[str, Item]:
        """Return the items that are not JSON."""
        return {name: item for name, item in self.items.items() if item.format is not None}

    @property
    def parts(self) -> Sequence[str]:
        """Return the items of the restored value: all, or the only tree."""
        return list(self.trees if len(self.trees) == 1 else self.items)

    @property
    def is_mapping(self) -> bool:
        """Return whether the restored value is a mapping of item name → item."""
        return len(self.parts) > 1 or (not self.trees and "" not in self.items)

    @property
    def format(self) -> str:
        """Return ``msgpack``, ``orbax``, or the name of its layout; JSON items are of the others' format."""
        layout = next((item.layout for item in self.items.values() if item.layout), None)
        return layout or (next(iter(self.items.values())).format or Format.ORBAX).value

    def reader(self, item: str) -> Reader:
        """Return the reader of an item, opened on first use."""
        if item not in self._readers:
            try:
                self._readers[item] = self._open.enter_context(closing(self._reader(item)))
            except foreign.UNUSABLE as error:
                if others := one_line(name for name in self.items if name != item):
                    sentence = f"Other items of this step may be whole, and restore by their names: {others}."
                    errors.add_sentence(error, sentence)
                raise
        return self._readers[item]

    def _reader(self, item: str) -> Reader:
        if self._read_by is None or self.items[item].format is None:
            return open_item(self.items[item], verify=self._verify)
        own: Reader | None = None
        with suppress(errors.UnrecognizedFormatError, errors.IncompleteCheckpointError):  # as files of other handlers
            own = open_item(self.items[item], verify=self._verify)
        return self._read_by(self.location, item, own)

    def close(self) -> None:
        """Close all items."""
        self._open.close()

    def discard(self) -> None:
        """Close all items and drop their trees; thousands of handles that refer to their reader are garbage at once."""
        self.close()
        for reader in self._readers.values():
            reader.tree = None


def _without_lookalikes(found: contents.Contents) -> contents.Contents:
    """Return the contents with items that only a user's handler reads as unknown; '' is the whole checkpoint."""
    doubtful = [name for name, item in found.items.items() if _may_only_look_like_tree(item)]
    if found.items and not doubtful:
        return found
    names = names_in(found.location)
    handlers = orbax_directory.recorded_handlers(found.location, names)
    kinds = {name: orbax_directory.kind_of_handler(handlers[name]) for name in doubtful if name in handlers}
    alike = {name for name, kind in kinds.items() if kind is ItemKind.UNKNOWN and not _opens(found.items[name])}
    items = {name: item for name, item in found.items.items() if name not in alike}
    unknown = alike.union(found.unknown)
    if not items and not unknown:  # without recorded handlers its folders, or '' if it has files of its own
        folders = names.difference(layout.STEP_FILES)
        unknown = {""} if handlers or not all((found.location / name).isdir() for name in folders) else folders
    return dataclasses.replace(found, items=items, unknown=tuple(sorted(unknown)))


def _may_only_look_like_tree(item: Item) -> bool:
    """Return whether an item of Orbax's format has names of a tree, and no arrays, which damaged ones have, too."""
    if item.format is not Format.ORBAX or item.layout:
        return False
    names = item.names or names_in(item.location)
    has_database = layout.MANIFEST in names or any(name.startswith(layout.PROCESS_PREFIX) for name in names)
    return not has_database and not any(arrays_below(item.location))


def _opens(item: Item) -> bool:
    with suppress(*foreign.UNUSABLE):
        open_item(item).close()
        return True
    return False


def _chosen(found: contents.Contents, names: Iterable[str], *, allows_unknown: bool = False) -> contents.Contents:
    """Return the contents with these items alone; raise ArgumentError for a name that is not an item's."""
    wanted, known = set(names), (*found.items, *found.unknown)
    if absent := sorted(wanted.difference(known)):
        there = one_line(filter(None, known))
        what = f"its items are {there}" if there else "it is one tree, without items; leave item out"
        raise errors.ArgumentError(f"{found.location} has no item {absent[0]!r}: {what}", path=found.location.path)
    if not allows_unknown and wanted.isdisjoint(found.items):
        what = f"{found.location}: only the handler that wrote the item {', '.join(map(repr, wanted))} can read it"
        remedy = f"use the orbax_checkpointer of it, or another item: {one_line(found.items) or 'there is none'}"
        raise errors.UnrecognizedFormatError(f"{what}; {remedy}", path=found.location.path)
    items = {name: item for name, item in found.items.items() if name in wanted}
    return dataclasses.replace(found, items=items, unknown=tuple(name for name in found.unknown if name in wanted))


def open_item(item: Item, *, verify: bool = False) -> Reader:
    """Open one tree or JSON item; see `Backend.open`."""
    with foreign.naming_lfs_pointers(item.location):
        if item.format is None:
            return JsonReader(item.location)
        if item.layout:
            return formats.open_layout(item.layout, item.location)
        return formats.backend_for(item.format).open(item.location, verify=verify)


class JsonReader(Reader):
    """Reader of a JSON item of an Orbax directory; its values are read on opening."""

    format = Format.ORBAX
    places_on_device, keeps_lists = True, True

    def __init__(self, path: Location):
        self.location = path.unlisted()
        try:
            self.tree: Node = self._node(json.loads(path.read().decode()), ())
        except (ValueError, RecursionError) as error:
            what = f"{path} is not valid JSON: {error}; restore the file from a backup"
            raise errors.CorruptCheckpointError(what, path=path.path) from error

    def _node(self, value: Any, path: Path) -> Node:
        if isinstance(value, Mapping):
            return Branch({name: self._node(child, (*path, name)) for name, child in value.items()})
        if isinstance(value, list):
            children = {str(index): self._node(child, (*path, str(index))) for index, child in enumerate(value)}
            return Branch(children, Container.LIST)
        if value is None:
            return None
        return LeafHandle(path, KIND_OF_TYPE[type(value)], (), None, 0, None, self, value)

    def read(self, handles: Sequence[LeafHandle], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """Return the values of handles; there are no arrays, so no slices."""
        return [handle.locator for handle in handles]
