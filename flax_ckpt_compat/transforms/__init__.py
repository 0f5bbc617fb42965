"""Transform trees as Orbax does: map an old tree's leaves to a new tree, merge trees, intersect trees."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Path, from_leaves, joined, show_path
from flax_ckpt_compat._trees.leaf_sources import Own
from flax_ckpt_compat._trees.state_dict import from_stored
from flax_ckpt_compat.transforms._resolve import (
    Entry,
    Leaves,
    Transforms,
    call_multi_value_fn,
    call_value_fn,
    check,
    named_leaves,
)

__all__ = ["RestoreArgs", "RestoreTransform", "Transform", "apply_transformations", "intersect_trees", "merge_trees"]
__dir__ = __all__.copy  # for completion

_log = logging.getLogger("flax_ckpt_compat")


@dataclasses.dataclass
class Transform:
    r"""Source of the target leaves whose key path matches a regular expression; the same as Orbax's.

    The expression is the transform's key in a pytree: ``{r"layer_(\d+)/(.*)": Transform(r"block_\1/\2")}``. It has to
    match the whole key path, joined with ``/``. Without arguments: the stored leaf of the same name.

    Attributes:
        original_key: the stored leaf's key path, joined with ``/``, with ``\1`` for what a group matched; or a tuple
            of names, taken literally.
        use_fallback: the target keeps its own value (if ``default_to_original`` is False: takes the stored one).
        value_fn: takes the stored value, returns the new one.
        multi_value_fn: takes the target's key path, joined with ``/``, and the old tree; returns the value.
    """

    original_key: str | tuple[str | int, ...] | None = None
    use_fallback: bool = False
    value_fn: Callable[..., Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass
class RestoreTransform(Transform):
    """A transform for restoring; its functions also take the `RestoreArgs` of the target's leaf.

    Attributes:
        multi_value_fn_input_args: inputs of the multi_value_fn: key path or regular expression of stored leaves →
            `RestoreArgs`, or None.
    """

    multi_value_fn_input_args: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class RestoreArgs:
    """Type, dtype, sharding and shape that a target asks for; None for no preference.

    Attributes:
        restore_type: ``np.ndarray``, ``jax.Array``, ``int``, …
        dtype: of an array or numpy scalar.
        sharding: of a ``jax.Array``.
        global_shape: of a ``jax.Array``.
    """

    restore_type: type | None = None
    dtype: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None


def restore_args(leaf: Any) -> RestoreArgs:
    """Return the `RestoreArgs` for a target's leaf; a ``jax.ShapeDtypeStruct`` stands for a ``jax.Array``."""
    if leaf is None:
        return RestoreArgs()
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return RestoreArgs(jax.Array, leaf.dtype, getattr(leaf, "sharding", None), tuple(leaf.shape))
    if isinstance(leaf, np.ndarray):
        return RestoreArgs(np.ndarray, leaf.dtype)
    return RestoreArgs(type(leaf), leaf.dtype if isinstance(leaf, np.generic) else None)


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool | None = True
) -> Any:
    """Return a tree with the structure of a new one and the values of an old one, mapped by transforms.

    If several transforms match a leaf, the last in the order of their sorted keys wins; only its function is called.

    Args:
        original_tree: the old pytree.
        transformations: pytree of transforms (ours or Orbax's); its keys are regular expressions over the new names.
        new_tree: the new pytree; leaves that are neither matched nor in the old tree keep their values.
        default_to_original: leaves that no transform matches come from the old tree, and fallbacks from the new one;
            if False, the other way round.

    Returns:
        A pytree; ``{}`` for a new tree without leaves, unless that is an object of its own.

    Raises:
        TransformError: an invalid transform, or one that asks for a leaf that is not in the old tree.
        NameCollisionError: two leaves have the same name when joined with ``/``.

    Example:
        >>> apply_transformations({"a": 1}, {"b": Transform(original_key="a")}, {"b": 0})
        {'b': 1}
    """
    leaves, structure = named_leaves(new_tree)
    if not leaves and not new_tree:
        return {}
    original, prepared = Leaves(named_leaves(original_tree)[0]), Transforms(transformations)
    new = {joined(path): own for path, own in leaves}
    if len(new) < len(leaves):
        twice = next(name for name, count in Counter(joined(path) for path, _ in leaves).items() if count > 1)
        raise NameCollisionError(f"the new tree has two leaves {twice!r}: a key contains '/'; rename one", leaf=twice)
    values, unknown = [], []
    for key, own in new.items():
        outcome = prepared.resolve(key, original.has, bool(default_to_original))
        if outcome is None or outcome is Own.KEEP_TARGET:
            values.append(own)
            if outcome is None:
                unknown.append(key)
        elif isinstance(outcome, Entry):
            values.append(call_multi_value_fn(outcome.transform, key, original_tree, restore_args(own), in_memory=True))
        else:
            value, transform = original.of(outcome.source), outcome.transform
            is_as_is = transform is None or transform.value_fn is None
            values.append(value if is_as_is else call_value_fn(transform, value, restore_args(own)))
    if unknown:
        _log.info("not in the original tree nor named by a transform, kept from the new tree: %s", one_line(unknown))
    return jax.tree_util.tree_unflatten(structure, values)


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """Merge the leaves of several trees; of leaves with the same name, the last tree's wins.

    Args:
        trees: pytrees.
        target: pytree with the structure that is wanted; what it does not ask for is dropped.

    Returns:
        A pytree like the target; without one, nested dicts whose keys are text, or the leaf itself if every tree is a
        single leaf.

    Raises:
        KeyError: the target asks for a leaf that no tree has.
        TypeError: without a target: one tree has a leaf where another has a subtree.
        TransformError: without a target: one tree is a bare leaf, another is not.
    """
    merged: dict[Path, Any] = {}
    for tree in trees:
        merged.update(named_leaves(tree)[0])
    return _built(merged, target)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """Return the leaves that all trees have, with the values and in the order of the last one.

    Args:
        trees: at least one pytree.
        target: pytree with the structure that is wanted; what it does not ask for is dropped.

    Returns:
        A pytree like the target; without one, nested dicts whose keys are text, or the leaf if the trees are one.

    Raises:
        KeyError: the target asks for a leaf that some tree lacks.
        TypeError: no trees.
    """
    if not trees:
        raise TypeError("intersect_trees needs at least one tree")
    flat = [dict(named_leaves(tree)[0]) for tree in trees]
    return _built({path: leaf for path, leaf in flat[-1].items() if all(path in one for one in flat)}, target)


def _built(leaves: Mapping[Path, Any], target: Any) -> Any:
    if target is None:
        if () in leaves and len(leaves) > 1:
            raise TransformError("a bare leaf cannot be merged with a tree that has names; give the leaf a name")
        try:
            return from_stored(from_leaves(leaves), None, "flax")
        except NameCollisionError as error:
            raise TypeError(f"{error}: one tree has a leaf where another has a subtree; rename one") from error
    wanted, structure = named_leaves(target)
    for path, _ in wanted:
        if path not in leaves:
            raise KeyError(f"{show_path(path)}: the target asks for this leaf, and the trees do not have it")
    return jax.tree_util.tree_unflatten(structure, [leaves[path] for path, _ in wanted])
