"""What suggestions compare: the shape and kind of every leaf, and which subtrees belong to optimizers."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, shape_and_dtype

Look = tuple[tuple[int, ...], str]  # shape; kind: f(loat), i(nteger), b(ool), c(omplex), key, text
Contents = Counter[tuple[str, Look]]  # how many leaves of a name and look a subtree has, wherever in it
EMPTY: Look = ((), "empty")
KEPT: Look = ((), "kept")
_PYTHON = {bool: "b", int: "i", float: "f", complex: "c"}
_KINDS = {LeafKind.BOOL: "b", LeafKind.INT: "i", LeafKind.FLOAT: "f", LeafKind.COMPLEX: "c"}
# What optax, and flax.optim before it, call the arrays that they keep beside each parameter.
_MOMENTS = (
    "mu nu trace acc_grads mu_max nu_max v v_row v_col m momentum grad_ema grad_sq_ema ema sum_of_squares mean_grads "
    "prev_updates e_g e_x second_moment diag_accumulator"
)
MOMENTS = frozenset(_MOMENTS.split())
_OPTIMIZER = re.compile(r"opt|optim|optimizer|opt_states?|optim_states?|optimizer_states?|tx_state|opt_\w+|\w+_opt")
_MARKS = MOMENTS | {"count", "hyperparams", "inner_state", "inner_states", "mini_step"}


@functools.cache
def kind_of(dtype: Any) -> str:
    """Return the kind of an array's dtype; unlike in ``dtype.kind``, bfloat16 and its like are floats."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if jax.numpy.issubdtype(dtype, np.floating):
        return "f"
    return {"i": "i", "u": "i", "b": "b", "c": "c"}.get(np.dtype(dtype).kind, "text")


def look(leaf: Any) -> Look:
    """Return what can be compared of a leaf: stored, derived, or a target's own."""
    if isinstance(leaf, LeafHandle):
        if leaf.kind is LeafKind.PRNG_KEY:
            return leaf.shape[:-1], "key"
        return leaf.shape, kind_of(leaf.dtype) if leaf.dtype is not None else _KINDS.get(leaf.kind, "text")
    if leaf is None or isinstance(leaf, Branch):
        return EMPTY
    if leaf is Own.TARGET:
        return KEPT
    if isinstance(leaf, Derived):
        return leaf.shape or (), kind_of(leaf.dtype) if leaf.dtype is not None else "text"
    if state_dict.is_prng_key(leaf):
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
    """Key path → look of every leaf; nodes without children are `EMPTY`."""
    return {path: look(leaf) for path, leaf in iter_leaves(tree)}


def node_at(tree: Node, path: Path) -> Node:
    """Return the node at a key path, or None."""
    for name in path:
        if not isinstance(tree, Branch) or name not in tree.children:
            return None
        tree = tree.children[name]
    return tree


def items(node: Node) -> dict[Path, Look]:
    """Like `flatten`, without what holds no values."""
    return {path: seen for path, seen in flatten(node).items() if seen != EMPTY}


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """What a key path says about the role of its leaf.

    Attributes:
        field: the optimizer's name for it (``mu``, ``count``, …); empty for parameters, statistics and the rest.
        prefix: key path of the optimizer's node.
        suffix: key path of the parameter that it belongs to, or of the leaf itself.
    """

    field: str
    prefix: Path
    suffix: Path


def bare(path: Path) -> Path:
    """Return a key path without NNX's trailing ``value``."""
    return path[:-1] if len(path) > 1 and path[-1] == "value" else path


class Roles:
    """Tells the leaves of optimizers from others, by the names in one tree."""

    def __init__(self, tree: Node):
        self.roots = set(_optimizer_roots(tree, ()))

    def is_optimizer(self, path: Path) -> bool:
        """Return whether a key path is at or below the root of an optimizer's state."""
        if path[:2] == ("optimizer", "target"):  # where flax.optim had the parameters
            return False
        return any(path[:end] in self.roots for end in range(len(path) + 1))

    def spot(self, path: Path) -> Spot:
        """Return the role of the leaf at a key path."""
        if not self.is_optimizer(path):
            return Spot("", (), path)
        if path[-1] in ("grad_ema", "grad_sq_ema", "momentum"):  # flax.optim: below each parameter
            field = {"grad_ema": "mu", "grad_sq_ema": "nu", "momentum": "trace"}[path[-1]]
            return Spot(field, path[:2], path[path.index("param_states") + 1 : -1] if "param_states" in path else path)
        for number, name in enumerate(path):
            if name in MOMENTS and number:
                return Spot(name, path[:number], bare(path[number + 1 :]))
        named = path[:-1] if path[-1] == "value" and len(path) > 1 else path
        return Spot(named[-1] if named else "", named[:-1], ())


def _optimizer_roots(tree: Node, path: Path) -> Iterator[Path]:
    if not isinstance(tree, Branch) or "params" in path or (path and path[-1] in ("batch_stats", "ema_params")):
        return
    named = bool(path) and _OPTIMIZER.fullmatch(path[-1]) is not None
    if named and (not any(items(tree).values()) or _has_marks(tree)):
        yield path
    elif {"mu", "nu"} <= tree.children.keys() or {"trace"} == tree.children.keys():
        yield path[:1]
    else:
        for name, child in tree.children.items():
            yield from _optimizer_roots(child, (*path, name))


def _has_marks(tree: Node) -> bool:
    return any(_MARKS & branch.children.keys() for _, branch in iter_branches(tree)) or (
        isinstance(tree, Branch) and {"target", "state"} <= tree.children.keys()
    )


class Memo:
    """What subtrees hold, computed once for each."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[Node, Contents, int]] = {}
        self._named: dict[int, tuple[Node, int]] = {}

    def contents(self, node: Node, name: str = "") -> Contents:
        """Return how many leaves of a name and look a subtree has, whatever its modules are called."""
        if not isinstance(node, Branch):
            seen = look(node)
            return Counter() if seen == EMPTY else Counter({(name, seen): 1})
        return self._known(node)[1]

    def print(self, node: Node) -> int:
        """Return a number that is equal where the contents are."""
        return self._known(node)[2] if isinstance(node, Branch) else hash(look(node))

    def _known(self, node: Branch) -> tuple[Node, Contents, int]:
        known = self._contents.get(id(node))
        if known is None:
            found: Contents = Counter()
            for name, child in node.children.items():
                found.update(self.contents(child, name))
            known = self._contents[id(node)] = (node, found, hash(frozenset(found.items())))
        return known

    def named(self, node: Node) -> int:
        """Return a number that is equal where names, shapes and kinds of all leaves are."""
        if not isinstance(node, Branch):
            return hash(look(node))
        known = self._named.get(id(node))
        if known is None:
            parts = frozenset(
                (name, self.named(child)) for name, child in node.children.items() if self.contents(child)
            )
            known = self._named[id(node)] = (node, hash(parts))
        return known[1]

    def has_arrays(self, node: Node) -> bool:
        """Return whether more than numbers and texts are held, which would be taken for each other too easily."""
        return any(shape for _, (shape, _) in self.contents(node))
