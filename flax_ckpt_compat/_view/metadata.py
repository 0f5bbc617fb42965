"""Read what an open checkpoint holds beside the values: its leaves and their types, times, custom metadata, items."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from contextvars import ContextVar
from typing import Any, SupportsFloat, TypeVar

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.location import Location, as_text
from flax_ckpt_compat._core.orbax_layout import STEP_METADATA, TREE_METADATA
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves
from flax_ckpt_compat._discovery import locating, saved_steps
from flax_ckpt_compat._discovery.contents import Layout, contents_of
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

_log = logging.getLogger("flax_ckpt_compat")
_Result = TypeVar("_Result")
_OURS = "flax_ckpt_compat"
Count = Callable[..., None]  # takes numbers of bytes, in any thread, and words to show beside their bar
Begin = Callable[[Callable[[], int]], Count]  # begins a bar: takes a function that returns its total, in bytes
BAR: ContextVar[Begin] = ContextVar("BAR", default=lambda _: lambda *_: None)  # commands show one


@dataclasses.dataclass(slots=True)
class StoredLeaves:
    """Leaves of a checkpoint by key path, and the key paths of empty nodes with what they are."""

    path: str
    format: str
    leaves: dict[Path, LeafHandle] = dataclasses.field(default_factory=dict)
    empty: dict[Path, str] = dataclasses.field(default_factory=dict)

    def add(self, tree: Node, at: Path) -> None:
        """Add the leaves of a tree at a key path."""
        for path, leaf in iter_leaves(tree, at):
            if isinstance(leaf, LeafHandle):
                self.leaves[path] = leaf
            else:
                is_list = isinstance(leaf, Branch) and leaf.container.is_sequence
                self.empty[path] = "None" if leaf is None else "[]" if is_list else "{}"


def leaves_of(opened: Opened) -> StoredLeaves:
    """Return the leaves of what a restore returns, and of JSON items beside the only tree."""
    found = StoredLeaves(opened.path, opened.format)
    for name in opened.parts:
        found.add(opened.reader(name).tree, (name,) if opened.is_mapping else ())
    for name in [one for one in opened.items if one not in opened.parts]:
        is_taken = any(path[:1] == (name,) for path in (*found.leaves, *found.empty))
        found.add(opened.reader(name).tree, (f"{name} (JSON)" if is_taken else name,))
    return found


def describe(node: LeafHandle | str | None) -> str:
    """Return the type of a leaf: ``float32[3,4]``, ``key uint32[2]``, ``int``; of an empty node, what it is."""
    if not isinstance(node, LeafHandle):
        return node or ""
    if node.kind in (LeafKind.ARRAY, LeafKind.PRNG_KEY):
        return f"{'' if node.kind is LeafKind.ARRAY else 'key '}{node.dtype}[{','.join(map(str, node.shape))}]"
    return str(node.dtype) if node.kind is LeafKind.NUMPY_SCALAR else node.kind.value


def dir_without_pending_saves(path: str | os.PathLike[str], prefix: str) -> CheckpointDir:
    """Resolve a caller's path and prefix, and wait for background saves there; import nothing for them, such as jax."""
    checkpoint_dir = saved_steps.checkpoint_dir(as_text(path), as_text(prefix, "prefix"))
    if async_saves := sys.modules.get("flax_ckpt_compat._save.async_saves"):
        async_saves.wait_for_pending_saves(checkpoint_dir)
    return checkpoint_dir


def read_one(
    checkpoint_dir: CheckpointDir,
    read: Callable[[Opened], _Result],
    *,
    step: SupportsFloat | str | None,
    item: str | None,
    doing: str,
    keeps_trees: bool = False,
) -> _Result:
    """Open a checkpoint, or one of its items, and return what ``read`` makes of it; see `locating.read_found`.

    If this ``keeps_trees``, a checkpoint that is one tree, without items, is opened whatever the item."""

    def read_at(location: Location) -> _Result:
        is_whole = keeps_trees and item is not None and contents_of(location).layout is not Layout.ITEMS
        chosen = None if is_whole else item
        with locating.unchanged(location), closing(Opened(location, verify=True, item=chosen)) as opened:
            return read(opened)

    return locating.read_found(checkpoint_dir, step, read_at, doing=doing)


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata of a checkpoint; None or empty if the format does not record it.

    Attributes:
        started: when its save began, in UTC.
        committed: when its save ended, in UTC.
        custom: Orbax's ``custom_metadata`` of the checkpoint.
        custom_of_trees: item name → ``custom_metadata`` of that tree alone; the item of a flat directory is ''.
        items: names of the items; empty for a checkpoint that is one tree.
        rich_types: item name → Orbax's record of that tree's tuples and namedtuples, as JSON.
        writer: ``flax_ckpt_compat`` if we wrote an Orbax directory, else None: no release of Flax or Orbax records
            its name or version.
    """

    started: datetime.datetime | None
    committed: datetime.datetime | None
    custom: Mapping[str, Any]
    custom_of_trees: Mapping[str, Any]
    rich_types: Mapping[str, str]
    items: tuple[str, ...]
    writer: str | None


def read_metadata(opened: Opened) -> Metadata:
    """Read a checkpoint's metadata files; a damaged one counts as absent, as in Orbax, with a logged warning."""
    # Written since Orbax 0.5.11; with more than the two times since 0.11 (measured).
    step = json_of(opened.location / STEP_METADATA)
    trees = {name: json_of(item.location / TREE_METADATA) for name, item in opened.trees.items()}
    types = {name: tree.get("value_metadata_tree") for name, tree in trees.items()}
    own, customs = step.get("custom_metadata"), [tree.get("custom_metadata") for tree in trees.values()]
    return Metadata(
        started=_time(step.get("init_timestamp_nsecs")),
        committed=_time(step.get("commit_timestamp_nsecs")),
        custom=own if isinstance(own, dict) else {},
        custom_of_trees={name: value for name, tree in trees.items() if (value := custom_of(tree))},
        rich_types={name: text for name, text in types.items() if isinstance(text, str)},
        items=tuple(filter(None, opened.items)),
        writer=_OURS if any(_OURS in one for one in customs if isinstance(one, dict)) else None,
    )


def custom_of(tree: dict[str, Any]) -> Any:
    """Return the custom metadata of a tree alone, from the JSON of its metadata file; empty if it has none."""
    custom = tree.get("custom_metadata") or {}
    return {key: value for key, value in custom.items() if key != _OURS} if isinstance(custom, dict) else custom


def json_of(file: Location) -> dict[str, Any]:
    """Return the JSON object in a metadata file; empty if there is no such file, or it is damaged."""
    try:
        value = json.loads(file.read()) if file.isfile() else {}
    except (ValueError, RecursionError) as error:
        _log.warning("%s does not decode and is left out: %s", file, error)
        return {}
    return value if isinstance(value, dict) else {}


def _time(nanoseconds: Any) -> datetime.datetime | None:
    with suppress(OverflowError):
        if type(nanoseconds) is int:  # and no bool
            since_1970 = datetime.timedelta(microseconds=nanoseconds // 1000)
            return datetime.datetime.fromtimestamp(0, datetime.UTC) + since_1970
    return None
