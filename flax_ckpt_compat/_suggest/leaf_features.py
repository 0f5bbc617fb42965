"""Describe leaves for comparison: the look of each leaf, the contents of subtrees, the roles of optimizer leaves."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.dtypes import is_float, is_integer
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_key, shape_and_dtype

Look = tuple[tuple[int, ...], str]  # shape; kind: f(loat), i(nteger), b(ool), c(omplex), key, text
Contents = Counter[tuple[str, Look]]  # number of leaves of a name and look in a subtree, wherever in it
EMPTY: Look = ((), "empty")
KEPT: Look = ((), "kept")
_PYTHON = {bool: "b", int: "i", float: "f", complex: "c"}
_KINDS = {LeafKind.BOOL: "b", LeafKind.INT: "i", LeafKind.FLOAT: "f", LeafKind.COMPLEX: "c"}
# Names that optax, and flax.optim before it, give to the arrays that they keep beside each parameter.
_MOMENTS = (
    "mu nu trace acc_grads mu_max nu_max v v_row v_col m momentum grad_ema grad_sq_ema ema sum_of_squares mean_grads "
    "prev_updates e_g e_x second_moment diag_accumulator"
)
MOMENTS = frozenset(_MOMENTS.split())
_OPTIMIZER = re.compile(r"opt|optim|optimizer|opt_states?|optim_states?|optimizer_states?|tx_state|opt_\w+|\w+_opt")
_MARKS = MOMENTS | {"count", "hyperparams", "inner_state", "inner_states", "mini_step"}
# Orders of axes between torch's weights and Flax's kernels, by the number of axes.
_TORCH_ORDERS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 0),),
    3: ((2, 1, 0),),
    4: ((2, 3, 1, 0), (3, 2, 0, 1), (2, 3, 0, 1)),
    5: ((2, 3, 4, 1, 0), (4, 3, 0, 1, 2), (3, 4, 0, 1, 2)),
}
_WEIGHTS = frozenset(("weight", "weights", "w"))


@functools.cache
def kind_of(dtype: Any) -> str:
    """Return the kind of an array's dtype; unlike in ``dtype.kind``, those of ml_dtypes are floats or integers."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    dtype = np.dtype(dtype)
    return "f" if is_float(dtype) else "i" if is_integer(dtype) else {"b": "b", "c": "c"}.get(dtype.kind, "text")


def look(leaf: Any) -> Look:
    """Return the look of a leaf, stored, derived, or a target's own."""
    if isinstance(leaf, LeafHandle):
        if leaf.kind is LeafKind.PRNG_KEY:
            return leaf.shape[:-1], "key"
        return leaf.shape, kind_of(leaf.dtype) if leaf.dtype is not None else _KINDS.get(leaf.kind, "text")
    if leaf is None or isinstance(leaf, Branch):
        return EMPTY
    if leaf is Own.KEEP_TARGET:
        return KEPT
    if isinstance(leaf, Derived):
        kind = "key" if is_key(leaf) else "text"
        return leaf.shape or (), kind_of(leaf.dtype) if leaf.dtype is not None else kind
    if prng_keys.is_prng_key(leaf):
        return tuple(leaf.shape), "key"
    shape, dtype = shape_and_dtype(leaf)
    if shape is not None and dtype is not None:
        return shape, kind_of(dtype)
    return (), _PYTHON.get(type(leaf), "text")


def fits(stored: Look, target: Look) -> bool:
    """Return whether a stored leaf fits the target's leaf of the same path."""
    # A raw key stands where a typed one is asked for, or the other way round: restoring judges those.
    keys = "key" in (stored[1], target[1])
    return stored == target or stored[1] == "kept" or keys or (stored[0] == target[0] and stored[1] != "empty")


def flatten(tree: Node) -> dict[Path, Look]:
    """Map the key paths below a node to the looks of the leaves; nodes without children are `EMPTY`."""
    return {path: look(leaf) for path, leaf in iter_leaves(tree)}


class Spot(NamedTuple):
    """Role of a leaf."""

    field: str  # the optimizer's name for it (``mu``, ``count``, …); empty for parameters, statistics and the rest
    suffix: Path  # of the parameter that it belongs to, or of the leaf itself


def bare(path: Path) -> Path:
    """Return a key path without NNX's trailing ``value``."""
    return path[:-1] if len(path) > 1 and path[-1] == "value" else path


class Roles:
    """Distinguish the leaves of optimizers from others, by the names in one tree."""

    def __init__(self, tree: Node):
        self.roots = set(_optimizer_roots(tree, ()))

    def root_of(self, path: Path) -> Path:
        """Return the root of the optimizer's state that a key path is in; () if it is in none."""
        return next((root for root in self.roots if path[: len(root)] == root), ())

    def is_optimizer(self, path: Path) -> bool:
        """Return whether a key path is at or below the root of an optimizer's state."""
        return bool(self.root_of(path)) or () in self.roots

    def spot(self, path: Path) -> Spot:
        """Return the role of the leaf at a key path."""
        if not self.is_optimizer(path):
            return Spot("", path)
        for number, name in enumerate(path):
            if name in MOMENTS and number:
                return Spot(name, bare(path[number + 1 :]))
        return Spot(bare(path)[-1], ())


def is_t5x(tree: Node) -> bool:
    """Return whether a checkpoint is laid out as T5X does: parameters in ``target``, the optimizer in ``state``."""
    state = tree.children.get("state") if isinstance(tree, Branch) and "target" in tree.children else None
    return isinstance(state, Branch) and "param_states" in state.children


def _optimizer_roots(tree: Node, path: Path, depth: int = 1) -> Iterator[Path]:
    """Yield the key paths of optimizers' states; ``depth`` is that of one without a name of its own."""
    if not isinstance(tree, Branch) or "params" in path or (path and path[-1] in ("batch_stats", "ema_params")):
        return
    if path[-1:] == ("param_states",):
        yield path
        return
    named = _is_named_optimizer(path[-1:], tree)
    if named and not _holds_more(tree):
        yield path
    elif {"mu", "nu"} <= tree.children.keys() or {"trace"} == tree.children.keys():
        yield path[:depth]
    else:
        depth = len(path) + 1 if "params" in tree.children else depth  # what is beside parameters holds none
        for name, child in tree.children.items():
            yield from _optimizer_roots(child, (*path, name), depth)


def _is_named_optimizer(name: Path, tree: Branch) -> bool:
    if not name or _OPTIMIZER.fullmatch(name[0]) is None:
        return False
    pre_optax = {"target", "state"} <= tree.children.keys()
    has_marks = pre_optax or any(_MARKS & branch.children.keys() for _, branch in iter_branches(tree))
    return has_marks or all(look(leaf) == EMPTY for _, leaf in iter_leaves(tree))


def _holds_more(tree: Branch) -> bool:
    """Return whether a node named like an optimizer holds parameters, too, beside the optimizer's state."""
    branches = {name: child for name, child in tree.children.items() if isinstance(child, Branch) and child.children}
    states = [name for name, child in branches.items() if _is_named_optimizer((name,), child)]
    return bool(states) and len(branches) > len(states)


@functools.lru_cache(10_000)
def _of_leaf(name: str, seen: Look) -> Contents:
    return Counter() if seen == EMPTY else Counter({(name, seen): 1})


class SubtreeMemo:
    """Cache of the contents of subtrees."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, Contents, int, int]] = {}  # with the node, so that its id stays its own

    def contents(self, node: Node, name: str = "") -> Contents:
        """Return how many leaves of each name and look a subtree has, regardless of its modules' names."""
        return self._facts(node)[1] if isinstance(node, Branch) else _of_leaf(name, look(node))

    def print(self, node: Node) -> int:
        """Return a number that is equal for equal contents."""
        return self._facts(node)[2] if isinstance(node, Branch) else hash(look(node))

    def named(self, node: Node) -> int:
        """Return a number that is equal for equal names, shapes and kinds of all leaves."""
        return self._facts(node)[3] if isinstance(node, Branch) else hash(look(node))

    def _facts(self, node: Branch) -> tuple[Node, Contents, int, int]:
        known = self._known.get(id(node))
        if known is None:
            found: Contents = Counter()
            for name, child in node.children.items():
                for leaf, count in self.contents(child, name).items():
                    found[leaf] += count
            named = hash(frozenset((name, self.named(child)) for name, child in node.children.items()))
            known = self._known[id(node)] = (node, found, hash(frozenset(found.items())), named)
        return known

    def has_arrays(self, node: Node) -> bool:
        """Return whether a subtree holds arrays: numbers and texts alone are too easily confused."""
        return any(shape for _, (shape, _) in self.contents(node))


def turned(stored: tuple[int, ...], wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the orders of axes, between torch's layout and Flax's, in which an array has a wanted shape."""
    orders = _TORCH_ORDERS.get(len(stored), ()) if len(stored) == len(wanted) else ()
    return [order for order in orders if tuple(stored[axis] for axis in order) == wanted]


def is_torch_name(one: str, other: str) -> bool:
    """Return whether one name is that of torch's weights, and the other Flax's of kernels."""
    return "kernel" in (one, other) and not _WEIGHTS.isdisjoint((one, other))
