"""Whether the suggestion for a checkpoint and a target restores what the right rules restore; run after a page."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

import flax_ckpt_compat
from flax_ckpt_compat import errors


def write_verdict(file: str, path: str, target: Any, restored: Any) -> None:
    """Writes what `plan_restore` suggests without rules, and whether it is right, as JSON.

    Args:
        file: the JSON file to write.
        path: the checkpoint.
        target: the new state.
        restored: what the right rules made of the checkpoint.
    """
    plan = flax_ckpt_compat.plan_restore(path, target)
    suggestion = plan.suggestion
    try:
        rules = None if suggestion is None else [step.rule for step in suggestion.steps]
        difference = first_difference(restored, flax_ckpt_compat.restore(path, target, transforms=rules))
    except errors.CheckpointError as error:
        difference = str(error)
    verdict = {
        "suggested": None if suggestion is None else str(suggestion),
        "confident": suggestion is not None and suggestion.confident,
        "difference": difference,
    }
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(verdict, stream)


def first_difference(want: Any, got: Any) -> str | None:
    """Where two trees differ in a bit, a dtype, a shape, a type or a sharding, or None."""
    wanted, structure = jax.tree_util.tree_flatten_with_path(want)
    leaves, other = jax.tree_util.tree_flatten_with_path(got)
    if structure != other:
        return f"{structure} is not {other}"
    for (keys, one), (_, two) in zip(wanted, leaves, strict=True):
        if _bits(one) != _bits(two):
            return jax.tree_util.keystr(keys)
    return None


def _bits(leaf: Any) -> tuple[Any, ...]:
    is_key = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return type(leaf), array.dtype, array.shape, array.tobytes(), getattr(leaf, "sharding", None)
