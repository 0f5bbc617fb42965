"""What only functions know is told of the right leaf."""

from __future__ import annotations

from typing import Any

import numpy as np

from flax_ckpt_compat._core.tree import Branch
from flax_ckpt_compat._restore.execute import read_and_place
from flax_ckpt_compat._trees.leaf_sources import Derived
from tests.restore.test_matching import plan


def test_shapes_are_told_by_key_path() -> None:
    """A computed leaf of another shape is named by its key path in the target, the root by the empty one."""
    computed = Derived((), lambda: np.zeros(3), None, None, "value_fn")
    stored: Any = Branch({"a": Branch({"b": computed})})
    for tree, target, path in ((computed, np.zeros(2), ()), (stored, {"a": {"b": np.zeros(2)}}, ("a", "b"))):
        assert read_and_place(plan(tree, target))[1] == [(path, (3,), (2,))]
