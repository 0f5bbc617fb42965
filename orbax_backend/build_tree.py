"""Build the tree that a checkpoint's entries describe."""

from __future__ import annotations

from collections.abc import Sequence

from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import SEQUENCE_KEY, TREE_METADATA
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, show_path

from .files import corrupt
from .msgpack_file import Kinds
from .tree_structure import Structure
from .type_annotations import ContainerType


def build_tree(structure: Structure, leaves: Sequence[Node]) -> Node:
    """Return the tree of leaves, one per entry; raise if the entries do not form a tree."""
    if structure.is_single_array:
        return leaves[0]
    containers = structure.rich_types
    if structure.annotations is not None:
        containers = {**containers, **structure.annotations.containers}
    if len(leaves) == 1 and not structure.entries[0].path:
        return _annotated(leaves[0], containers.get(()))
    builder = _Builder(structure.location / TREE_METADATA)
    for entry, leaf in zip(structure.entries, leaves, strict=True):
        builder.put(entry.path, entry.kinds, leaf)
    builder.order_sequences()
    for path, annotation in containers.items():
        builder.annotate(path, annotation)
    return builder.branches[()][0] if leaves else _annotated(Branch({}), containers.get(()))


class _Builder:
    def __init__(self, file: Location) -> None:
        self._file = file
        # Path of each branch → the branch, and Orbax's key types on the way to its children.
        self.branches: dict[Path, tuple[Branch, Kinds]] = {}

    def put(self, path: Path, kinds: Kinds, node: Node) -> None:
        """Put a node into its branch, which is made if it is not there yet."""
        if not path:
            raise corrupt(self._file, "it lists the whole tree as one leaf and other leaves besides")
        parent, name = path[:-1], path[-1]
        known = self.branches.get(parent)
        if known is None:
            branch = Branch({}, Container.LIST if kinds[-1] == SEQUENCE_KEY else Container.DICT)
            known = self.branches[parent] = branch, kinds
            if parent:
                self.put(parent, kinds[:-1], branch)
        branch, expected = known
        if kinds != expected:
            if kinds[:-1] != expected[:-1]:
                raise corrupt(self._file, f"the leaf {show_path(path)!r} contradicts the entries before it")
            branch.container = Container.DICT  # children by index and by name, as of `flax.nnx.List`
        if name in branch.children:
            raise corrupt(self._file, f"the leaf {show_path(path)!r} is listed twice, or as both a leaf and a branch")
        branch.children[name] = node

    def order_sequences(self) -> None:
        """Order the children of sequences by index."""
        for path, (branch, _) in self.branches.items():
            if branch.container is not Container.LIST:
                continue
            expected = [str(index) for index in range(len(branch.children))]
            if branch.children.keys() != set(expected):
                found = f"the sequence {show_path(path)!r} has the indices {sorted(branch.children)[:8]}"
                raise corrupt(self._file, f"{found}, expected 0 to {len(expected) - 1}")
            branch.children = {index: branch.children[index] for index in expected}

    def annotate(self, path: Path, annotation: ContainerType) -> None:
        """Apply an annotation to a branch, or to a node without values."""
        if path in self.branches:
            _annotated(self.branches[path][0], annotation)
        elif path and path[:-1] in self.branches:
            children = self.branches[path[:-1]][0].children
            if path[-1] in children:
                children[path[-1]] = _annotated(children[path[-1]], annotation)


def _annotated(node: Node, annotation: ContainerType | None) -> Node:
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
