"""What only functions know is told of the right leaf."""

from __future__ import annotations

import types

import numpy as np

from flax_ckpt_compat import executing
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat.leaves import Computed, Stored


def test_shapes_are_told_by_key_path() -> None:
    """A computed leaf of another shape is named by its key path in the target, the root by the empty one."""
    reader = types.SimpleNamespace(format=Format.MSGPACK, path="here", read=lambda wanted: [])
    computed = Computed((), lambda: np.zeros(3), None, None, "value_fn")
    for sources, path in (
        (Stored(computed, np.zeros(2)), ()),
        ({"a": {"b": Stored(computed, np.zeros(2))}}, ("a", "b")),
    ):
        _, shapes = executing.Execution(sources, reader, cast=False).finish(lists=False)
        assert shapes == [(path, (3,), (2,))]
