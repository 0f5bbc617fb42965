"""Ready-made steps from an old checkpoint to today's state; a list of them is what ``orbax_transforms`` takes, too.

========================================  ===========================================================================
rule                                      what it does
========================================  ===========================================================================
``rename(pattern, replacement)``          renames whole names that a pattern matches; takes a mapping, too
``move(source, to)``                      moves a subtree or leaf, or makes it the whole tree
``copy(source, to)``                      copies a subtree or leaf
``drop(*patterns)``                       leaves out subtrees or leaves
``from_target(*patterns)``                keeps the target's own values there
``from_checkpoint(path, *patterns)``      takes subtrees from another checkpoint
``wrap(name, at)``                        adds a level: params/… → params/model/…
``unwrap(name, at)``                      removes a level: params/model/… → params/…
``nest(separator, at)``                   splits names that hold a key path: a.b.c → a/b/c
``stack(pattern, into, axis, first)``     stacks layer_0 … layer_11 → layers, with one more axis
``unstack(pattern, into, axis, first)``   unstacks layers → layer_0 … layer_11
``fuse(names, into, axis)``               concatenates query, key, value → qkv
``split(pattern, into, axis, sizes)``     splits qkv → query, key, value
``transpose(pattern, axes)``              changes the order of axes
``reshape(pattern, shape)``               changes the shape of the same values
``split_axis(pattern, sizes, axis)``      makes several axes of one: 12 layers → 3 of 4
``merge_axes(pattern, axis, count)``      makes one axis of several
``pad(pattern, size, axis, value)``       makes arrays longer, with a number or the target's own values
``cut(pattern, size, axis)``              keeps the first values on an axis
``index(pattern, number, axis)``          takes one index of an axis
``unreplicate(pattern)``                  takes the first replica of a state saved replicated for ``jax.pmap``
``resize(pattern, shape, method, …)``     interpolates arrays, such as position embeddings
``cast(pattern, dtype)``                  changes the dtype, within its kind
``apply(pattern, function)``              computes arrays with your function
``wrap_key_data(pattern, impl)``          turns raw PRNG keys into typed ones
``key_data(pattern)``                     turns typed PRNG keys into raw ones
``optimizer_state(at, stored_at)``        takes the moments of parameters that still exist, else the target's own
``pre_linen(at)``                         reads checkpoints from before linen
``pre_optax()``                           reads checkpoints of ``flax.optim``
========================================  ===========================================================================

Patterns are regular expressions over key paths joined with ``/``, such as ``params/Dense_0/kernel``, and match whole
names. Rules that take places (``move``, ``copy``, ``drop``, ``from_target``, ``at``) match the whole key path of a
subtree or leaf: ``params/head``, ``.*/head``. All others match anywhere, so in the moments of an optimizer, too:
``head``; ``^params/head`` is one only; `rename` says more. An ``axis`` that is negative counts from the end.

All raise ``TransformError``: when they are made, for bad patterns and types; when they are applied, if a pattern
matches nothing, or what it matches does not fit. They raise ``NameCollisionError`` if two leaves would get one name.
"""

from __future__ import annotations

from flax_ckpt_compat.rules._rule import Rule
from flax_ckpt_compat.rules.arrays import (
    apply,
    cast,
    cut,
    index,
    key_data,
    merge_axes,
    pad,
    reshape,
    resize,
    split_axis,
    transpose,
    unreplicate,
    wrap_key_data,
)
from flax_ckpt_compat.rules.layers import fuse, split, stack, unstack
from flax_ckpt_compat.rules.names import copy, drop, from_checkpoint, from_target, move, nest, rename, unwrap, wrap
from flax_ckpt_compat.rules.old_flax import pre_linen, pre_optax
from flax_ckpt_compat.rules.optimizers import optimizer_state

__all__ = [
    "Rule", "apply", "cast", "copy", "cut", "drop", "from_checkpoint", "from_target", "fuse", "index", "key_data",
    "merge_axes", "move", "nest", "optimizer_state", "pad", "pre_linen", "pre_optax", "rename", "reshape", "resize",
    "split", "split_axis", "stack", "transpose", "unreplicate", "unstack", "unwrap", "wrap", "wrap_key_data",
]  # fmt: skip
__dir__ = __all__.copy  # for completion
