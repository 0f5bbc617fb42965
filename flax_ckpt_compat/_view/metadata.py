"""Read a checkpoint's metadata: times, custom metadata, items, writer."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
from collections.abc import Mapping
from typing import Any

from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import STEP_METADATA, TREE_METADATA
from flax_ckpt_compat._discovery.opening import Opened

_log = logging.getLogger("flax_ckpt_compat")
_OURS = "flax_ckpt_compat"


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
    step = read_step_metadata(opened.location)
    trees = {name: _object(item.location / TREE_METADATA) for name, item in opened.trees.items()}
    custom = {name: _custom(tree) for name, tree in trees.items()}
    ours = [name for name, tree in trees.items() if _is_ours(tree)]
    own = step.get("custom_metadata")
    return Metadata(
        started=_time(step.get("init_timestamp_nsecs")),
        committed=_time(step.get("commit_timestamp_nsecs")),
        custom=own if isinstance(own, dict) else {},
        custom_of_trees={name: value for name, value in custom.items() if value},
        rich_types={
            name: text for name, tree in trees.items() if isinstance(text := tree.get("value_metadata_tree"), str)
        },
        items=tuple(name for name in opened.items if name),
        writer=_OURS if ours else None,
    )


def read_step_metadata(location: Location) -> dict[str, Any]:
    """Return the JSON of a checkpoint's own metadata file, not of its trees."""
    return _object(location / STEP_METADATA)


def custom_of_tree(location: Location) -> Any:
    """Return the custom metadata of a tree alone; empty if it has none."""
    return _custom(_object(location / TREE_METADATA))


def _is_ours(tree: dict[str, Any]) -> bool:
    custom = tree.get("custom_metadata")
    return isinstance(custom, dict) and _OURS in custom


def _custom(tree: dict[str, Any]) -> Any:
    custom = tree.get("custom_metadata") or {}
    return {key: value for key, value in custom.items() if key != _OURS} if isinstance(custom, dict) else custom


def _object(file: Location) -> dict[str, Any]:
    if not file.isfile():
        return {}
    try:
        value = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        _log.warning("%s does not decode and is left out: %s", file, error)
        return {}
    return value if isinstance(value, dict) else {}


def _time(nanoseconds: Any) -> datetime.datetime | None:
    if type(nanoseconds) is not int:
        return None
    try:
        return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=nanoseconds // 1000)
    except OverflowError:
        return None
