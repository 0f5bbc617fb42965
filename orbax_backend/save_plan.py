"""Plan what a save stores, before anything is written."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.errors import NameCollisionError, UnsupportedLeafError
from flax_ckpt_compat._core.orbax_layout import JAX_ARRAY
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, show_path

from . import stored_names
from .encode_leaves import EncodedLeaf, Encoder, encode_text_as_bytes
from .recorded_checksums import Record
from .stored_names import EMPTY_CONTAINERS, NONE, STRING
from .type_annotations import TypeAnnotations

# Orbax's names of empty nodes; real Orbax stores empty containers of other types as None.
EMPTY_MARKERS = {container: name for name, container in EMPTY_CONTAINERS.items()} | {Container.NAMEDTUPLE: NONE}

# TensorStore's index takes names of 65,535 bytes, to which it adds those of chunks.
_MAX_NAME = 65_000


class Entry(NamedTuple):
    """One entry of the stored tree: a leaf or an empty node."""

    path: Path
    kinds: tuple[int, ...]  # Orbax's key type of each name of the path
    name: str
    value_type: str  # Orbax's name of its type
    stored: EncodedLeaf | None = None  # None for an empty node


@dataclasses.dataclass(slots=True)
class SavePlan:
    """The content of a checkpoint."""

    entries: list[Entry] = dataclasses.field(default_factory=list)  # in stored order
    arrays: list[tuple[Entry, EncodedLeaf]] = dataclasses.field(default_factory=list)  # those in the array database
    jax_arrays: list[tuple[str, EncodedLeaf]] = dataclasses.field(default_factory=list)  # those of them, by name
    strings: dict[str, Any] = dataclasses.field(default_factory=dict)  # content of ``_strings.json``
    # Types that Orbax's format does not keep.
    annotations: TypeAnnotations = dataclasses.field(default_factory=TypeAnnotations)
    started_ns: int = dataclasses.field(default_factory=time.time_ns)  # start of the save, in ns since 1970
    record: Record = dataclasses.field(default_factory=Record)  # of the JSON files that this process has written


def make_plan(tree: Node, multiprocess: bool = False) -> SavePlan:
    """Plan how each leaf of a tree is stored; with ``multiprocess``, arrays may be spread over processes."""
    plan = SavePlan()
    with memory.pause_gc():
        _Planner(plan, multiprocess).add(tree, (), ())
    return plan


class _Planner:
    """Adds the entries of a tree to a plan."""

    def __init__(self, plan: SavePlan, multiprocess: bool) -> None:
        self._plan, self._encoder = plan, Encoder(multiprocess)
        self._paths: dict[str, Path] = {}  # of leaves, by the prefixes of their keys

    def add(self, node: Node, path: Path, kinds: tuple[int, ...]) -> None:
        """Add a node and all below it, in stored order."""
        if not isinstance(node, Branch):
            self._add_entry(node, path, kinds)
            return
        self._plan.annotations.add_branch(path, node)
        if not node.children:
            self._add_entry(node, path, kinds)
        below = (*kinds, stored_names.SEQUENCE_KEY if node.container.is_sequence else stored_names.DICT_KEY)
        for name in _stored_order(node):
            self.add(node.children[name], (*path, name), below)

    def _add_entry(self, node: Node, path: Path, kinds: tuple[int, ...]) -> None:
        plan, name = self._plan, ".".join(path)
        if not name.isascii() or len(name) > _MAX_NAME:
            _check_name(name, path)
        if node is None or isinstance(node, Branch):
            marker = EMPTY_MARKERS[node.container] if isinstance(node, Branch) else NONE
            plan.entries.append(Entry(path, kinds, name, marker))
            return
        other = self._paths.setdefault(stored_names.key_prefix(name), path)
        if other is not path:
            raise NameCollisionError(
                f"the leaves {show_path(other)!r} ({other!r}) and {show_path(path)!r} ({path!r}) would both be stored "
                f"as {name!r}, so one would be lost; rename one of them",
                leaf=show_path(path),
            )
        stored = self._encoder.encode(node, path)
        if stored.value_type == STRING and not _put_string(plan.strings, name, stored.source):
            stored = encode_text_as_bytes(stored.source)
        if stored.annotation is not None:
            plan.annotations.leaves[name] = stored.annotation
        entry = Entry(path, kinds, name, stored.value_type, stored)
        plan.entries.append(entry)
        if stored.value_type != STRING:
            plan.arrays.append((entry, stored))
        if stored.value_type == JAX_ARRAY:
            plan.jax_arrays.append((name, stored))


def _check_name(name: str, path: Path) -> None:
    """Raise if a name is not valid Unicode, or too long."""
    keystr = show_path(path)
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        keystr = keystr.encode(errors="backslashreplace").decode()
        what = f"the key path {keystr} holds half a surrogate pair, which has no UTF-8 form; rename the key"
        raise UnsupportedLeafError(what, leaf=keystr) from error
    if size > _MAX_NAME:
        what = f"the key path {keystr[:100]}… has {size} bytes, and Orbax's format takes {_MAX_NAME}"
        raise UnsupportedLeafError(f"{what}; shorten the keys, or save as msgpack", leaf=keystr)


def _stored_order(branch: Branch) -> list[str]:
    """Return the names of children in JAX's order: dict keys sorted, ints as numbers; others as declared."""
    if branch.container is not Container.DICT:
        return list(branch.children)
    if branch.int_keys and branch.int_keys == frozenset(branch.children):
        return sorted(branch.children, key=int)
    return sorted(branch.children)


def _put_string(strings: dict[str, Any], name: str, text: str) -> bool:
    """Put a text where real Orbax looks it up; return False if another text is in the way, or it has no place."""
    tokens = stored_names.pointer_tokens(name)
    if tokens is None:
        return False
    parent: Any = strings
    for token in tokens[:-1]:
        parent = parent.setdefault(token, {}) if isinstance(parent, dict) else None
    if not isinstance(parent, dict) or tokens[-1] in parent:
        return False
    parent[tokens[-1]] = text
    return True
