"""Read the stored tree, from the JSON files of a checkpoint or the msgpack file of old releases, without its arrays.

That is the file ``checkpoint``, which Orbax wrote until 0.5.15. Each leaf is its value or a placeholder text; as in
real Orbax, what follows the placeholder's scheme is ignored (format of releases 0.1 to 0.5, measured).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.local.presence import stays_inside
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, show_path

from . import stored_names
from .files import Check, CheckpointFiles, corrupt, corrupt_leaf, list_names, read_json
from .open_index import holds_array, process_databases
from .save_plan import EMPTY_MARKERS
from .shardings import read_shardings
from .type_annotations import parse_annotations, parse_rich_types

# Value type of a leaf with only a name: an array or a text.
UNKNOWN = "unknown"
_KINDS = frozenset([stored_names.SEQUENCE_KEY, stored_names.DICT_KEY])
_key_of, _kind_of = operator.itemgetter("key"), operator.itemgetter("key_type")
# The second prefix is of releases up to 0.0.22 (history of Orbax).
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
Kinds = tuple[int, ...]  # Orbax's key type of each name of a path
OpenMsgpack = Callable[[Location], Reader]


class LeafEntry(NamedTuple):
    """One leaf or empty node of the stored tree, from ``_METADATA`` or, without one, from the msgpack file."""

    path: Path
    kinds: Kinds  # Orbax's key type of each name of the path
    name: str
    value_type: str  # Orbax's name of its type
    skipped: bool  # whether it has no array: an empty node, or a value in the msgpack file of old releases
    write_shape: Any  # shape of what was written at once, unchecked; None of releases without ``array_metadatas``


class Structure:
    """The content of the files that describe the tree."""

    def __init__(
        self, location: Location, open_msgpack: OpenMsgpack, check: Check | None, on_failure: contextlib.ExitStack
    ) -> None:
        """Read the files, each content checked by ``check``; ``on_failure`` closes the msgpack file."""
        if location.listing is not None:  # which keeps what is read ahead
            location.prefetch([layout.TREE_METADATA, layout.STRINGS, layout.MANIFEST, layout.CHECKSUMS])
        self.location, self.check = location, check  # directory of the checkpoint
        file, metadata = location / layout.TREE_METADATA, read_json(location, layout.TREE_METADATA, check)
        fields = metadata or {}
        annotations = parse_annotations(fields.get("custom_metadata"), file.path)
        # The msgpack file of old releases, or None, and path → handle of each leaf with its value in it.
        self.msgpack = _open_msgpack(location, open_msgpack) if annotations is None else None
        if self.msgpack is not None:
            on_failure.callback(self.msgpack.close)
        aggregated = [] if self.msgpack is None else list(_aggregated(self.msgpack.tree))
        self.values = {entry.path: leaf for entry, leaf in aggregated if leaf is not None}
        # Storage format of arrays, like the next. Releases before 0.11.31 did not record it (history of Orbax).
        recorded = fields.get("use_ocdbt")
        self.use_ocdbt = recorded if isinstance(recorded, bool) else _holds_database(location)
        self.zarr3 = fields.get("use_zarr3") is True
        # Whether chunks of only the fill value were not stored.
        self.fills_missing = fields.get("store_array_data_equal_to_fill_value") is not True
        self.entries: list[LeafEntry]  # of the tree, in stored order
        if metadata is not None:
            self.entries = _parse_entries(file, metadata)
        elif self.msgpack is not None:
            self.entries = [entry for entry, _ in aggregated]
        else:
            self.entries = [_array_item(location, self.use_ocdbt)]
        # Our type annotations by name, or None in a checkpoint of another writer.
        self.leaf_types = None if annotations is None else annotations.leaves
        # Types of branches, from these or Orbax's own.
        self.containers = {**parse_rich_types(fields), **(annotations.containers if annotations else {})}
        self.strings = _read_strings(location, self.entries, check)  # content of ``_strings.json``, or None
        # Name → PRNG implementation, or None for plain arrays; of every array in ``array_metadatas``. Not read if there
        # are annotations.
        self.key_impls = {} if annotations is not None else _read_key_impls(location, self.entries)
        alone = (layout.SINGLE_ARRAY,), (stored_names.DICT_KEY,)
        has_array = self.msgpack is None and [(one.path, one.kinds) for one in self.entries[:2]] == [alone]
        # Whether it is an item of one array, without a tree, and whether that is the data of a typed PRNG key.
        self.is_single_array = has_array and (metadata is None or _is_array_item(location, metadata, self.use_ocdbt))
        self.is_typed_key = has_array and _holds_typed_key(location)

    @functools.cached_property
    def shardings(self) -> dict[str, str]:
        """Return name → JSON text of the sharding; read the file at first use."""
        return read_shardings(self.location, {entry.name for entry in self.entries}, self.check)

    def text(self, entry: LeafEntry) -> str:
        """Return the text of a string leaf; raise if it is missing."""
        value: Any = self.strings
        for token in stored_names.pointer_tokens(entry.name) or ():
            value = value.get(token) if isinstance(value, dict) else None
        if isinstance(value, str):
            return value
        lack = "is missing" if self.strings is None else "has no such text"
        raise corrupt_leaf(self.location.path, entry.path, f"it is a text in the file {layout.STRINGS}, which {lack}")


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
            name, value_type = ".".join(path), value["value_type"]
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


def _open_msgpack(location: Location, open_msgpack: OpenMsgpack) -> Reader | None:
    """Open the msgpack file of a checkpoint directory; return None if there is none."""
    file = location / layout.MSGPACK_FILE
    if not file.isfile():
        return None
    CheckpointFiles(location).check(layout.MSGPACK_FILE)
    return open_msgpack(file)


def _aggregated(node: Node, path: Path = (), kinds: Kinds = ()) -> Iterator[tuple[LeafEntry, LeafHandle | None]]:
    """Yield the entry of each leaf of a msgpack file, in stored order, with its handle if its value is in the file."""
    name, value_type, value = ".".join(path), UNKNOWN, None
    if (folder := _folder_of_spec(node)) is not None:
        name = folder
    elif isinstance(node, Branch) and node.children:
        below = (*kinds, stored_names.SEQUENCE_KEY if node.container.is_sequence else stored_names.DICT_KEY)
        for key, child in node.children.items():
            yield from _aggregated(child, (*path, key), below)
        return
    elif isinstance(node, Branch):
        value_type = EMPTY_MARKERS[node.container]
    elif node is None:
        value_type = stored_names.NONE
    elif not (node.kind is LeafKind.STR and str(node.read()).startswith(_PLACEHOLDERS)):
        value = node
    yield LeafEntry(path, kinds, name, value_type, value is not None or value_type != UNKNOWN, None), value


def _folder_of_spec(node: Node) -> str | None:
    """Return the folder, beside the file, of the array that a spec of TensorStore describes; None for other nodes.

    The folder may have been moved since T5X wrote its path, which for buckets older specs have beside the kvstore
    (t5x/checkpoints.py, 2021 to 2024, documented)."""
    if not isinstance(node, Branch) or "driver" not in node.children:
        return None
    if "base" in node.children:  # of the driver ``cast``
        return _folder_of_spec(node.children["base"])
    kvstore = node.children.get("kvstore")
    if not isinstance(kvstore, Branch):
        return None
    at = kvstore.children.get("path", node.children.get("path"))
    if not isinstance(at, LeafHandle) or at.kind is not LeafKind.STR:
        return None
    return str(at.read()).rstrip("/").rpartition("/")[2] or None


def _array_item(location: Location, use_ocdbt: bool) -> LeafEntry:
    """Return the entry of an array item, which has neither ``_METADATA`` nor a msgpack file; raise if it is none."""
    with contextlib.suppress(errors.CorruptCheckpointError):
        name = layout.SINGLE_ARRAY  # also of the folder, without OCDBT
        in_folder = any((location / name / file).isfile() for file in layout.ARRAY_METADATA_FILES)
        if in_folder or (use_ocdbt and holds_array(location)):
            return LeafEntry((name,), (stored_names.DICT_KEY,), name, UNKNOWN, skipped=False, write_shape=None)
    raise _missing_structure(location)


def _missing_structure(location: Location) -> Exception:
    if not location.isdir():
        return errors.CheckpointNotFoundError(f"{location} does not exist; pass a checkpoint", path=location.path)
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
        if entry.value_type in (stored_names.STRING, UNKNOWN) and not entry.skipped and stays_inside(entry.name):
            strings = read_json(location / entry.name, layout.STRINGS)
            if strings is not None:
                return strings
    return None


def _is_array_item(location: Location, metadata: Mapping[str, Any], use_ocdbt: bool) -> bool:
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


def _holds_typed_key(location: Location) -> bool:
    """Return whether the array of a directory is the data of a typed PRNG key; raise if its metadata is damaged."""
    if location.name != layout.JAX_KEY:
        return False
    typed = (read_json(location.parent, stored_names.JAX_KEY_METADATA) or {}).get("typed")
    if not isinstance(typed, bool):
        file = location.parent / stored_names.JAX_KEY_METADATA
        raise corrupt(file, "it is missing, or does not say whether the PRNG key is typed")
    return typed


def _handlers(location: Location) -> Any:
    """Return the handlers in a directory's step metadata: '' if it predates them, None without the file."""
    with contextlib.suppress(errors.CorruptCheckpointError):
        metadata = read_json(location, layout.STEP_METADATA)
        return None if metadata is None else metadata.get("item_handlers", "")
    return None


def build_tree(structure: Structure, leaves: Sequence[Node]) -> Node:
    """Return the tree of leaves, one per entry; raise if the entries do not form a tree."""
    containers = structure.containers
    if structure.is_single_array:
        return leaves[0]
    if not leaves or (len(leaves) == 1 and not structure.entries[0].path):
        return _annotated(leaves[0] if leaves else Branch({}), containers.get(()))
    # Path of each branch → the branch, and Orbax's key types on the way to its children.
    branches, file = dict[Path, tuple[Branch, Kinds]](), structure.location / layout.TREE_METADATA
    for entry, leaf in zip(structure.entries, leaves, strict=True):
        _put(branches, file, entry.path, entry.kinds, leaf)
    for path, (branch, _) in branches.items():
        if branch.container is Container.LIST:
            _sort_sequence(branch, path, file)
    for path, annotation in containers.items():
        if path in branches:
            _annotated(branches[path][0], annotation)
        elif path and path[:-1] in branches and path[-1] in (children := branches[path[:-1]][0].children):
            children[path[-1]] = _annotated(children[path[-1]], annotation)
    return branches[()][0]


def _put(branches: dict[Path, tuple[Branch, Kinds]], file: Location, path: Path, kinds: Kinds, node: Node) -> None:
    """Put a node into its branch, which is made if it is not there yet."""
    if not path:
        raise corrupt(file, "it lists the whole tree as one leaf and other leaves besides")
    parent, name = path[:-1], path[-1]
    if parent not in branches:
        branch = Branch({}, Container.LIST if kinds[-1] == stored_names.SEQUENCE_KEY else Container.DICT)
        branches[parent] = branch, kinds
        if parent:
            _put(branches, file, parent, kinds[:-1], branch)
    branch, expected = branches[parent]
    if kinds != expected:
        if kinds[:-1] != expected[:-1]:
            raise corrupt(file, f"the leaf {show_path(path)!r} contradicts the entries before it")
        branch.container = Container.DICT  # children by index and by name, as of `flax.nnx.List`
    if name in branch.children:
        raise corrupt(file, f"the leaf {show_path(path)!r} is listed twice, or as both a leaf and a branch")
    branch.children[name] = node


def _sort_sequence(branch: Branch, path: Path, file: Location) -> None:
    """Put the children of a list in the order of their indices; raise if one is missing."""
    expected = [str(index) for index in range(len(branch.children))]
    if branch.children.keys() != set(expected):
        found = f"the sequence {show_path(path)!r} has the indices {sorted(branch.children)[:8]}"
        raise corrupt(file, f"{found}, expected 0 to {len(expected) - 1}")
    branch.children = {index: branch.children[index] for index in expected}


def _annotated(node: Node, annotation: Branch | None) -> Node:
    """Apply an annotation to a branch, or to a node without values."""
    if annotation is None:
        return node
    if node is None and annotation.container is Container.NAMEDTUPLE:
        return Branch({}, Container.NAMEDTUPLE)
    if isinstance(node, Branch):
        if node.container.is_sequence == annotation.container.is_sequence:
            node.container = annotation.container
            node.type_name = annotation.type_name
        node.int_keys = annotation.int_keys & frozenset(node.children)
    return node
