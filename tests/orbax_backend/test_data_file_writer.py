"""Values are written by several threads, into files that are synced, with the checksums of what is in them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from crc32c import crc32c
from flax_ckpt_compat.orbax_backend import data_file_writer, ocdbt_writer
from flax_ckpt_compat.orbax_backend.zarr import Encoding

import flax_ckpt_compat as fcc
from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.local import new_file
from tests.support import ocdbt_files as made
from tests.support.changing_arrays import counting
from tests.support.interpreters import run_python

MIB = 1 << 20
PLAIN = Encoding()
ZSTD = Encoding({"name": "zstd", "configuration": {"level": 1}}, checksums=True)


def value(key: str, data: Any, encoding: Encoding = PLAIN, **options: Any) -> data_file_writer.Value:
    """A whole array as a value."""
    return data_file_writer.Value(key, data, encoding, getattr(data, "shape", ()), **options)


def written(folder: Path, values: list[data_file_writer.Value], sums: dict[str, bytes] | None = None) -> list[bytes]:
    """The bytes of values in the files, each of which was a batch of its own."""
    files = data_file_writer.DataFiles(str(folder), sums)
    for one in values:
        files.submit([one], one.nbytes)
    files.wait()
    files.finish()
    assert sorted(os.listdir(folder / "d")) == sorted(os.path.basename(name) for name in files.names)
    return [stored(folder, one) for one in values]


def stored(folder: Path, one: data_file_writer.Value) -> bytes:
    """The bytes of a value where it says that it is."""
    if one.place is None:
        return one.inline
    return (folder / one.place.file).read_bytes()[one.place.offset : one.place.offset + one.place.length]


@pytest.mark.parametrize("may_change", [pytest.param(False, marks=pytest.mark.slow), True])
def test_values_are_where_they_say(tmp_path: Path, may_change: bool) -> None:
    """With the CRC-32C of every MiB; a file that is full gets no more."""
    arrays = [np.random.default_rng(n).random(size, np.float32) for n, size in enumerate((5, 300, 700_000, 30 << 20))]
    sums: dict[str, bytes] = {}
    values = [value(str(n), array, may_change=may_change) for n, array in enumerate(arrays)]
    assert written(tmp_path, values, sums) == [array.tobytes() for array in arrays]
    for name, array in enumerate(arrays):
        data = array.tobytes()
        blocks = [crc32c(data[at : at + MIB]).to_bytes(4, "little") for at in range(0, len(data), MIB)]
        assert sums[str(name)] == b"".join(blocks)


@pytest.mark.parametrize("may_change", [False, True])
def test_a_codec_appends_the_checksum_of_the_chunk(tmp_path: Path, may_change: bool) -> None:
    """CRC-32C, as zarr's codec of this name, and none of ours."""
    array, sums = np.arange(700, dtype=np.int16), dict[str, bytes]()
    (data,) = written(tmp_path, [value("a", array, Encoding(checksums=True), may_change=may_change)], sums)
    assert data == array.tobytes() + made.crc32c(array.tobytes()).to_bytes(4, "little")
    assert not sums


def test_what_becomes_small_lies_in_the_index(tmp_path: Path) -> None:
    """TensorStore decodes what Zstandard made of it, at the edge of an array with zeros behind."""
    small, edge = value("small", np.zeros(9000), ZSTD), value("edge", np.arange(6000).reshape(60, 100), ZSTD)
    edge.shape = (64, 128)
    small_data, edge_data = written(tmp_path, [small, edge])
    assert small.place is None and len(small_data) < 1024 and edge.place is not None
    for data, shape, dtype in ((small_data, [9000], "float64"), (edge_data, [64, 128], "int64")):
        codecs = ["bytes", "zstd", "crc32c"]
        grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
        metadata = {"shape": shape, "chunk_grid": grid, "data_type": dtype, "codecs": codecs}
        context = ts.Context()
        ts.KvStore.open("memory://", context=context).result()["/".join(["c", *("0" for _ in shape)])] = data
        array = ts.open({"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}, context=context, create=True,
                        open=True).result().read().result()  # fmt: skip
        expected = np.zeros(9000) if shape == [9000] else np.pad(np.arange(6000).reshape(60, 100), ((0, 4), (0, 28)))
        assert np.array_equal(array, expected)


def test_the_kernel_is_told_of_all_bytes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While more is written, so that the final sync is short."""
    told: list[int] = []
    monkeypatch.setattr(new_file, "start_writeback", lambda _, offset, length: told.append(length))
    files = data_file_writer.DataFiles(str(tmp_path), None)
    for n in range(4):
        files.submit([value(str(n), np.zeros(9 * MIB, np.uint8))], 9 * MIB)
    files.wait()
    files.finish()
    assert sum(told) == 36 * MIB


def test_a_full_file_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that several are synced, and uploaded, at once."""
    monkeypatch.setattr(data_file_writer, "_THREADS", 1)
    monkeypatch.setattr(data_file_writer, "FILE_BYTES", 10_000)
    values = [value(str(n), np.full(1000, n, np.float32)) for n in range(12)]
    written(tmp_path, values)
    ends = [(one.place.file, one.place.offset + one.place.length) for one in values if one.place]
    assert len({file for file, _ in ends}) >= 4  # threads that wait write, too, each to a file
    assert max(end for _, end in ends) < 10_000 + 4000


def test_more_pieces_than_a_system_call_takes(tmp_path: Path) -> None:
    """Two thousand values in one batch."""
    files = data_file_writer.DataFiles(str(tmp_path), None)
    values = [value(str(n), np.full(600, n, np.int32), Encoding(checksums=True)) for n in range(2000)]
    files.submit(values, 2000 * 2400)
    files.wait()
    files.finish()
    data = (tmp_path / files.names[0]).read_bytes()
    for n, one in enumerate(values):
        assert one.place is not None
        assert data[one.place.offset : one.place.offset + 2400] == np.full(600, n, np.int32).tobytes()


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def test_a_full_disk_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails with its error, once no thread writes any more."""
    tree = {str(n): np.random.default_rng(n).random(3 * MIB) for n in range(4)}
    fcc.save(tmp_path / "first", tree, format="orbax")
    before, threads, real = descriptors(), threading.active_count(), os.writev

    def full(descriptor: int, pieces: Any) -> int:
        if len(pieces[0]) > MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, pieces)

    tree = {name: fcc.restore(tmp_path / "first")[name] for name in tree}
    for array in tree.values():
        array.flags.writeable = False
    monkeypatch.setattr(os, "writev", full)
    monkeypatch.setattr(data_file_writer.memory, "may_change", lambda _: False)
    with pytest.raises(fcc.errors.StorageError, match="No space left"):
        fcc.save(tmp_path / "c", tree, format="orbax")
    assert os.listdir(tmp_path) == ["first"]
    assert (descriptors(), threading.active_count()) == (before, threads)


def test_little_memory_is_held_of_what_is_read_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next array is read when at most 32 MiB with it are held."""
    held: list[int] = []
    database = ocdbt_writer.Database(str(tmp_path))
    real = database._files.wait

    def noted(nbytes: int = 0) -> None:
        real(nbytes)
        held.append(database._batch_nbytes + sum(size for _, size in database._files._tasks))

    monkeypatch.setattr(database._files, "wait", noted)
    for n in range(20):
        database.make_room(5 * MIB)
        database._put_outside(value(str(n), np.zeros(5 * MIB, np.uint8)))
    database.finish()
    assert max(held) + 5 * MIB <= 32 * MIB
    assert len(held) > 20


HUNG = """
import os, signal, sys, threading
import numpy as np
from flax_ckpt_compat import save
def expire(*_):
    raise TimeoutError("the program's own limit")
ended, writev = threading.Event(), os.writev
def hang(descriptor, pieces):
    ended.wait()
    return writev(descriptor, pieces)
os.writev = hang
signal.signal(signal.SIGALRM, expire)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    save(sys.argv[1] + "/c", {"a": np.zeros(1 << 20)}, format="orbax")
except TimeoutError as error:
    print(error)
ended.set()
"""


def test_a_program_limits_the_time_of_a_save(tmp_path: Path) -> None:
    """By a signal handler that raises TimeoutError, as Python's own waits do: a save that hangs is left by it."""
    out, _ = run_python(HUNG, tmp_path, timeout=20)
    assert out == "the program's own limit\n"


def test_checksums_of_arrays_that_may_change_are_of_what_is_written(tmp_path: Path) -> None:
    """Though another thread writes to the array; where it did, the checksum is left out."""
    array, sums = np.zeros(2 * MIB, np.int64), dict[str, bytes]()
    with counting(array):
        for number in range(5):
            (tmp_path / str(number)).mkdir()
            (data,) = written(tmp_path / str(number), [value("a", array, may_change=True)], sums)
            assert sums.pop("a", checksums.of_blocks(data)) == checksums.of_blocks(data)


PEAK = """
import sys
import numpy as np
from flax_ckpt_compat import config, save

def mebibytes(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) / 1024

tree = {str(n): np.random.default_rng(n).random(12 << 20, np.float32) for n in range(2)}
with config.override(compression=sys.argv[2]):
    save(sys.argv[1] + "/first", {"a": np.ones(50_000)}, format="orbax")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = mebibytes("VmRSS")
    save(sys.argv[1] + "/c", tree, format="orbax")
print(mebibytes("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["zstd", "crc32c"])
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux resets the peak there")
def test_a_compressed_save_needs_little_memory(tmp_path: Path, compression: str) -> None:
    """Of 96 MiB, each thread holds a chunk of 8 MiB twice, and a little besides; it was as much as the tree."""
    out, _ = run_python(PEAK, tmp_path, compression, fresh=True)
    assert float(out) <= 24 * data_file_writer._THREADS
