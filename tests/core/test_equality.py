"""Values are the same where their type and every bit are."""

import struct

import numpy as np
import pytest

from flax_ckpt_compat._core.equality import differences, same_bits
from flax_ckpt_compat._core.tree import KeyData
from tests.support.stored import Memory

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


def test_differences():
    """Where leaves are on one side only, are not leaves on one side, or have other bits; containers do not count."""
    first = Memory({"same": np.arange(3), "bits": np.zeros(2), "type": 1, "here": 2, "deep": {"a": "x"}})
    second = Memory({"same": np.arange(3), "bits": np.array([0.0, -0.0]), "type": 1.0, "deep": {"a": "y", "b": 1}})
    assert dict(differences(first, second)) == {
        ("deep", "b"): "only in the second",
        ("here",): "only in the first",
        ("bits",): "float64 [2] and float64 [2]",
        ("type",): "int 1 and float 1.0",
        ("deep", "a"): "str 'x' and str 'y'",
    }
    assert dict(differences(first, first)) == {}
    none = Memory({"leaf": 1, "branch": {}})
    for other in (Memory({"leaf": None, "branch": None}), Memory({"leaf": {}, "branch": 1})):
        found = dict(differences(none, other))
        assert found == dict.fromkeys([("leaf",), ("branch",)], "a leaf in one, none in the other")
