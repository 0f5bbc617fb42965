"""Ready-made steps from an old checkpoint to today's state; a list of them is what ``orbax_transforms`` takes, too.

========================================  =====================================================================
rule                                      what it does
========================================  =====================================================================
``rename(pattern, replacement)``          other names, wherever the pattern matches whole names
``move(source, to)``                      a subtree or leaf goes elsewhere, or becomes the whole tree
``drop(*paths)``                          leaves out what is not wanted
``wrap(name, at)``                        one level more: params/… → params/model/…
``unwrap(name, at)``                      one level less: params/model/… → params/…
``stack(pattern, into, axis)``            layer_0 … layer_11 → layers, with one axis more
``unstack(name, into, axis)``             layers → layer_0 … layer_11
``fuse(names, into, axis)``               query, key, value → qkv, concatenated
``split(name, into, axis, sizes)``        qkv → query, key, value
``transpose(pattern, axes)``              another order of axes
``reshape(pattern, shape)``               another shape, the same values
``cast(pattern, dtype)``                  another dtype of the same kind
``pad(pattern, size, axis, value)``       longer arrays, filled with a number or the target's own values
``cut(pattern, size, axis)``              the first values on an axis
``from_target(*paths)``                   the target keeps its own values there
``optimizer_state(at, stored_at)``        moments of the parameters that still exist, the target's own elsewhere
``pre_linen(at)``                         names of modules from before linen
``pre_optax()``                           checkpoints of ``flax.optim``
========================================  =====================================================================
"""

from __future__ import annotations

from flax_ckpt_compat.rules._rule import Rule
from flax_ckpt_compat.rules.eras import pre_linen, pre_optax
from flax_ckpt_compat.rules.layers import fuse, split, stack, unstack
from flax_ckpt_compat.rules.names import copy, drop, from_target, move, rename, unwrap, wrap
from flax_ckpt_compat.rules.optimizers import optimizer_state
from flax_ckpt_compat.rules.values import cast, cut, pad, reshape, transpose

__all__ = [
    "Rule",
    "cast",
    "copy",
    "cut",
    "drop",
    "from_target",
    "fuse",
    "move",
    "optimizer_state",
    "pad",
    "pre_linen",
    "pre_optax",
    "rename",
    "reshape",
    "split",
    "stack",
    "transpose",
    "unstack",
    "unwrap",
    "wrap",
]
