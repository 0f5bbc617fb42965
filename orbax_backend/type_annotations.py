"""Encode and decode type annotations: the exact types that Orbax's format does not keep.

They are in ``_METADATA["custom_metadata"]["flax_ckpt_compat"]``, where Orbax 0.12.8 allows any JSON and
ignores it (measured with `PyTreeCheckpointer`, `StandardCheckpointer` and v1 ``load``)::

    {"format": 1,
     "leaves": {NAME: {"kind": KIND, "dtype": DTYPE, "impl": IMPL}},     without the keys that have no value
     "containers": [[PATH, CONTAINER, INT_KEYS], …]}                     tuples, empty namedtuples, int keys

KIND is a value of `LeafKind`. DTYPE is the leaf's dtype if it is stored with another: integers of the same
width, or, if no integer has it, bytes along one more, last axis. PATH is a list of key names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax_ckpt_compat._core.backend import LeafKind
from flax_ckpt_compat._core.errors import UnrecognizedFormatError
from flax_ckpt_compat._core.tree import Branch, Container, Path

from .files import corrupt

_KEY = "flax_ckpt_compat"
_FORMAT = 1


class LeafType(NamedTuple):  # which hashes quickly: readers look every leaf's up
    """The type of a leaf; None where Orbax's format says enough."""

    kind: LeafKind | None = None
    dtype: str | None = None  # name of its dtype; ``str`` and ``bytes`` for numpy text scalars
    impl: str | None = None  # implementation of a PRNG key


@dataclasses.dataclass(slots=True)
class TypeAnnotations:
    """The annotations of a checkpoint: of leaves by stored name, of containers, without their children, by key path."""

    leaves: dict[str, LeafType] = dataclasses.field(default_factory=dict)
    containers: dict[Path, Branch] = dataclasses.field(default_factory=dict)

    def add_branch(self, path: Path, branch: Branch) -> None:
        """Annotate a branch if Orbax's format would restore another container."""
        empty_namedtuple = branch.container is Container.NAMEDTUPLE and not branch.children
        # Orbax's format has a marker for empty tuples.
        tuples = branch.container is Container.TUPLE and bool(branch.children)
        if empty_namedtuple or tuples or branch.int_keys:
            self.containers[path] = Branch({}, branch.container, branch.int_keys)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value of ``custom_metadata``."""
        leaves = {
            name: {key: getattr(text, "value", text) for key, text in leaf._asdict().items() if text}
            for name, leaf in self.leaves.items()
        }
        containers = [[list(path), one.container.value, sorted(one.int_keys)] for path, one in self.containers.items()]
        return {_KEY: {"format": _FORMAT, "leaves": leaves, "containers": containers}}


def parse_annotations(custom_metadata: object, file: str) -> TypeAnnotations | None:
    """Decode the annotations of a checkpoint, None if it has none; raise if they do not decode or are newer."""
    if not isinstance(custom_metadata, dict) or _KEY not in custom_metadata:
        return None
    value = custom_metadata[_KEY]
    if isinstance(value, dict) and value.get("format", _FORMAT) != _FORMAT:
        raise UnrecognizedFormatError(
            f"{file}: type annotations of format {value['format']!r} were found, this release reads format "
            f"{_FORMAT}; read it with the release of flax_ckpt_compat that wrote it, or a newer one",
            path=file,
        )
    try:
        leaves = {str(name): _leaf_from_json(annotation) for name, annotation in value["leaves"].items()}
        containers = {
            tuple(path): Branch({}, Container(container), _ints(int_keys))
            for path, container, int_keys in value["containers"]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"the type annotations under custom_metadata/{_KEY} do not decode ({error!r})"
        raise corrupt(file, what, "remove that entry to restore the values without their exact types") from error
    return TypeAnnotations(leaves, containers)


def parse_rich_types(metadata: Mapping[str, Any]) -> dict[Path, Branch]:
    """Return the tuples and namedtuples of a tree that Orbax saved with ``support_rich_types``; empty without it.

    What does not decode counts as not recorded: the entries of the tree tell all else."""
    text, found = metadata.get("value_metadata_tree"), dict[Path, Branch]()
    if isinstance(text, str):
        try:
            _add_rich_types(json.loads(text), (), found)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
    return found


def _add_rich_types(node: Any, path: Path, found: dict[Path, Branch]) -> None:
    # In a user's dict, "category" is a node: an object or a list.
    category = node.get("category") if isinstance(node, dict) else None
    children: list[tuple[str, Any]] = []
    if category == "namedtuple":
        children = [(entry["key"], entry["value"]) for entry in node["entries"]]
        found[path] = Branch({}, Container.NAMEDTUPLE, type_name=str(node["clazz"]))
    elif category == "custom" and node["clazz"] == "tuple":
        children = [(str(index), child) for index, child in enumerate(node["entries"])]
        found[path] = Branch({}, Container.TUPLE)
    elif isinstance(node, list):
        children = [(str(index), child) for index, child in enumerate(node)]
    elif isinstance(node, dict) and not isinstance(category, str):
        children = list(node.items())
    for name, child in children:
        _add_rich_types(child, (*path, name), found)


def _ints(names: list[str]) -> frozenset[str]:
    """Return names that were ints; raise ValueError if others are among them."""
    if any(str(int(name)) != name for name in names):
        raise ValueError(f"{names!r:.300} are not all ints")
    return frozenset(names)


def _leaf_from_json(annotation: dict[str, Any]) -> LeafType:
    kind, dtype, impl = annotation.get("kind"), annotation.get("dtype"), annotation.get("impl")
    if not all(text is None or isinstance(text, str) for text in (dtype, impl)) or kind == LeafKind.UNSUPPORTED.value:
        raise TypeError(f"{annotation!r} is not an annotation")
    return LeafType(LeafKind(kind) if kind is not None else None, dtype, impl)
