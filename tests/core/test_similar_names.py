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
