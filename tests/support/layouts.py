"""What holds for every layout of another program that is read and never written."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    """Two trees have the same structure and the same bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected), what
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        left, right = np.asarray(one), np.asarray(other)
        assert (left.dtype, left.shape) == (right.dtype, right.shape), what
        bits = (side.reshape(-1).view(np.uint8) for side in (left, right))  # without a copy: trees may be large
        assert np.array_equal(*bits), what


def assert_every_function_reads(path: Path | str, expected: Any, format: str, folder: Path) -> None:
    """Restores, plans, views, comparisons, checks and conversions to both formats take its own path."""
    assert_same(flax_ckpt_compat.restore(path), expected)
    assert_same(checkpoints.restore_checkpoint(path, None), expected)
    target = jax.tree.map(np.zeros_like, expected)
    assert_same(flax_ckpt_compat.restore(path, target), expected)
    plan = flax_ckpt_compat.plan_restore(path, target)
    assert plan.format == format
    with flax_ckpt_compat.open_checkpoint(path) as view:
        assert view.format == format
        assert len(view.leaves()) == len(jax.tree.leaves(expected))
    assert not flax_ckpt_compat.verify(path).damaged
    for to in ("msgpack", "orbax"):
        (done,) = flax_ckpt_compat.convert(path, folder / to, to)
        assert done.error is None
        assert flax_ckpt_compat.diff(path, folder / to).same
        assert_same(flax_ckpt_compat.restore(folder / to, target), expected)
