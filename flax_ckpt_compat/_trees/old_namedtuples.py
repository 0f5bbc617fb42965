"""Convert namedtuples as flax before 0.3.6 wrote them: three maps ``name``, ``fields`` and ``values`` instead of one.

A user's dict may have these keys too, so only nodes that are namedtuples in the target are read as such.
"""

from __future__ import annotations

from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_branches

KEYS = frozenset(("name", "fields", "values"))


def is_misread(node: Branch) -> bool:
    """Return whether a current namedtuple has exactly these field names: Flax takes its state for an old one."""
    return node.container is Container.NAMEDTUPLE and node.children.keys() == KEYS


def fields_of(stored: Branch, target: Branch) -> dict[str, Node]:
    """Return the children of a stored branch by the target's field names."""
    if target.container is not Container.NAMEDTUPLE or is_misread(target):
        return stored.children
    old = _old_fields(stored)
    return stored.children if old is None else old


def modernize(stored: Node, target: Node) -> Node:
    """Rewrite the old namedtuples of a checkpoint as they are written since, so that rules find their fields.

    Rules run before names are those of the target, so an old namedtuple also counts where the target has one with the
    same fields elsewhere, unless a node of the target has the three keys itself."""
    branches = [branch for _, branch in iter_branches(target)]
    known = {frozenset(one.children) for one in branches if one.container is Container.NAMEDTUPLE}
    if any(one.children.keys() == KEYS for one in branches):
        known.clear()

    def visit(node: Node, wanted: Node) -> Node:
        if not isinstance(node, Branch):
            return node
        children = fields_of(node, wanted) if isinstance(wanted, Branch) else node.children
        if children is node.children and known:
            old = _old_fields(node)
            children = children if old is None or frozenset(old) not in known else old
        below = wanted.children if isinstance(wanted, Branch) else {}
        new = {name: visit(child, below.get(name)) for name, child in children.items()}
        return Branch(new, node.container, node.int_keys) if children is node.children else Branch(new)

    has_any = any(one.container is Container.NAMEDTUPLE for one in branches)
    return visit(stored, target) if has_any else stored


def as_old(state: Any, path: Path) -> Any:
    """Return a state dict in which one node is an old namedtuple, so that Flax does not misread it as one."""
    if type(state) is not dict:  # a pytree that Flax does not go into, rebuilt already
        return state
    if path:
        return {**state, path[0]: as_old(state[path[0]], path[1:])} if path[0] in state else state
    names = dict(enumerate(state))
    return {
        "name": "",
        "fields": {str(number): name for number, name in names.items()},
        "values": {str(number): state[name] for number, name in names.items()},
    }


def _old_fields(stored: Branch) -> dict[str, Node] | None:
    """Return field → node if a branch is like an old namedtuple: as many values as fields, whose names are unique."""
    fields, values = stored.children.get("fields"), stored.children.get("values")
    if stored.children.keys() != KEYS or not isinstance(fields, Branch) or not isinstance(values, Branch):
        return None
    numbers = [str(number) for number in range(len(fields.children))]
    if not fields.children.keys() == values.children.keys() == set(numbers):
        return None
    names = [_text(fields.children[number]) for number in numbers]
    if None in names or len(set(names)) != len(names):
        return None
    return {str(name): values.children[number] for name, number in zip(names, numbers, strict=True)}


def _text(leaf: Node) -> str | None:
    value = leaf.read() if isinstance(leaf, LeafHandle) and leaf.kind is not LeafKind.ARRAY else None
    return value if isinstance(value, str) else None
