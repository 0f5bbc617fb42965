"""Small arrays share blocks of memory and do not overlap there; boxes of arrays; restores in little memory."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat._core import memory
from tests.support import spread
from tests.support.interpreters import run_python

_LIMITED = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS counts elsewhere otherwise")
RESTORE = """
import resource, sys
import flax_ckpt_compat
from flax_ckpt_compat import errors
if sys.argv[2] == "loaded":
    flax_ckpt_compat.restore(sys.argv[1] + "/small")
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[3]) << 20),) * 2)
try:
    flax_ckpt_compat.restore(sys.argv[1] + "/" + sys.argv[4])
except errors.OutOfMemoryError as error:
    assert isinstance(error, MemoryError)
    print(error)
"""


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


@_LIMITED
@pytest.mark.parametrize(
    ("format", "loaded", "left"),
    [("msgpack", "no", 30), ("orbax", "no", 60), *((format, "loaded", 60) for format in ("orbax", "npz", "gda"))],
)
def test_too_little_memory_has_a_name(format: str, loaded: str, left: int, tmp_path: Path) -> None:
    """Nothing aborts, and a sound checkpoint is not called corrupt: 96 MB fit into no such limit."""
    large = {"a": np.zeros(12_000_000)}
    flax_ckpt_compat.save(tmp_path / "small", {"a": np.zeros(2)}, format="orbax" if format == "orbax" else "msgpack")
    if format == "npz":
        np.savez(tmp_path / "large.npz", **large)
    elif format == "gda":
        spread.save(tmp_path / "large", {"a": spread.Spread(large["a"])})
    else:
        flax_ckpt_compat.save(tmp_path / "large", large, format=format)  # type: ignore[arg-type]
    told, _ = run_python(RESTORE, tmp_path, loaded, left, "large.npz" if format == "npz" else "large")
    assert "there is no memory for " in told
    assert "raise the limit of this process (ulimit -v)" in told
