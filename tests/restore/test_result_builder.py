"""What only functions know is told of the right leaf."""

from __future__ import annotations

import types

import numpy as np

from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._restore import result_builder
from flax_ckpt_compat._trees.leaf_sources import Derived, FromCheckpoint


def test_shapes_are_told_by_key_path() -> None:
    """A computed leaf of another shape is named by its key path in the target, the root by the empty one."""
    reader = types.SimpleNamespace(format=Format.MSGPACK, path="here", read=lambda wanted: [])
    computed = Derived((), lambda: np.zeros(3), None, None, "value_fn")
    for sources, path in (
        (FromCheckpoint(computed, np.zeros(2)), ()),
        ({"a": {"b": FromCheckpoint(computed, np.zeros(2))}}, ("a", "b")),
    ):
        _, shapes = result_builder.Execution(sources, reader, cast=False).finish(lists=False)
        assert shapes == [(path, (3,), (2,))]
