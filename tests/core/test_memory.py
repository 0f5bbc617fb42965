"""Small arrays are copied into blocks of memory that they share, and do not overlap there."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np

from flax_ckpt_compat._core import memory


def test_packed_arrays_are_their_bytes_and_touch_no_other() -> None:
    """In the order given, of any shape and dtype, aligned and writable; what is written to one stays in it."""
    dtypes = ["f4", ">i2", "?", "c16", "S5", "U3", ml_dtypes.bfloat16, ml_dtypes.int4]
    shapes: list[tuple[int, ...]] = [(), (3,), (0,), (2, 0, 3), (5, 2), (1,), (17,)]
    random = np.random.default_rng(0)
    expected, found = list[Any](), list[Any]()
    for name, shape in itertools.product(dtypes, shapes):
        dtype: Any = np.dtype(name)  # type: ignore[call-overload]
        alike = random.integers(0, 2, (70, *shape, dtype.itemsize), np.uint8).view(dtype).reshape((70, *shape))
        expected += [alike[number, ...] for number in range(70)]
        found += memory.pack_alike([one.tobytes() for one in expected[-70:]], shape, dtype)
    for one, array in zip(expected, found, strict=True):
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype) == (one.shape, one.dtype)
        assert array.flags.writeable and array.flags.c_contiguous
        assert array.ctypes.data % memory.ALIGNMENT == 0 or not array.size
    for one, array in zip(expected, found, strict=True):  # each changes only after its neighbours have
        assert array.tobytes() == one.tobytes()
        memory.as_bytes(array)[:] = b"\xff" * array.nbytes


def test_arrays_are_assembled_from_chunks() -> None:
    """Chunks that reach beyond the array, as zarr stores them, each in its place of each array; more than a block."""
    values = np.arange(200 * 5 * 3, dtype=">i4").reshape(200, 5, 3)
    padded = np.pad(values, ((0, 0), (0, 1), (0, 1)))
    boxes = [(slice(y, y + 2), slice(x, x + 2)) for y in (0, 2, 4) for x in (0, 2)]
    chunks = [b"".join(one[box].tobytes() for box in boxes) for one in padded]
    targets = [
        tuple(slice(side.start, min(side.stop, end)) for side, end in zip(box, (5, 3), strict=True)) for box in boxes
    ]
    copies = [(tuple(slice(0, side.stop - side.start) for side in target), target) for target in targets]
    found = memory.pack_chunks(chunks, (5, 3), values.dtype, (2, 2), copies)
    for one, array in zip(values, found, strict=True):
        assert array.dtype == values.dtype and array.flags.writeable and array.flags.c_contiguous
        assert array.ctypes.data % memory.ALIGNMENT == 0
        assert np.array_equal(array, one)
        array[...] = 0


def test_an_array_holds_on_to_few_others() -> None:
    """Of thousands of arrays, the one that is kept holds a block of at most 64, or 256 KiB."""
    for nbytes, most in ((8, 64), (4096, 64), (20_000, 13), (300_000, 1)):
        found = memory.pack_alike([bytes(nbytes)] * 200, (nbytes,), np.dtype(np.uint8))
        blocks: dict[int, list[Any]] = {}
        for array in found:
            blocks.setdefault(id(array.base), []).append(array)
        assert max(map(len, blocks.values())) == most
