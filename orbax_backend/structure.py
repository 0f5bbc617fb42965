"""The stored tree and everything else that the JSON files of a checkpoint say, before any array is looked at."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import warnings
from typing import Any

from flax_ckpt_compat._core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnrecognizedFormatError,
)
from flax_ckpt_compat._core.tree import Path, show_path

from .files import storage_errors
from .index import MANIFEST
from .marks import Marks, parse_marks
from .metadata import ARRAY_METADATAS, DICT_KEY, METADATA, SEQUENCE_KEY, SHARDING, STEP_METADATA, STRINGS
from .names import pointer_tokens, stored_name

Keys = tuple[tuple[str, int], ...]
_ARRAY_HANDLER = "ArrayCheckpointHandler"


@dataclasses.dataclass(frozen=True, slots=True)
class LeafEntry:
    """One entry of ``_METADATA``.

    Attributes:
        keys: its key path, each name with Orbax's key type.
        path: the names of its key path.
        name: the name it is stored under.
        value_type: Orbax's name of its type.
        skipped: its value is not in the arrays: an empty marker, or the msgpack file of old releases has it.
        has_write_shape: its release also wrote ``array_metadatas`` for it.
    """

    keys: Keys
    path: Path
    name: str
    value_type: str
    skipped: bool
    has_write_shape: bool


@dataclasses.dataclass(slots=True)
class Structure:
    """What the JSON files of a checkpoint say.

    Attributes:
        path: of the checkpoint's directory.
        entries: of the stored tree, in stored order.
        use_ocdbt, zarr3: how arrays are stored.
        fills_missing: chunks that equal the fill value were not stored.
        marks: ours, or None in a checkpoint that others wrote.
        strings: content of ``_strings.json``, or None.
        shardings: JSON text by name.
        key_impls: PRNG implementation, or None for plain arrays, by the name of every array that the files list.
        is_single_array: it is the item of one array, without a tree.
    """

    path: str
    entries: list[LeafEntry]
    use_ocdbt: bool
    zarr3: bool
    fills_missing: bool
    marks: Marks | None
    strings: dict[str, Any] | None
    shardings: dict[str, str]
    key_impls: dict[str, str | None]
    is_single_array: bool

    def text(self, entry: LeafEntry) -> str:
        """The text of a string leaf.

        Raises:
            CorruptCheckpointError: it is not there.
        """
        value: Any = self.strings
        for token in pointer_tokens(entry.name) or ():
            value = value.get(token) if isinstance(value, dict) else None
        if isinstance(value, str):
            return value
        shown = show_path(entry.path)
        what = "the file is missing" if self.strings is None else "it has no such text"
        raise CorruptCheckpointError(
            f"{os.path.join(self.path, STRINGS)}: the leaf {shown!r} is a str kept in this file, but {what}; "
            f"restore the file from a copy",
            path=self.path,
            leaf=shown,
        )


def read_structure(path: str) -> Structure:
    """Reads the JSON files of the directory ``path``; all but ``_METADATA`` may be absent.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError, UnrecognizedFormatError: there is no ``_METADATA``.
        CorruptCheckpointError: a file does not decode.
    """
    metadata = _read_json(path, METADATA)
    if metadata is None:
        raise _without_metadata(path)
    file = os.path.join(path, METADATA)
    tree = metadata.get("tree_metadata")
    if not isinstance(tree, dict):
        raise corrupt(file, "it has no object tree_metadata")
    use_ocdbt = metadata.get("use_ocdbt")
    entries = [_parse_entry(file, key, value) for key, value in tree.items()]
    return Structure(
        path=path,
        entries=entries,
        # Releases before 0.11.31 did not say it (history of Orbax).
        use_ocdbt=use_ocdbt if isinstance(use_ocdbt, bool) else os.path.exists(os.path.join(path, MANIFEST)),
        zarr3=metadata.get("use_zarr3") is True,
        fills_missing=metadata.get("store_array_data_equal_to_fill_value") is not True,
        marks=parse_marks(metadata.get("custom_metadata"), file),
        strings=_read_json(path, STRINGS),
        shardings=_read_shardings(path),
        key_impls=_read_key_impls(path),
        is_single_array=_is_single_array(path, entries),
    )


def _without_metadata(path: str) -> Exception:
    if not os.path.isdir(path):
        return CheckpointNotFoundError(f"{path}: there is no such directory; check the path", path=path)
    names = sorted(os.listdir(path))
    ours = {MANIFEST, "checkpoint", STEP_METADATA, SHARDING, STRINGS, "d"} & set(names)
    if not ours:
        return UnrecognizedFormatError(
            f"{path}: expected an Orbax checkpoint with a file {METADATA}, found {names[:8]}; check the path", path=path
        )
    return IncompleteCheckpointError(
        f"{path}: the file {METADATA} is missing, which holds the structure of the tree (found {names[:8]}); "
        f"the save was not finished, or it is of a release that did not write one",
        path=path,
    )


def _parse_entry(file: str, key: str, entry: Any) -> LeafEntry:
    try:
        keys = tuple((part["key"], part["key_type"]) for part in entry["key_metadata"])
        value = entry["value_metadata"]
        value_type, skipped = value["value_type"], value.get("skip_deserialize", False)
        has_write_shape = value.get("write_shape") is not None
    except (KeyError, TypeError, AttributeError) as error:
        raise corrupt(file, f"the entry {key} does not decode ({error!r})") from error
    valid = all(isinstance(name, str) and kind in (SEQUENCE_KEY, DICT_KEY) for name, kind in keys)
    if not valid or not isinstance(value_type, str):
        raise corrupt(file, f"the entry {key} has unknown keys or types")
    path = tuple(name for name, _ in keys)
    return LeafEntry(keys, path, stored_name(path), value_type, bool(skipped), has_write_shape)


def _read_shardings(path: str) -> dict[str, str]:
    try:
        stored = _read_json(path, SHARDING) or {}
    except CorruptCheckpointError as error:
        warnings.warn(f"{error}; restoring without saved shardings", stacklevel=2)
        return {}
    return {_sharding_name(key): text for key, text in stored.items() if isinstance(text, str)}


def _sharding_name(key: str) -> str:
    try:
        return base64.urlsafe_b64decode(key).decode()
    except ValueError:
        return key


def _read_key_impls(path: str) -> dict[str, str | None]:
    """Every process lists all arrays, so any one file is enough."""
    directory = os.path.join(path, ARRAY_METADATAS)
    impls: dict[str, str | None] = {}
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        file = os.path.join(directory, name)
        try:
            for one in (_read_json(directory, name) or {})["array_metadatas"]:
                array = one["array_metadata"]
                impl = (array.get("ext_metadata") or {}).get("random_key_impl")
                impls[str(array["param_name"])] = impl if isinstance(impl, str) else None
        except (KeyError, TypeError, AttributeError) as error:
            raise corrupt(file, f"it does not decode ({error!r}), and it tells PRNG keys from arrays") from error
    return impls


def _is_single_array(path: str, entries: list[LeafEntry]) -> bool:
    """Whether the directory, or the step above it, says that it was saved as one array.

    Without that word it cannot be told from the tree ``{"checkpoint": array}``.
    """
    if [entry.keys for entry in entries] != [(("checkpoint", DICT_KEY),)]:
        return False
    own = _handlers(path)
    if own is None:
        step, item = os.path.split(path.rstrip("/"))
        items = _handlers(step)
        own = items.get(item) if isinstance(items, dict) else None
    return isinstance(own, str) and own.endswith("." + _ARRAY_HANDLER)


def _handlers(path: str) -> Any:
    try:
        return (_read_json(path, STEP_METADATA) or {}).get("item_handlers")
    except CorruptCheckpointError:
        return None


def _read_json(path: str, name: str) -> dict[str, Any] | None:
    """The JSON object in a file, or None if there is no file."""
    file = os.path.join(path, name)
    if not os.path.isfile(file):
        return None
    with storage_errors(file, "read"), open(file, "rb") as opened:
        text = opened.read()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt(file, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise corrupt(file, f"it holds a {type(value).__name__} where an object was expected")
    return value


def corrupt(file: str, what: str) -> CorruptCheckpointError:
    """The error for a JSON file that does not decode."""
    return CorruptCheckpointError(f"{file}: {what}; restore the file from a copy", path=file)
