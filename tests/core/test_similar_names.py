"""Names in messages: only those that somebody may have meant."""

from __future__ import annotations

import pytest

from flax_ckpt_compat._core.similar_names import Names

STORED = ["params/Dense_0/kernel", "params/Dense_0/bias", "params/enc/attn/kernel", "opt/trace/enc/kernel", "step"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("params/Dense_0/kernal", ["params/Dense_0/kernel"]),
        ("params/Dense_00/bias", ["params/Dense_0/bias"]),
        ("params/encoder/attn/kernel", ["params/enc/attn/kernel"]),
        ("params/model/Dense_0/kernel", ["params/Dense_0/kernel"]),
        ("model/Dense_0/bias", ["params/Dense_0/bias"]),
        ("steps", ["step"]),
        ("params/head/kernel", []),
        ("params/gate/bias", []),
        ("opt/mu/enc/kernel", []),
        ("params/enc/mlp/kernel", []),
    ],
)
def test_names_that_are_akin(wanted: str, expected: list[str]) -> None:
    """A misspelling, a longer form or another level is told; equal ends alone, which all layers have, are not."""
    assert Names(STORED).nearest(wanted) == expected


def test_items_of_lists_are_like_items_of_lists() -> None:
    """A list that is longer in the target lacks an item, and no name that happens to share letters is it."""
    names = Names([*(f"flattened_state/{item}" for item in range(6)), "str_pytree_state"])
    assert names.nearest("flattened_state/6") == []
    assert Names(["layers/6", "layer_6"]).nearest("layer/6") == ["layers/6"]
