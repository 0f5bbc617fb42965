"""Values are the same where their type and every bit are."""

import struct

import numpy as np
import pytest

from flax_ckpt_compat._core.equality import same_bits
from flax_ckpt_compat._core.tree import KeyData

OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (float("nan"), OTHER_NAN),
        (complex(0, 0.0), complex(0, -0.0)),
        (np.float32(1), 1.0),
        (np.float32(0), np.float32(-0.0)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(8), np.array([0.0] * 7 + [-0.0])),
        (np.zeros(3, np.int8), np.array([0, 0, 1], np.int8)),
        (KeyData("rbg", np.zeros(4, np.uint32)), KeyData("unsafe_rbg", np.zeros(4, np.uint32))),
        ("a", b"a"),
        (None, 0),
    ],
    ids=str,
)
def test_bits(one, other):
    """Each value is the same as itself, and not as another that only compares equal."""
    assert same_bits(one, one) and same_bits(other, other)
    assert not same_bits(one, other) and not same_bits(other, one)
