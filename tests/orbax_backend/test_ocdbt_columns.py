"""Columns of numbers and names are decoded at once as the format has them: one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from flax_ckpt_compat.orbax_backend import ocdbt_encoding
from flax_ckpt_compat.orbax_backend.ocdbt_encoding import Columns, MemoryBudget
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import ocdbt_files as made
from tests.support.profiles import examples

_numbers = st.sampled_from([7, 14, 21, 28, 32, 35, 49, 56, 63, 64]).flatmap(lambda bits: st.integers(0, 2**bits - 1))
# Of one width, as lengths of chunks are, or of any.
_columns = st.one_of(
    st.lists(_numbers, max_size=40),
    st.integers(1, 9).flatmap(lambda n: st.lists(st.integers(2 ** (7 * n - 7), 2 ** (7 * n) - 1), max_size=40)),
)
_names = st.tuples(st.sampled_from(["", "a", "layer_1.kernel", "layer_2"]), st.integers(0, 120)).map(
    lambda parts: b"%s/%d" % (parts[0].encode(), parts[1])
)


def names(keys: Sequence[bytes], shared: Sequence[int]) -> bytes:
    """Names of which each shares so many bytes with the one before."""
    own = [key[count:] for key, count in zip(keys, shared, strict=True)]
    return made.column(shared[1:]) + made.column(map(len, own)) + b"".join(own)


def n_common(one: bytes, other: bytes) -> int:
    """How many bytes two names begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


@settings(max_examples=examples(200), deadline=None)
@given(columns=st.lists(_columns, min_size=1, max_size=4), before=st.binary(max_size=3))
def test_numbers_one_after_the_other(columns: list[list[int]], before: bytes) -> None:
    """Of any widths, up to the last byte of the node."""
    reader = Columns(before + b"".join(map(made.column, columns)), MemoryBudget())
    reader.take(len(before))
    assert [reader.numbers(len(column)).tolist() for column in columns] == columns
    reader.finish()


@pytest.mark.parametrize("kept", [1, 2, 3, 7])
@pytest.mark.parametrize("numbers", [[300] * 8, [1 << 40] * 8, [1, 300] * 4, [1] * 9])
def test_columns_that_end_too_early(numbers: list[int], kept: int) -> None:
    """They are refused, and nothing behind the end is read."""
    data = made.column(numbers)
    with pytest.raises(ValueError, match=f"{len(numbers)} numbers were expected at byte 0"):
        Columns(data[: len(data) * kept // 8], MemoryBudget()).numbers(len(numbers))


@pytest.mark.parametrize("data", [b"\xff" * 9 + b"\x02", b"\xff" * 10 + b"\x01"])
def test_numbers_beyond_64_bits(data: bytes) -> None:
    """One after the other, and in a column."""
    with pytest.raises(ValueError, match="64 bits"):
        Columns(data, MemoryBudget()).varint()
    with pytest.raises(ValueError, match="64 bits"):
        Columns(data + made.column([5] * 9), MemoryBudget()).numbers(10)


@settings(max_examples=examples(200), deadline=None)
@given(
    keys=st.sets(_names, min_size=2, max_size=60).map(sorted),
    forgone=st.lists(st.integers(0, 3), min_size=60, max_size=60),
    many=st.sampled_from([1, 1000]),
    at_once=st.sampled_from([1, 100, 1 << 14]),
)
def test_names_that_share_beginnings(keys: list[bytes], forgone: list[int], many: int, at_once: int) -> None:
    """As much as they could, or less, which the format allows."""
    common = [0, *map(n_common, keys[1:], keys)]
    data = names(keys, [max(0, count - less) for count, less in zip(common, forgone, strict=False)])
    with (
        mock.patch.object(ocdbt_encoding, "_MANY", many),
        mock.patch.object(ocdbt_encoding, "_AT_ONCE", at_once),
        mock.patch.object(ocdbt_encoding, "_MAX_PADDING", 100),
    ):
        reader = Columns(data + b"rest", MemoryBudget())
        found = reader.keys(len(keys))
    assert isinstance(found, np.ndarray)
    assert found.tolist() == keys
    assert reader.take(4) == b"rest"


@pytest.mark.parametrize("n_leaves", [1, 12, 3000])
def test_names_of_many_chunks(n_leaves: int) -> None:
    """In the layouts of many hosts: many chunks of few arrays, few of many, and metadata between them."""
    files = [b".zarray", *(b"%d.0" % number for number in range(6000 // n_leaves))]
    keys = sorted(b"params.layer_%d/%s" % (leaf, file) for leaf in range(n_leaves) for file in files)
    data = names(keys, [0, *map(n_common, keys[1:], keys)])
    assert Columns(data, MemoryBudget()).keys(len(keys)).tolist() == keys


def test_names_that_a_sample_is_not_like() -> None:
    """At each level those that are looked at share much with the one before, and the others nothing."""
    count, width, sampled = 1000, 64, 64
    shared, rest = np.zeros(count, np.int32), np.arange(1, count)
    for value in range(width - 2, width // 2, -1):
        looked_at = np.append(0, rest)[:: 1 + (1 + len(rest)) // sampled]
        shared[looked_at[1:]] = value
        rest = np.setdiff1d(rest, looked_at)
    rng = np.random.default_rng(0)
    keys = [b""]
    for one in shared.tolist():
        keys.append(keys[-1][:one] + rng.integers(1, 255, width - one, np.uint8).tobytes())
    depths, real = [0], ocdbt_encoding._padded

    def counted(*arguments: object) -> object:
        depths.append(depths[-1] + 1)
        return real(*arguments)

    with (
        mock.patch.object(ocdbt_encoding, "_SAMPLED", sampled),
        mock.patch.object(ocdbt_encoding, "_MANY", 10),
        mock.patch.object(ocdbt_encoding, "_padded", counted),
    ):
        found = Columns(names(keys[1:], shared.tolist()), MemoryBudget()).keys(count)
    assert found.tolist() == keys[1:]
    assert max(depths) <= 1 + np.log2(count)
