"""Values are written by several threads, into files that are synced, with the checksums of what is in them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import ocdbt_writer
from flax_ckpt_compat.orbax_backend.zarr import Encoding

import flax_ckpt_compat as fcc
from flax_ckpt_compat._core.backend import WriteOptions
from tests.support.interpreters import run_python
from tests.support.orbax_trees import save

MIB = 1 << 20
PLAIN = Encoding()
ZSTD = Encoding({"name": "zstd", "configuration": {"level": 1}}, checksums=True)


def value(key: str, data: Any, encoding: Encoding = PLAIN, **options: Any) -> ocdbt_writer.Value:
    """A whole array as a value."""
    return ocdbt_writer.Value(key, data, encoding, data.shape, **options)


def written(folder: Path, values: list[ocdbt_writer.Value], sums: dict[str, bytes] | None = None) -> list[bytes]:
    """The bytes of values in the files, each of which was a batch of its own."""
    files = ocdbt_writer.Database(str(folder), PLAIN, WriteOptions(), sums)
    for one in values:
        files.add(one)
        files.submit()
    files.finish()
    return [stored(folder, one) for one in values]


def stored(folder: Path, one: ocdbt_writer.Value) -> bytes:
    """The bytes of a value where it says that it is."""
    if isinstance(one.entry, bytes):
        return one.entry
    return (folder / one.entry.file).read_bytes()[one.entry.offset : one.entry.offset + one.entry.length]


def test_what_becomes_small_lies_in_the_index(tmp_path: Path) -> None:
    """TensorStore decodes what Zstandard made of it, at the edge of an array with zeros behind."""
    small, edge = value("small", np.zeros(9000), ZSTD), value("edge", np.arange(6000).reshape(60, 100), ZSTD)
    edge.shape = (64, 128)
    small_data, edge_data = written(tmp_path, [small, edge])
    assert type(small.entry) is bytes and len(small_data) < 1024 and type(edge.entry) is not bytes
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
    monkeypatch.setattr(ocdbt_writer.memory, "may_change", lambda _: False)
    with pytest.raises(fcc.errors.StorageError, match="No space left"):
        fcc.save(tmp_path / "c", tree, format="orbax")
    assert os.listdir(tmp_path) == ["first"]
    assert (descriptors(), threading.active_count()) == (before, threads)


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
    assert float(out) <= 24 * ocdbt_writer._THREADS


def test_each_file_and_folder_is_synced_with_all_that_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power loss takes bytes, or names, of a checkpoint that the caller publishes next."""
    synced, fsync = dict[int, object](), os.fsync

    def noting(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[status.st_ino] = sorted(os.listdir(descriptor)) if stat.S_ISDIR(status.st_mode) else status.st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "fdatasync", noting)
    path = Path(save(tmp_path / "c", {"a": np.ones(300_000), "b": jnp.ones(3), "text": "word"}))
    folders = [path, *(folder for folder in path.rglob("*") if folder.is_dir())]
    assert {folder.name for folder in folders} == {"c", "d", "array_metadatas"}
    assert {str(folder): synced.get(folder.stat().st_ino) for folder in folders} == {
        str(folder): sorted(os.listdir(folder)) for folder in folders
    }
    # TensorStore syncs the files that it writes itself (its setting file_io_sync), unseen from here.
    files = [file for file in path.iterdir() if file.is_file() and file.name != "manifest.ocdbt"]
    assert len(files) > 5
    assert {file.name: synced.get(file.stat().st_ino) for file in files} == {
        file.name: file.stat().st_size for file in files
    }
