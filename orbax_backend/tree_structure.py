"""Read the stored tree and the other JSON files of a checkpoint, without reading arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.local.presence import stays_inside
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Path

from .files import Check, corrupt, corrupt_leaf, list_names, read_json
from .msgpack_file import Aggregate, Kinds, OpenMsgpack, open_aggregate
from .open_index import holds_array, process_databases
from .shardings import read_shardings
from .type_annotations import ContainerType, LeafType, parse_annotations, parse_rich_types

# Value type of a leaf with only a name: an array or a text.
UNKNOWN = "unknown"
_KINDS = frozenset([layout.SEQUENCE_KEY, layout.DICT_KEY])
_key_of, _kind_of = operator.itemgetter("key"), operator.itemgetter("key_type")


class LeafEntry(NamedTuple):
    """One leaf or empty node of the stored tree, from ``_METADATA`` or, without one, from the msgpack file."""

    path: Path
    kinds: Kinds  # Orbax's key type of each name of the path
    name: str
    value_type: str  # Orbax's name of its type
    skipped: bool  # whether it has no array: an empty node, or a value in the msgpack file of old releases
    write_shape: Any  # shape of what was written at once, unchecked; None of releases without ``array_metadatas``


@dataclasses.dataclass
class Structure:
    """The content of a checkpoint's JSON files."""

    location: Location  # directory of the checkpoint
    entries: list[LeafEntry]  # entries of the tree, in stored order
    use_ocdbt: bool  # storage format of arrays, like the next
    zarr3: bool
    fills_missing: bool  # whether chunks of only the fill value were not stored
    leaf_types: dict[str, LeafType] | None  # our type annotations by name, or None in a checkpoint of another writer
    containers: dict[Path, ContainerType]  # types of branches, from these or Orbax's own
    strings: dict[str, Any] | None  # content of ``_strings.json``, or None
    # Name → PRNG implementation, or None for plain arrays; of every array in ``array_metadatas``. Not read if there are
    # annotations.
    key_impls: dict[str, str | None]
    is_single_array: bool  # whether it is an item of one array, without a tree
    is_typed_key: bool  # whether that array is the data of a typed PRNG key
    aggregate: Aggregate | None  # msgpack file of old releases, or None
    check: Check | None  # checks a file's content before it is decoded, or None

    @functools.cached_property
    def shardings(self) -> dict[str, str]:
        """Return name → JSON text of the sharding; read the file at first use."""
        return read_shardings(self.location, {entry.name for entry in self.entries}, self.check)

    def text(self, entry: LeafEntry) -> str:
        """Return the text of a string leaf; raise if it is missing."""
        value: Any = self.strings
        for token in layout.pointer_tokens(entry.name) or ():
            value = value.get(token) if isinstance(value, dict) else None
        if isinstance(value, str):
            return value
        lack = "is missing" if self.strings is None else "has no such text"
        raise corrupt_leaf(self.location.path, entry.path, f"it is a text in the file {layout.STRINGS}, which {lack}")


def read_structure(
    location: Location,
    open_msgpack: OpenMsgpack,
    check: Check | None,
    on_failure: contextlib.ExitStack,
) -> Structure:
    """Read the files that describe the tree: without ``_METADATA`` the msgpack file, which ``on_failure`` closes."""
    if location.listing is not None:  # which keeps what is read ahead
        location.prefetch([layout.TREE_METADATA, layout.STRINGS, layout.MANIFEST, layout.CHECKSUMS])
    file, metadata = location / layout.TREE_METADATA, read_json(location, layout.TREE_METADATA, check)
    fields = metadata or {}
    annotations = parse_annotations(fields.get("custom_metadata"), file.path)
    aggregate = open_aggregate(location, open_msgpack) if annotations is None else None
    if aggregate is not None:
        on_failure.callback(aggregate.reader.close)
    use_ocdbt = fields.get("use_ocdbt")
    if not isinstance(use_ocdbt, bool):
        # Releases before 0.11.31 did not record it (history of Orbax).
        use_ocdbt = _holds_database(location)
    entries = _infer_entries(location, aggregate, use_ocdbt) if metadata is None else _parse_entries(file, metadata)
    alone = [entry[:2] for entry in entries[:2]] == [((layout.SINGLE_ARRAY,), (layout.DICT_KEY,))]
    has_array = alone and aggregate is None
    return Structure(
        location=location,
        entries=entries,
        use_ocdbt=use_ocdbt,
        zarr3=fields.get("use_zarr3") is True,
        fills_missing=fields.get("store_array_data_equal_to_fill_value") is not True,
        leaf_types=None if annotations is None else annotations.leaves,
        containers={**parse_rich_types(fields), **(annotations.containers if annotations else {})},
        strings=_read_strings(location, entries, check),
        key_impls={} if annotations is not None else _read_key_impls(location, entries),
        is_single_array=has_array and (metadata is None or is_single_array(location, metadata, use_ocdbt)),
        is_typed_key=has_array and is_typed_key(location),
        aggregate=aggregate,
        check=check,
    )


def _holds_database(location: Location) -> bool:
    """Return whether arrays are in a database, by its manifest or, if that is lost, its other files."""
    if (location / layout.MANIFEST).isfile():
        return True
    names = list_names(location / layout.DATA_DIRECTORY)
    return any(re.fullmatch(layout.DATA_FILE_PATTERN, name) for name in names) or bool(process_databases(location))


def _parse_entries(file: Location, metadata: dict[str, Any]) -> list[LeafEntry]:
    tree = metadata.get("tree_metadata")
    if not isinstance(tree, dict):
        raise corrupt(file, "it has no object tree_metadata")
    rows: list[tuple[Any, ...]] = []
    checked = functools.cache(_KINDS.issuperset)  # by the kinds of all names of a path, of which there are few
    for key, entry in tree.items():
        try:
            parts, value = entry["key_metadata"], entry["value_metadata"]
            path, kinds = tuple(map(_key_of, parts)), tuple(map(_kind_of, parts))
            name, value_type = layout.leaf_name(path), value["value_type"]
            if not name.isascii():
                name.encode()
            known = checked(kinds) and type(value_type) is str
            skipped, write_shape = bool(value.get("skip_deserialize")), value.get("write_shape")
        except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise corrupt(file, f"the entry {key} does not decode ({error!r})") from error
        if not known:
            raise corrupt(file, f"the entry {key} has unknown keys or types")
        rows.append((path, kinds, name, value_type, skipped, write_shape))
    return list(map(tuple.__new__, itertools.repeat(LeafEntry), rows))  # without Python code for each


def _infer_entries(location: Location, aggregate: Aggregate | None, use_ocdbt: bool) -> list[LeafEntry]:
    """Return the entries of a directory without ``_METADATA``: from the msgpack file, or of a single array."""
    if aggregate is not None:
        return [_untyped_entry(*leaf, aggregate.folders.get(leaf[0])) for leaf in aggregate.leaves]
    with contextlib.suppress(errors.CorruptCheckpointError):
        folder = location / layout.SINGLE_ARRAY  # of array items without OCDBT
        in_folder = any((folder / name).isfile() for name in layout.ARRAY_METADATA_FILES)
        if in_folder or (use_ocdbt and holds_array(location)):
            return [_untyped_entry((layout.SINGLE_ARRAY,), (layout.DICT_KEY,), None)]
    raise _missing_structure(location)


def _untyped_entry(path: Path, kinds: Kinds, leaf: LeafHandle | str | None, name: str | None = None) -> LeafEntry:
    value_type = leaf if isinstance(leaf, str) else UNKNOWN
    return LeafEntry(path, kinds, layout.leaf_name(path) if name is None else name, value_type, leaf is not None, None)


def _missing_structure(location: Location) -> Exception:
    if not location.isdir():
        return errors.CheckpointNotFoundError(f"{location}: there is no such directory", path=location.path)
    ours, names = {*layout.TREE_FILES, layout.STEP_METADATA, layout.DATA_DIRECTORY}, list_names(location)
    kind = errors.UnrecognizedFormatError if ours.isdisjoint(names) else errors.IncompleteCheckpointError
    expected = f"{layout.TREE_METADATA} or, of a release before 0.5, {layout.MSGPACK_FILE}"
    message = f"{location}: expected {expected}, found {names[:8]}; restore it from a backup, or check the path"
    return kind(message, path=location.path)


def implementations_in(folder: Location, file: str) -> dict[str, str | None]:
    """Return name → PRNG implementation, or None, of the arrays that a file of ``array_metadatas`` lists."""
    try:
        arrays = [one["array_metadata"] for one in (read_json(folder, file) or {})["array_metadatas"]]
        impls = [(array.get("ext_metadata") or {}).get("random_key_impl") for array in arrays]
        names = [str(array["param_name"]) for array in arrays]
    except (KeyError, TypeError, AttributeError) as error:
        what = f"it does not decode ({error!r}), but only it tells PRNG keys from arrays"
        raise corrupt(folder / file, what) from error
    return {name: impl if isinstance(impl, str) else None for name, impl in zip(names, impls, strict=True)}


def _read_key_impls(location: Location, entries: list[LeafEntry]) -> dict[str, str | None]:
    """Return `Structure.key_impls`; every process lists all arrays, so one complete file is enough."""
    directory = location / layout.ARRAY_METADATAS
    impls: dict[str, str | None] = {}
    listed = {entry.name for entry in entries if entry.value_type == layout.JAX_ARRAY and not entry.skipped}
    for file in list_names(directory):
        if listed and listed <= impls.keys():
            break
        impls |= implementations_in(directory, file)
    return impls


def _read_strings(location: Location, entries: list[LeafEntry], check: Check | None) -> dict[str, Any] | None:
    """Return all texts, or None; Orbax 0.3.5 wrote them to a directory with the name of the first text (measured)."""
    strings = read_json(location, layout.STRINGS, check)
    if strings is not None:
        return strings
    for entry in entries:
        if entry.value_type in (layout.STRING, UNKNOWN) and not entry.skipped and stays_inside(entry.name):
            strings = read_json(location / entry.name, layout.STRINGS)
            if strings is not None:
                return strings
    return None


def is_single_array(location: Location, metadata: Mapping[str, Any], use_ocdbt: bool) -> bool:
    """Return whether a directory with the single leaf ``checkpoint`` is one array rather than a tree."""
    # Since 0.11.6 the step metadata of the directory or of its parent names the handler. Array items have a _METADATA
    # only since 0.11.25, so an older directory with one is a tree: it lacks handlers, or what 0.10.0 added. If the step
    # metadata of a later one is lost: trees of such a leaf are OCDBT by default, array items never are.
    if location.name == layout.JAX_KEY:
        return True
    own = _handlers(location)
    if own is None:
        items = _handlers(location.parent)
        own = items.get(location.name) if isinstance(items, dict) else items
    if isinstance(own, str):
        return own.endswith(".ArrayCheckpointHandler")
    return not use_ocdbt and "store_array_data_equal_to_fill_value" in metadata


def is_typed_key(location: Location) -> bool:
    """Return whether the array of a directory is the data of a typed PRNG key; raise if its metadata is damaged."""
    if location.name != layout.JAX_KEY:
        return False
    typed = (read_json(location.parent, layout.JAX_KEY_METADATA) or {}).get("typed")
    if not isinstance(typed, bool):
        file = location.parent / layout.JAX_KEY_METADATA
        raise corrupt(file, "it is missing, or does not say whether the PRNG key is typed")
    return typed


def _handlers(location: Location) -> Any:
    """Return the handlers in a directory's step metadata: '' if it predates them, None without the file."""
    with contextlib.suppress(errors.CorruptCheckpointError):
        metadata = read_json(location, layout.STEP_METADATA)
        return None if metadata is None else metadata.get("item_handlers", "")
    return None
