"""The reader of byte ranges beside plain reads of the same file, a mapping of it, and a store; memory of arrays."""

import contextlib
import itertools
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import config, restore, save
from flax_ckpt_compat._core import array_boxes, byte_reads, memory
from flax_ckpt_compat._core.byte_reads import Read, Run, Source, neighbours, read_runs
from flax_ckpt_compat._core.errors import ChecksumError, CorruptCheckpointError
from flax_ckpt_compat._core.local.local_file import LocalFile
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.tree import show_path
from tests.support import spread
from tests.support.interpreters import run_python
from tests.support.peers import version
from tests.support.profiles import examples
from tests.support.s3 import Bucket
from tests.support.store_places import Place
from tests.support.trees import fill, fingerprint

_SIZES = {"_DIRECT_FROM": [1, 9, 4096], "_THREADS_FROM_BYTES": [0, 2**22], "_THREADS_FROM_AVERAGE": [0, 2**14]}
_LIMITS = {"gap": [0, 7, 512], "longest": [1, 300, 2**18]}
_NEEDS_STORES = pytest.mark.skipif(version("tensorstore") < (0, 1, 86), reason="reads no parts of objects")
_ANY = HealthCheck.function_scoped_fixture


class Named(Source):
    """An object that is read by its name."""

    def __init__(self, location: Location) -> None:
        self.location, self.path = location, location.path

    def read(self, start: int, stop: int) -> bytes:
        return self.location.read(start, stop)


@pytest.fixture(
    params=["file", *(pytest.param(f"{how} in a store", marks=_NEEDS_STORES) for how in ("opened", "named"))]
)
def sourced(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A function that puts bytes into a file, or object, and opens it, perhaps after it was cut."""
    numbers = iter(range(10**6))

    def source(content: bytes, cut: int | None = None) -> Source:
        kept = content[:cut]
        if request.param == "file":
            path = tmp_path / str(next(numbers))
            path.write_bytes(kept)
            return LocalFile(str(path))
        bucket: Bucket = request.getfixturevalue("bucket")
        name = f"run/{next(numbers)}"
        bucket.put(name, kept)
        found = location_of(f"{bucket.url}/{name}")
        return found.open_file() if "opened" in request.param else Named(found)

    return source


@contextlib.contextmanager
def limits(data: st.DataObject) -> Iterator[None]:
    """Sizes at which reads are joined, split and copied, so small that those of a few bytes take every way."""
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in _SIZES.items():
            patch.setattr(byte_reads, name, data.draw(st.sampled_from(sizes), name))
        for name, sizes in _LIMITS.items():
            for kind in (LocalFile, Source):
                patch.setattr(kind, name, data.draw(st.sampled_from(sizes), name))
        yield


class Seen:
    """Notes the bytes that a reader shows of its runs, and those of each leaf."""

    def __init__(self) -> None:
        self.bytes, self.lock = dict[Source, dict[int, int]](), threading.Lock()
        self.parts: dict[tuple[str, ...], list[tuple[int, bytes]]] = {}

    def __call__(self, run: Run, data: memoryview) -> None:
        with self.lock:
            self.bytes.setdefault(run.source, {}).update(zip(range(run.start, run.stop), data, strict=True))
            for read in run.reads:
                at = read.offset - run.start
                self.parts.setdefault(read.owner, []).append((read.offset, bytes(data[at : at + read.nbytes])))

    def crc32_of(self, read: Read) -> int:
        """The checksum of all that was shown of a read."""
        return zlib.crc32(b"".join(part for _, part in sorted(self.parts.get(read.owner, []))))


def drawn_reads(data: st.DataObject, sources: Sequence[Source], length: int) -> list[Read]:
    """Any ranges, also empty, equal and overlapping, with memory of their own or not, each of its own leaf."""
    reads = []
    for number in range(data.draw(st.integers(0, 12), "reads")):
        start, stop = sorted(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2), "range"))
        nbytes = stop - start
        kept = data.draw(st.sampled_from([None, nbytes, max(nbytes - 4, 0)]), "target")
        target = None if kept is None else np.zeros(kept, np.uint8).data
        origin = data.draw(st.integers(0, start), "origin")
        source = data.draw(st.sampled_from(sources), "source")
        reads.append(Read(source, start, nbytes, ("leaf", str(number)), target, number, origin))
    return reads


def into(delivered: dict[int, bytes]) -> Callable[[list[tuple[Read, memoryview]]], None]:
    """A function that keeps what is delivered, by the number of the read."""
    return lambda some: delivered.update({read.content: bytes(data) for read, data in some})


@given(data=st.data())
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[_ANY])
def test_reads_are_what_the_file_holds(sourced: Any, data: st.DataObject) -> None:
    """However they are grouped and split, of two files at once; what is summed is each of their bytes, once."""
    contents = [data.draw(st.binary(max_size=1200), "content") * 3 for _ in range(2)]
    sources = [sourced(content) for content in contents]
    reads = drawn_reads(data, sources, min(map(len, contents)))
    content_of = dict(zip(sources, contents, strict=True))
    delivered, seen = dict[int, bytes](), Seen()
    with limits(data):
        pieces, longest = data.draw(st.sampled_from([1, 64, 10**6])), data.draw(st.sampled_from([None, 50]))
        read_runs(neighbours(reads, pieces, longest), into(delivered), check=seen)
    for number, read in enumerate(reads):
        expected = content_of[read.source][read.offset : read.offset + read.nbytes]
        if read.target is None:
            assert delivered[number] == expected
        else:
            assert bytes(read.target) == expected[: len(read.target)]
        assert seen.crc32_of(read) == zlib.crc32(expected)
    assert delivered.keys() == {number for number, read in enumerate(reads) if read.target is None}
    for source, there in seen.bytes.items():
        assert all(content_of[source][at] == byte for at, byte in there.items())


@given(data=st.data())
@settings(max_examples=examples(300, 20), deadline=None, suppress_health_check=[_ANY])
def test_a_file_that_ends_early_names_a_leaf_that_is_cut(sourced: Any, data: st.DataObject) -> None:
    """One whose bytes are not all there; where all are there, there is no error, and a check sees what is lost."""
    content = data.draw(st.binary(min_size=1, max_size=3000), "content")
    cut = data.draw(st.integers(1, len(content)), "cut")
    source = sourced(content, cut)
    reads = drawn_reads(data, [source], len(content))
    lost = {show_path(read.owner) for read in reads if read.nbytes and read.offset + read.nbytes > cut}
    with limits(data), pytest.raises(CorruptCheckpointError) if lost else contextlib.nullcontext() as caught:
        read_runs(neighbours(reads), bool)
    assert caught is None or caught.value.leaf in lost
    shown, run = list[bytes](), Run(source, 0, len(content) + 1, [read for read in reads if read.nbytes])
    with pytest.raises(CorruptCheckpointError) if lost else contextlib.nullcontext() as caught:
        read_runs([run], bool, check=lambda _, part: shown.append(bytes(part)))
    assert caught.value.leaf in lost if caught else shown == [content[:cut]]


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[_ANY])
def test_mapped_ranges_are_what_the_file_holds(tmp_path: Path, data: st.DataObject) -> None:
    """Those that are not mapped, because they overlap others, are read."""
    content = data.draw(st.binary(min_size=1, max_size=20_000), "content")
    path = tmp_path / "file"
    path.write_bytes(content)
    with contextlib.closing(LocalFile(str(path))) as source:
        reads = drawn_reads(data, [source], len(content))
        views = source.map([(read.offset, read.nbytes) for read in reads])
        path.unlink()
        delivered = dict[int, bytes]()
        rest = [read._replace(target=None) for read, view in zip(reads, views, strict=True) if view is None]
        read_runs(neighbours(rest), into(delivered))
    for number, (read, view) in enumerate(zip(reads, views, strict=True)):
        found = delivered[number] if view is None else view.tobytes()
        assert found == content[read.offset : read.offset + read.nbytes]


# Arrays of several blocks, and small ones between them.
TREE = {
    "a": fill((3, 5 * 2**17), np.dtype(np.float32), 1),
    "b": {"0": fill((9000,), np.dtype(np.float32), 2), "1": fill((1200, 3), np.dtype(np.int16), 3)},
    "c": fill((2**21 + 77,), np.dtype(np.uint8), 4),
    "d": fill((300, 7, 300), np.dtype(np.int16), 5),
}
ARRAYS = {"a": TREE["a"], "b/0": TREE["b"]["0"], "b/1": TREE["b"]["1"], "c": TREE["c"], "d": TREE["d"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "where", "compression"),
    [
        ("msgpack", "disk", None),
        ("orbax", "disk", None),
        ("orbax", "disk", "crc32c"),
        pytest.param("orbax", "s3", None, marks=_NEEDS_STORES),
        pytest.param("orbax", "s3", "crc32c", marks=[_NEEDS_STORES, pytest.mark.slow]),
    ],
)
@given(data=st.data())
@settings(max_examples=examples(100, quick=10), deadline=None, suppress_health_check=[_ANY])
def test_the_leaf_of_a_damaged_byte_is_named(
    request: pytest.FixtureRequest, tmp_path: Path, format: Any, where: str, compression: Any, data: st.DataObject
) -> None:
    """One flipped bit anywhere in the bytes of any leaf; of the bytes without it, all are what was saved."""
    bucket: Bucket | None = request.getfixturevalue("bucket") if where == "s3" else None
    folder = tmp_path / "run" if bucket is None else None
    place = Place(str(folder or f"{bucket.url}/run"), folder, bucket)  # type: ignore[union-attr]
    if not place.contents():
        with config.override(compression=compression):
            save(place / "c", TREE, format=format)
        if format == "msgpack" and b"checksums" not in b"".join(map(os.fsencode, os.listxattr(place / "c"))):
            pytest.skip("this file system keeps no attributes")
    leaf = data.draw(st.sampled_from(sorted(ARRAYS)), "leaf")
    needle = ARRAYS[leaf].tobytes()[:64]
    name, content = next((name, content) for name, content in place.contents().items() if needle in content)
    at = content.index(needle) + data.draw(st.integers(0, ARRAYS[leaf].nbytes - 1), "byte")
    bit = data.draw(st.integers(0, 7), "bit")
    place.flip(name, at, bit)
    try:
        with pytest.raises(ChecksumError, match=f"'{leaf}'") as caught:
            restore(place / "c", None)
        assert caught.value.leaf == leaf or (format == "msgpack" and caught.value.leaf is None)  # a block of several
    finally:
        place.flip(name, at, bit)
    assert fingerprint(restore(place / "c", None)) == fingerprint(TREE)


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
        whole = (array_boxes.full_box(shape),) * 2
        found += memory.pack_chunks([one.tobytes() for one in expected[-70:]], shape, dtype, shape, [whole])
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
    [("msgpack", "no", 30), ("orbax", "no", 60), *((one, "loaded", 60) for one in ("orbax", "npz", "gda", "endless"))],
)
def test_too_little_memory_has_a_name(format: str, loaded: str, left: int, tmp_path: Path) -> None:
    """Nothing aborts, and a sound checkpoint is not called corrupt: 96 MB fit into no such limit."""
    large = {"a": np.zeros(12_000_000)}
    flax_ckpt_compat.save(tmp_path / "small", {"a": np.zeros(2)}, format="orbax" if format == "orbax" else "msgpack")
    if format == "npz":
        np.savez(tmp_path / "large.npz", **large)
    elif format == "gda":
        spread.save(tmp_path / "large", {"a": spread.Spread(large["a"])})
    elif format == "endless":
        os.truncate(f"{flax_ckpt_compat.save(tmp_path / 'large', {'a': np.zeros(2)}, format='orbax')}/_METADATA", 2**33)
    else:
        flax_ckpt_compat.save(tmp_path / "large", large, format=format)  # type: ignore[arg-type]
    told, _ = run_python(RESTORE, tmp_path, loaded, left, "large.npz" if format == "npz" else "large")
    assert "there is no memory for " in told
    assert "raise the limit of this process (ulimit -v)" in told and ("_METADATA" in told) == (format == "endless")
