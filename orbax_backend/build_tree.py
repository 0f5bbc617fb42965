"""Build the tree that a checkpoint's entries describe."""

from __future__ import annotations

import os
from typing import Any

from flax_ckpt_compat._core.orbax_layout import TREE_METADATA
from flax_ckpt_compat._core.tree import Branch, Container, Path, show_path

from .aggregate import Keys
from .json_files import corrupt
from .metadata import SEQUENCE_KEY
from .structure import LeafEntry, Structure
from .type_annotations import TypeAnnotations


def build_tree(structure: Structure, leaves: list[Any]) -> Any:
    """Return the tree of branches and leaves.

    Args:
        structure: the stored tree.
        leaves: one per entry of the structure, in order.

    Raises:
        CorruptCheckpointError: the entries do not form a tree.
    """
    file = os.path.join(structure.path, TREE_METADATA)
    if structure.is_single_array:
        return leaves[0]
    if len(leaves) == 1 and not structure.entries[0].keys:
        return _annotate(leaves[0], (), structure.annotations)
    root = Branch({})
    kinds: dict[int, int] = {}
    # Leaves of one branch mostly follow one another.
    above: Keys | None = None
    branch = root
    for entry, leaf in zip(structure.entries, leaves, strict=True):
        keys = entry.keys
        if keys and keys[:-1] == above and keys[-1][0] not in branch.children and keys[-1][1] == kinds[id(branch)]:
            branch.children[keys[-1][0]] = leaf
        else:
            branch, above = _insert(root, entry, leaf, kinds, file), keys[:-1]
    _finish(root, (), kinds, structure.annotations, file)
    return root


def _insert(root: Branch, entry: LeafEntry, leaf: Any, kinds: dict[int, int], file: str) -> Branch:
    """Insert a leaf and its missing branches; return its parent."""
    node: Any = root
    keystr = show_path(entry.path)
    for depth, (name, kind) in enumerate(entry.keys):
        if not isinstance(node, Branch) or kinds.setdefault(id(node), kind) != kind:
            raise corrupt(file, f"the leaf {keystr!r} contradicts the entries before it")
        if depth + 1 == len(entry.keys):
            if name in node.children:
                raise corrupt(file, f"the leaf {keystr!r} is listed twice, or as both a leaf and a branch")
            node.children[name] = leaf
            return node
        node = node.children.setdefault(name, Branch({}))
    raise corrupt(file, "it lists the whole tree as one leaf and other leaves besides")


def _finish(branch: Branch, path: Path, kinds: dict[int, int], annotations: TypeAnnotations | None, file: str) -> None:
    """Order sequences and apply the type annotations."""
    if kinds.get(id(branch)) == SEQUENCE_KEY:
        expected = [str(index) for index in range(len(branch.children))]
        if set(branch.children) != set(expected):
            raise corrupt(
                file,
                f"the sequence {show_path(path)!r} has the indices {sorted(branch.children)[:8]}, "
                f"expected 0 to {len(expected) - 1}",
            )
        branch.children = {index: branch.children[index] for index in expected}
        branch.container = Container.LIST
    for name, child in branch.children.items():
        if isinstance(child, Branch) and child.children:
            _finish(child, (*path, name), kinds, annotations, file)
        elif child is None or isinstance(child, Branch):  # besides parents, only nodes without values are annotated
            branch.children[name] = _annotate(child, (*path, name), annotations)
    _annotate(branch, path, annotations)


def _annotate(node: Any, path: Path, annotations: TypeAnnotations | None) -> Any:
    annotation = annotations.containers.get(path) if annotations else None
    if annotation is None:
        return node
    if node is None and annotation.container is Container.NAMEDTUPLE:
        return Branch({}, Container.NAMEDTUPLE)
    if isinstance(node, Branch):
        if node.container.is_sequence == annotation.container.is_sequence:
            node.container = annotation.container
        node.int_keys = annotation.int_keys & frozenset(node.children)
    return node
