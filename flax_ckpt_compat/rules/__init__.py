"""Ready-made steps from an old checkpoint to today's state; a list of them is what ``orbax_transforms`` takes, too.

========================================  ===========================================================================
rule                                      what it does
========================================  ===========================================================================
``rename(pattern, replacement)``          other names, wherever a pattern matches whole names; or a mapping of such
``move(source, to)``                      subtrees or leaves go elsewhere, or become the whole tree
``copy(source, to)``                      the same, and they stay where they are, too
``drop(*patterns)``                       leaves out what is not wanted
``from_target(*patterns)``                the target keeps its own values there
``from_checkpoint(path, *patterns)``      takes them from another checkpoint
``wrap(name, at)``                        one level more: params/… → params/model/…
``unwrap(name, at)``                      one level less: params/model/… → params/…
``stack(pattern, into, axis)``            layer_0 … layer_11 → layers, with one axis more
``unstack(pattern, into, axis)``          layers → layer_0 … layer_11
``fuse(names, into, axis)``               query, key, value → qkv, concatenated
``split(pattern, into, axis, sizes)``     qkv → query, key, value
``transpose(pattern, axes)``              another order of axes
``reshape(pattern, shape)``               another shape, the same values
``pad(pattern, size, axis, value)``       longer arrays, filled with a number or the target's own values
``cut(pattern, size, axis)``              the first values on an axis
``index(pattern, number, axis)``          one index of an axis, which goes
``unreplicate(pattern)``                  the first replica of a state that was saved replicated for ``jax.pmap``
``resize(pattern, shape, method, …)``     interpolated arrays, such as position embeddings
``cast(pattern, dtype)``                  another dtype of the same kind
``apply(pattern, function)``              whatever a function returns
``wrap_key_data(pattern, impl)``          raw PRNG keys become typed ones
``key_data(pattern)``                     typed PRNG keys become raw ones
``optimizer_state(at, stored_at)``        moments of the parameters that still exist, the target's own elsewhere
``pre_linen(at)``                         names of modules from before linen
``pre_optax()``                           checkpoints of ``flax.optim``
========================================  ===========================================================================

Patterns are regular expressions over key paths joined with ``/``, such as ``params/Dense_0/kernel``, and match whole
names. Rules that take places (``move``, ``copy``, ``drop``, ``from_target``, ``at``) match the whole key path of a
subtree or leaf: ``params/head``, ``.*/head``. All others match anywhere: ``head``; ``^params/head`` is one only.
"""

from __future__ import annotations

from flax_ckpt_compat.rules._rule import Rule
from flax_ckpt_compat.rules.eras import pre_linen, pre_optax
from flax_ckpt_compat.rules.layers import fuse, split, stack, unstack
from flax_ckpt_compat.rules.names import copy, drop, move, rename, unwrap, wrap
from flax_ckpt_compat.rules.optimizers import optimizer_state
from flax_ckpt_compat.rules.shapes import cut, index, reshape, resize, transpose, unreplicate
from flax_ckpt_compat.rules.sources import from_checkpoint, from_target
from flax_ckpt_compat.rules.values import apply, cast, key_data, pad, wrap_key_data

__all__ = [
    "Rule",
    "apply",
    "cast",
    "copy",
    "cut",
    "drop",
    "from_checkpoint",
    "from_target",
    "fuse",
    "index",
    "key_data",
    "move",
    "optimizer_state",
    "pad",
    "pre_linen",
    "pre_optax",
    "rename",
    "reshape",
    "resize",
    "split",
    "stack",
    "transpose",
    "unreplicate",
    "unstack",
    "unwrap",
    "wrap",
    "wrap_key_data",
]
