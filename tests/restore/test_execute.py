"""What only functions know is told of the right leaf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat._core.tree import Branch
from flax_ckpt_compat._restore.execute import place, read
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived
from tests.restore.test_matching import handles, plan


def test_shapes_are_told_by_key_path() -> None:
    """A computed leaf of another shape is named by its key path in the target, the root by the empty one."""
    computed = Derived((), lambda: np.zeros(3), None, None, "value_fn")
    stored: Any = Branch({"a": Branch({"b": computed})})
    for tree, target, path in ((computed, np.zeros(2), ()), (stored, {"a": {"b": np.zeros(2)}}, ("a", "b"))):
        assert place(read(plan(tree, target)))[1] == [(path, (3,), (2,))]


def test_arrays_without_shards_here_have_the_dtype_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other processes are cast, so this process' view of them is."""
    monkeypatch.setattr(prng_keys, "without_shards", lambda shape, dtype, sharding: (shape, dtype))
    for cast, dtype in ((np.dtype(np.float16), np.float16), (None, np.float64)):
        planned = plan(handles({"a": np.zeros(3)}), {"a": np.zeros(3)})
        (leaf,) = planned.leaves
        leaf.is_plain, leaf.slices, leaf.cast = False, [], cast
        assert place(read(planned))[0] == [((3,), dtype)]
