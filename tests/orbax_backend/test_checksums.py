"""The file of checksums: what it holds, what it finds, and that it never blames a checkpoint that is whole."""

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from crc32c import crc32c
from flax_ckpt_compat.legacy.encode import BlockSums
from flax_ckpt_compat.orbax_backend import ocdbt_writer, read_arrays, zarr

import flax_ckpt_compat as fcc
from flax_ckpt_compat import config
from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.errors import CheckpointError, ChecksumError, CorruptCheckpointError, SettingError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.orbax_layout import CHECKSUMS
from tests.orbax_backend.test_shared import save_ours
from tests.support.disks import flip
from tests.support.layouts import assert_same
from tests.support.orbax_trees import BACKEND, database, find, handles, load, save
from tests.support.saves import around
from tests.support.team import team_of
from tests.support.trees import fill

MIB = 1 << 20
RNG = np.random.default_rng(0)
LARGE = RNG.standard_normal((3, 100_000)).astype(np.float32)  # two blocks
START = LARGE.tobytes()[:64]
TREE = {"large": LARGE, "mid": np.arange(300.0), "small": jnp.ones(7), "text": "s", "list": [1, None]}


def saved(path: Path, tree: Any = None, **settings: Any) -> Path:
    """A save in Orbax's format."""
    with config.override(**settings):
        fcc.save(path, TREE if tree is None else tree, format="orbax")
    return path


def content(path: Path) -> dict[str, Any]:
    """The file of checksums, read as the guide describes it."""
    data = path.read_bytes()
    assert zlib.crc32(data[:-4]).to_bytes(4, "little") == data[-4:]
    return msgpack.unpackb(data[:-4])


def rewrite(file: Path, change: Any) -> None:
    """Changes the content of a file of checksums, with a right checksum at its end."""
    found = content(file)
    change(found)
    data = msgpack.packb(found)
    file.write_bytes(data + zlib.crc32(data).to_bytes(4, "little"))


def stored_metadata(path: str, name: str) -> dict[str, Any]:
    """The ``zarr.json`` of an array."""
    return json.loads(database(path, f"{name}/")["zarr.json"])


def test_the_file_is_as_the_guide_says(tmp_path: Path) -> None:
    """Each large chunk has the CRC-32C of every MiB; each file zlib's CRC-32; small chunks lie in checked nodes."""
    path = saved(tmp_path / "c")
    found = content(path / CHECKSUMS)
    assert (found["version"], found["algorithm"], found["block_bytes"]) == (1, "crc32c", MIB)
    data = LARGE.tobytes()
    expected = {
        "large/0.0": b"".join(crc32c(part).to_bytes(4, "little") for part in (data[:MIB], data[MIB:])),
        "mid/0": crc32c(TREE["mid"].tobytes()).to_bytes(4, "little"),
    }
    assert found["chunks"] == expected
    assert sorted(found["data_files"]) == sorted(os.listdir(path / "d"))
    others = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and file.parent.name != "d"}
    assert set(found["files"]) == others - {CHECKSUMS}
    for name, (size, sums) in found["files"].items():
        text = (path / name).read_bytes()
        assert (size, sums) == (len(text), zlib.crc32(text).to_bytes(4, "little"))


def flips(path: Path, step: int) -> Iterator[tuple[Path, int]]:
    """Every file of a checkpoint, and the offset of every so many bytes, flipped for the while."""
    for number, file in enumerate(sorted(path.rglob("*"))):
        for at in range(number % step, file.stat().st_size, step) if file.is_file() else ():
            flip(file, at, at % 8)
            yield file, at
            flip(file, at, at % 8)


LAYOUTS = [None, "crc32c", "zstd"]


@pytest.mark.slow
@pytest.mark.parametrize("compression", LAYOUTS)
def test_every_flip_is_found(tmp_path: Path, compression: str | None) -> None:
    """verify() finds each flipped byte of every file, and restores return what was saved or raise.

    ``python -m tests.reliability --only bytes`` flips all of them.
    """
    tree = {"a": jnp.arange(1200.0).reshape(40, 30), "zeros": np.zeros(300), "small": np.ones(3), "text": "s"}
    path = saved(tmp_path / "c", tree, compression=compression)
    count = 0
    for file, at in flips(path, 131):
        count += 1
        with contextlib.suppress(CheckpointError):
            assert_same(fcc.restore(path), tree, f"{file} {at}")
        assert fcc.verify(path).damaged, (file, at)
    assert count > 20
    assert fcc.verify(path).verified


def test_a_type_that_a_flip_made_is_damage(tmp_path: Path) -> None:
    """No newer release wrote the type of leaf that nobody knows: the checksum of the file is wrong."""
    path = saved(tmp_path / "c", {"a": np.ones(3), "text": "s"})
    metadata = path / "_METADATA"
    metadata.write_bytes(metadata.read_bytes().replace(b'"string"', b'"stzing"'))
    found = fcc.verify(path)
    assert not found.ok
    assert "_METADATA" in str(found) and "checksum" in str(found)


def test_flips_of_other_processes_are_found(tmp_path: Path) -> None:
    """The checksums of each process lie beside its database, with those of the files that it wrote."""
    team_of(2).call(save_ours, str(tmp_path))
    path = tmp_path / "checkpoint_1"
    assert fcc.verify(path).ok
    for process in (0, 1):
        own = path / f"ocdbt.process_{process}"
        assert content(own / CHECKSUMS)["chunks"]
        largest = max((own / "d").iterdir(), key=lambda file: file.stat().st_size)
        for file in (largest, own / CHECKSUMS):
            flip(file, file.stat().st_size // 2)
            with pytest.raises(ChecksumError):
                fcc.restore(path)
            flip(file, file.stat().st_size // 2)
        listed = path / "array_metadatas" / f"process_{process}"
        flip(listed, 20)
        assert any(listed.name in one for one in fcc.verify(path).checkpoints[0].damage)
        flip(listed, 20)
    structure = path / "_METADATA"
    flip(structure, structure.read_bytes().index(b"skip_deserialize"), 0)  # a key that no reader looks at
    with pytest.raises(ChecksumError, match="_METADATA"):
        fcc.restore(path)
    flip(structure, structure.read_bytes().index(b"rkip_deserialize"), 0)
    assert fcc.verify(path).ok


def test_errors_name_leaf_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the leaf, the chunk, both checksums and what to do; checksums="off" reads the damaged bytes."""
    monkeypatch.setattr(read_arrays, "PIECE_BYTES", MIB)  # a part that verify() reads at once, of which this has two
    path = saved(tmp_path / "c")
    file, at = find(path, START)
    flip(file, at + MIB + 5)
    with pytest.raises(
        ChecksumError, match=r"chunk 'large/0.0' of the leaf 'large'.*block 1.*checksums='off'"
    ) as caught:
        fcc.restore(path)
    assert caught.value.leaf == "large"
    assert fcc.verify(path).damaged
    for mode in ("write", "off"):
        with config.override(checksums=mode):
            assert not np.array_equal(fcc.restore(path)["large"], LARGE)
    with fcc.open_checkpoint(path) as opened:
        assert np.array_equal(opened.read("mid")["mid"], TREE["mid"])  # the other leaves are whole


@pytest.mark.parametrize(
    ("summing", "format", "size"),
    [
        ((BlockSums, "update"), "msgpack", MIB // 4),
        ((BlockSums, "update"), "msgpack", 40 * MIB),
        ((checksums, "of_blocks"), "orbax", 8 * MIB),
    ],
)
def test_an_array_that_changes_while_it_is_written(
    summing: tuple[Any, str], format: Any, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread writes to it just after its bytes were summed: these are the bytes that are written."""
    array = np.zeros(size, np.uint8)
    with monkeypatch.context() as patch:
        around(patch, *summing, then=lambda *_: array.fill(9))
        fcc.save(tmp_path / "c", {"a": array}, format=format)
    assert (array == 9).all() and not fcc.restore(tmp_path / "c")["a"][0]


def test_settings(tmp_path: Path) -> None:
    """``off`` writes no file; ``write`` and ``verify`` do; anything else is refused."""
    assert not (saved(tmp_path / "off", checksums="off") / CHECKSUMS).exists()
    assert (saved(tmp_path / "write", checksums="write") / CHECKSUMS).exists()
    assert not fcc.verify(tmp_path / "off").verified
    with pytest.raises(SettingError, match="checksums"):
        config.update(checksums="crc32")


def test_mapped_arrays_are_verified_when_asked(tmp_path: Path) -> None:
    """A mapping reads nothing, so nothing is verified until verify() is called."""
    path = saved(tmp_path / "c")
    file, at = find(path, START)
    flip(file, at + 9)
    assert not np.array_equal(fcc.restore(path, mapped=True)["large"], LARGE)
    assert fcc.verify(path).damaged


def test_what_others_write_is_no_damage(tmp_path: Path) -> None:
    """Values that another tool wrote later have no checksums, and the other leaves keep theirs."""
    path = saved(tmp_path / "c")
    changed = LARGE[::-1].copy()
    database(path)["large/0.0"] = changed.tobytes()
    assert np.array_equal(fcc.restore(path)["large"], changed)
    assert not fcc.verify(path).damaged
    file, at = find(path, TREE["mid"].tobytes())
    flip(file, at)
    with pytest.raises(ChecksumError, match="mid"):
        fcc.restore(path)


def edited(name: str) -> Callable[[Path], Any]:
    """A file of another size."""
    return lambda path: (path / name).write_text((path / name).read_text() + "\n")


def recorded(**changes: Any) -> Callable[[Path], Any]:
    """Other records, with a right checksum of their own."""
    return lambda path: rewrite(path / CHECKSUMS, lambda found: found.update(changes))


def without_chunk(path: Path) -> None:
    """No record of the large chunk."""
    rewrite(path / CHECKSUMS, lambda found: found["chunks"].pop("large/0.0"))


def cut(length: int) -> Callable[[Path], Any]:
    """So many bytes less of the file of checksums, or only so many."""
    return lambda path: (path / CHECKSUMS).write_bytes((path / CHECKSUMS).read_bytes()[:length])


FIRST = crc32c(LARGE.tobytes()[:MIB]).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("change", "files", "unverified"),
    [
        # Files of another size were edited; what a later version says is not judged.
        (edited("_sharding"), False, set()),
        (edited("_METADATA"), False, set()),
        (lambda path: (path / "_sharding").unlink(), False, set()),
        (recorded(version=2, chunks={"large/0.0": b"1234"}), False, {"large", "mid", "small"}),
        (lambda path: (path / CHECKSUMS).unlink(), False, {"large", "mid", "small"}),
        (without_chunk, True, {"large"}),
        (recorded(data_files=[]), True, {"large", "mid"}),
    ],
)
def test_what_cannot_be_checked_is_unverified(tmp_path: Path, change: Any, files: bool, unverified: set[str]) -> None:
    """Neither ok nor damaged, whatever covers the rest; it is restored, and one leaf is enough for the whole."""
    path = saved(tmp_path / "c")
    change(path)
    assert_same(fcc.restore(path), TREE)
    (report,) = fcc.verify(path).checkpoints
    states = {leaf.path: leaf.state for leaf in report.leaves if leaf.path in ("large", "mid", "small")}
    assert states == {name: "unverified" if name in unverified else "ok" for name in states}
    assert (report.state, fcc.verify(path).ok) == (("unverified", False) if unverified else ("ok", True))
    assert BACKEND.open(location_of(path)).verify_checksums() == files


@pytest.mark.parametrize(
    "change",
    [
        *map(cut, (0, 3, 4, 200, -1)),
        recorded(chunks=None),
        recorded(chunks={"large/0.0": 5}),
        recorded(chunks={"large/0.0": FIRST}),
        recorded(files={"_METADATA": b""}),
        recorded(files={"_METADATA": [5, None]}),
        recorded(data_files=3),
        recorded(files={"../outside": [1, zlib.crc32(b"x").to_bytes(4, "little")]}),
    ],
)
def test_hostile_and_cut_files_of_checksums(tmp_path: Path, change: Any) -> None:
    """Whatever it holds, reading and verifying say so, and read nothing outside of the directory."""
    path = saved(tmp_path / "c")
    (tmp_path / "outside").write_text("x")
    change(path)
    with contextlib.suppress(CorruptCheckpointError):
        assert np.array_equal(fcc.restore(path)["large"], LARGE)
    assert fcc.verify(path).damaged


def test_bits_that_numpy_does_not_show(tmp_path: Path) -> None:
    """Bytes are summed as they are: NaN payloads, other byte orders, sub-byte types, bools that are not 0 or 1."""
    raw = RNG.integers(0, 256, 1 << 18, np.uint8)
    names = [">f4", "bfloat16", "int4", "float8_e4m3fn", "complex64", "bool", "<M8[s]"]
    tree = {name: raw.view(jnp.dtype(name) if name[0] not in "<>" else name) for name in names}
    path = saved(tmp_path / "c", tree)
    restored = fcc.restore(path)
    assert all(np.array_equal(restored[name].view(np.uint8), raw) for name in names)
    assert fcc.verify(path).ok


@pytest.mark.parametrize("shape", [(1009, 331), (2, 3, 100_003), (1, 300_007), (400_001,)])
def test_chunks_at_the_edge(shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of arrays above 2 GiB, here 1 MiB: zarr stores them whole, with zeros behind the array's bytes."""
    monkeypatch.setattr(zarr, "_PLAIN_CHUNK_BYTES", 1 << 20)
    array = RNG.standard_normal(shape)
    path = saved(tmp_path / "c", {"a": array})
    assert_same(fcc.restore(path), {"a": array})
    found = fcc.verify(path)
    assert found.ok and found.verified
    for place in (0, array.size // 2, array.size - 1):
        file, at = find(path, array.reshape(-1)[place : place + 1].tobytes())
        flip(file, at + 2)
        with pytest.raises(ChecksumError, match="'a'"):
            fcc.restore(path)
        assert fcc.verify(path).damaged
        flip(file, at + 2)
    assert fcc.verify(path).ok


@pytest.mark.parametrize("compression", LAYOUTS)
def test_zeros_of_chunks_at_the_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None) -> None:
    """TensorStore pads with them on every axis, as its own reader of the database finds; no values are there."""
    tree = {"a": RNG.integers(1, 99, (5, 7, 11), np.uint8), "zeros": np.zeros(9000)}  # a codec makes them small
    monkeypatch.setattr(zarr, "chunk_shape", lambda shape, *_: [3, 4, 11] if len(shape) == 3 else [9000])
    monkeypatch.setattr(ocdbt_writer, "_COPY_BELOW_BYTES", 0)
    path = saved(tmp_path / "c", tree, compression=compression)
    store = database(path)
    if compression is None:
        assert store["a/1.1.0"] == np.pad(tree["a"][3:, 4:], ((0, 1), (0, 1), (0, 0))).tobytes()
    assert (len(store["zeros/0" if compression is None else "zeros/c/0"]) < 1024) == (compression == "zstd")
    assert fcc.verify(path).ok
    for found in (fcc.restore(path), ocp.PyTreeCheckpointer().restore(path)):
        assert_same(found, tree)


def test_records_of_older_releases(tmp_path: Path) -> None:
    """They hold zlib's CRC-32 of every MiB, by which arrays and files are verified as they were."""
    path = saved(tmp_path / "c")

    def as_before(found: dict[str, Any]) -> None:
        def sums(data: bytes) -> bytes:
            return b"".join(zlib.crc32(data[at : at + MIB]).to_bytes(4, "little") for at in range(0, len(data), MIB))

        found["algorithm"] = "crc32"
        found["chunks"] = {"large/0.0": sums(LARGE.tobytes()), "mid/0": sums(TREE["mid"].tobytes())}

    rewrite(path / CHECKSUMS, as_before)
    assert_same(fcc.restore(path), TREE)
    assert fcc.verify(path).verified
    flip(path / "_METADATA", 2)
    with pytest.raises(ChecksumError, match="_METADATA"):
        fcc.restore(path)
    flip(path / "_METADATA", 2)
    file, at = find(path, START)
    flip(file, at + MIB + 5)
    with pytest.raises(ChecksumError, match="block 1"):
        fcc.restore(path)


ROWS = np.arange(300_900, dtype=np.float32).reshape(1003, 300)


def test_crc32c_is_zarrs_codec(tmp_path: Path) -> None:
    """Small and large arrays are zarr v3 with the checksum last (RFC 3720); zstd comes before it, where it pays."""
    tree = {"small": np.full(32, 255, np.uint8), "large": ROWS}
    for compression, names in [("crc32c", ["bytes", "crc32c"]), ("zstd", ["bytes", "zstd", "crc32c"])]:
        path = save(tmp_path / compression, tree, compression)
        assert json.loads((Path(path) / "_METADATA").read_text())["use_zarr3"] is True
        assert [codec["name"] for codec in stored_metadata(path, "large")["codecs"]] == names
        assert [codec["name"] for codec in stored_metadata(path, "small")["codecs"]] == ["bytes", "crc32c"]
        assert database(path, "small/")["c/0"] == b"\xff" * 32 + struct.pack("<I", 0x62A8AB43)  # its test vector


@pytest.mark.parametrize("shape", [(3,), (20, 20), (1000, 300)])
@pytest.mark.parametrize("compression", ["crc32c", "zstd"])
def test_a_flipped_bit_is_an_error_that_names_leaf_and_chunk(
    tmp_path: Path, shape: tuple[int, ...], compression: str
) -> None:
    """Inline in the database, small and large; TensorStore, which checks too, does not read it either."""
    array = fill(shape, np.dtype(np.float32), 1)
    path = save(tmp_path / "c", {"inner": {"w": array}}, compression)
    if shape == (3,):
        store = database(path, "inner.w/")  # a node of the database has a checksum of its own
        store["c/0"] = bytes([*store["c/0"][:5], store["c/0"][5] ^ 4, *store["c/0"][6:]])
    else:
        flip(*find(path, array.tobytes()[:64]))
    with pytest.raises(ChecksumError, match=r"'inner/w'.*inner\.w/c/0"):
        load(path)
    with pytest.raises(ValueError, match="Digest mismatch"):
        ocp.PyTreeCheckpointer().restore(path)


def test_parts_are_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of an array of several chunks, whose last is padded; a part next to damage is an error."""
    monkeypatch.setattr("flax_ckpt_compat.orbax_backend.zarr._SPLIT_CHUNK_BYTES", 512 << 10)
    path = save(tmp_path / "c", {"w": ROWS}, "crc32c")
    assert stored_metadata(path, "w")["chunk_grid"]["configuration"]["chunk_shape"] == [251, 300]
    (handle,) = handles(path).values()
    boxes = [(slice(0, 1003), slice(0, 300)), (slice(5, 700), slice(0, 300)), (slice(3, 1003), slice(17, 19))]
    for box in boxes:
        np.testing.assert_array_equal(handle.reader.read([handle.part(box)])[0], ROWS[box])
    for box, found in zip(boxes, handle.reader.read([handle.part(box) for box in boxes]), strict=True):
        np.testing.assert_array_equal(found, ROWS[box])
    np.testing.assert_array_equal(handle.reader.read([handle], mapped=True)[0], ROWS)
    flip(*find(path, ROWS[500].tobytes()))
    (handle,) = handles(path).values()
    with pytest.raises(ChecksumError, match=r"'w'.*chunk 'w/c/1/0'"):
        handle.reader.read([handle.part((slice(251, 253), slice(0, 2)))])
    np.testing.assert_array_equal(handle.reader.read([handle.part((slice(0, 251), slice(0, 300)))])[0], ROWS[:251])
