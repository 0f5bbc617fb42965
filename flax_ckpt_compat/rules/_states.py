"""Find the states inside an optimizer's state: nodes with named fields, in the target and in checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_branches, iter_leaves, node_at
from flax_ckpt_compat._trees.leaf_sources import Derived, shape_and_dtype

# Fields of optax's states, to recognize one if the target has no namedtuples, as in NNX.
_FIELDS = frozenset(("count", "mu", "nu", "trace", "ema", "v_row", "sum_of_squares", "acc_grads", "notfinite_count"))
_NNX_VALUE = "value"  # the last name of every leaf of an nnx.State


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A node with named fields that holds values of its own, such as Adam's count, mu and nu."""

    path: Path  # from the root of the optimizer's state
    node: Branch
    leaves: dict[Path, Any]  # by key path from the node, without those of inner states
    # For the target's states only: names in the path that the user gave; all numbers in it are indices.
    labels: frozenset[str] = frozenset()
    is_in_order: bool = False
    _common_paths: dict[State, list[Path]] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the fields."""
        return frozenset(self.node.children)

    @functools.cached_property
    def moments(self) -> dict[Path, Any]:
        """Return the leaves that belong to parameters."""
        return {
            path: leaf for path, leaf in self.leaves.items() if _shape(leaf) or len(path) - (path[-1] == _NNX_VALUE) > 1
        }

    @property
    def plain(self) -> Path:
        """Return the path without numbers."""
        return tuple(name for name in self.path if not name.isdecimal())

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers in the path."""
        return tuple(int(name) for name in self.path if name.isdecimal())

    def order(self) -> tuple[tuple[bool, int, str], ...]:
        """Return a sort key of the path: numbers by value, independent of the format's order of names."""
        return tuple((not one.isdecimal(), int(one) if one.isdecimal() else 0, one) for one in self.path)

    def common_paths(self, other: State) -> list[Path]:
        """Return paths of the leaves that another state has in the same shape: of a parameter all moments, or none."""
        if other not in self._common_paths:
            there = other.leaves
            both = {path: leaf for path, leaf in self.moments.items() if there.get(path) is not None}
            differ = {path[1:] for path, leaf in both.items() if not _fits(there[path], leaf)}
            self._common_paths[other] = [
                path
                for path, leaf in self.leaves.items()
                if _fits(there.get(path), leaf) and not (path in self.moments and path[1:] in differ)
            ]
        return self._common_paths[other]

    def fit(self, other: State) -> tuple[int, int]:
        """Rate the fit of a stored state: number of common leaves, then of the user's names in its path."""
        return len(self.common_paths(other)), len(self.labels & set(other.path))

    def overlap(self, others: list[State]) -> bool:
        """Return whether two of several stored states have moments of the same parameter, in any shape."""
        held = [path for one in others for path in self.moments if one.leaves.get(path) is not None]
        return len(held) > len(set(held))

    def is_nearer(self, one: State, other: State) -> bool:
        """Return whether one of two stored states with common leaves has more of this state's names in its path."""
        if self.fit(one)[1] <= self.fit(other)[1]:
            return False
        return any(
            path in self.moments or not self.moments for path in {*self.common_paths(one)} & {*self.common_paths(other)}
        )

    def may_come_from(self, other: State) -> bool:
        """Return whether another state has leaves for this one other than counts without their moments."""
        common_paths = self.common_paths(other)
        return any(path in self.moments for path in common_paths) if self.moments else bool(common_paths)


def target_states(node: Node) -> Iterator[State]:
    """Yield the states in the target: its namedtuples, or, without any, nodes with optax's field names."""
    nodes = [(path, branch) for path, branch in iter_branches(node) if branch.children]
    tuples = [path for path, branch in nodes if branch.container is Container.NAMEDTUPLE]
    yield from _at(node, tuples or [path for path, branch in nodes if branch.children.keys() & _FIELDS])


def alike(first: Branch, second: Branch) -> bool:
    """Return whether two nodes have the same fields; empty ones may be missing, as releases of optax add fields."""
    fields = {**first.children, **second.children}
    return all(is_empty(fields[name]) for name in first.children.keys() ^ second.children.keys())


def _at(node: Node, paths: list[Path]) -> Iterator[State]:
    for path in paths:
        inner = [other[len(path) :] for other in paths if other != path and other[: len(path)] == path]
        branch = node_at(node, path)
        leaves = leaves_of(branch).items()
        own = {below: leaf for below, leaf in leaves if not any(below[: len(one)] == one for one in inner)}
        if own:
            way = [(node_at(node, path[:end]).container, name) for end, name in enumerate(path)]
            labels = frozenset(name for kind, name in way if kind is Container.DICT and not name.isdecimal())
            yield State(path, branch, own, labels, all(kind.is_sequence for kind, name in way if name.isdecimal()))


def leaves_of(branch: Branch) -> dict[Path, Any]:
    """Return the leaves of a node by key path, without empty branches."""
    return {path: leaf for path, leaf in iter_leaves(branch) if not isinstance(leaf, Branch)}


def is_empty(node: Node) -> bool:
    """Return whether a node is None or a branch without children."""
    return node is None or (isinstance(node, Branch) and not node.children)


def _shape(leaf: Any) -> tuple[int, ...]:
    return shape_and_dtype(leaf)[0] or ()


def _fits(stored: Any, own: Any) -> bool:
    """Return whether a stored leaf has the shape of the target's."""
    shape = _shape(own)
    if isinstance(stored, LeafHandle) and stored.kind is LeafKind.PRNG_KEY:
        return stored.shape[: len(shape)] == shape
    if isinstance(stored, LeafHandle | Derived):
        return stored.shape == shape
    return False
