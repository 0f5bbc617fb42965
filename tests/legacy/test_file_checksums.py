"""Checksums of msgpack files, in an extended attribute: what they find, and what they must not call damage."""

import contextlib
import functools
import os
import random
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from crc32c import crc32c
from flax.training import checkpoints as flax_checkpoints
from flax_ckpt_compat.legacy import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._core.backend import WriteOptions
from flax_ckpt_compat._core.errors import ChecksumError, CorruptCheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import iter_leaves
from tests.legacy.conftest import restore
from tests.reliability.shim import holds_attributes
from tests.support.disks import flip
from tests.support.profiles import examples
from tests.support.saves import around, use_flag
from tests.support.trees import arrays, fill, fingerprint, to_branches

MIB = 2**20
ATTRIBUTE = "user.flax_ckpt_compat.checksums"
SMALL = {"params": {"w": np.arange(40.0), "b": np.float32(1.5)}, "step": 7, "name": "run", "none": None, "z": 1 + 2j}
# Several units; arrays that are cut, small ones between them, and one that crosses the end of a unit.
LARGE = {
    "a": fill((3, MIB // 4), np.dtype(np.float32), 1),
    **{f"s{n:03}": fill((1000,), np.dtype(np.float32), n) for n in range(300)},
    "t": {"text": "x" * 1000, "n": 5, "bytes": bytes(range(256)) * 300},
    "z": fill((MIB + 5,), np.dtype(np.uint8), 2),
}


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where to save a msgpack file, on a file system with attributes."""
    if not holds_attributes(str(tmp_path)):
        pytest.skip("this file system has no extended attributes")
    with use_flag(False):
        yield tmp_path / "checkpoint_1"


load = functools.partial(restore, verify=True)


def write(path: Path, tree: Any) -> None:
    """Writes a plain dict."""
    BACKEND.write(str(path), BACKEND.prepare(to_branches(tree)), WriteOptions())


@pytest.mark.parametrize(
    ("windows", "most"),
    [(False, 256), (True, 256), (True, 2)],
    ids=["every byte of a small file", "some of a large one", "some where several units share a recorded checksum"],
)
def test_flipped_bits_are_found(
    path: Path, windows: bool, most: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In data, keys, headers and numbers; where the structure still decodes, by the checksum."""
    monkeypatch.setattr("flax_ckpt_compat._core.local.local_file._MAX_BLOCKS", most)
    tree, said = SMALL, "are not what was saved"
    write(path, tree)
    flips = [(offset, 0) for offset in range(path.stat().st_size)]
    if windows:
        request.getfixturevalue("in_windows")
        tree, said = LARGE, f"{said}|expected a Flax msgpack checkpoint"
        path.unlink()
        write(path, tree)
        rng = random.Random(1)
        flips = [(rng.randrange(path.stat().st_size), rng.randrange(8)) for _ in range(40)]
    for offset, bit in flips:
        flip(path, offset, bit)
        with pytest.raises(CorruptCheckpointError if windows else ChecksumError, match=said):
            load(path)
        flip(path, offset, bit)
    assert fingerprint(load(path)) == fingerprint(tree)
    assert len(os.getxattr(path, ATTRIBUTE)) < (50 if most == 2 else 100)


@pytest.mark.usefixtures("in_windows")
@pytest.mark.parametrize("tree", [{str(n): n + 0.5 for n in range(600)}, {"text": "x" * 5000 + "300", "n": 3}])
def test_flipped_bits_of_large_files_without_arrays_are_found(path: Path, tree: dict[str, Any]) -> None:
    """Numbers and text are read with the structure, and no array asks for a verification."""
    write(path, tree)
    assert load(path) == tree
    value = struct.pack(">d", 300.5) if "300" in tree else b"300"
    flip(path, path.read_bytes().index(value) + len(value) - 1)
    for read in (load, lambda path: checkpoints.restore_checkpoint(path, None)):
        with pytest.raises(ChecksumError):
            read(path)


def test_the_error_names_the_leaf_and_the_way_out(path: Path) -> None:
    """The leaf whose bytes were damaged, through the public function, and the setting that reads it as it is."""
    tree = {"inner": {"w": np.arange(2 * MIB, dtype=np.float32)}}
    checkpoints.save_checkpoint(path.parent, tree, 1)
    flip(path, 3 * MIB)
    with pytest.raises(ChecksumError, match=r"bytes 3145728 to 4194304 .*'inner/w'.*checksums='off'") as caught:
        checkpoints.restore_checkpoint(path.parent, None)
    assert caught.value.leaf == "inner/w"
    for setting in ("off", "write"):
        with config.override(checksums=setting):
            found = checkpoints.restore_checkpoint(path.parent, None)
        assert np.count_nonzero(found["inner"]["w"] != tree["inner"]["w"]) == 1


def test_the_attribute_is_as_the_guide_says(path: Path) -> None:
    """CRC-32C of each MiB, little-endian, and of a block that of its units' checksums; older releases had zlib's."""
    write(path, LARGE)
    data, content = path.read_bytes(), os.getxattr(path, ATTRIBUTE)
    units = [data[at : at + MIB] for at in range(0, len(data), MIB)]
    for name, crc in (("crc32c", crc32c), ("crc32", zlib.crc32)):
        sums = b"".join(crc(crc(unit).to_bytes(4, "little")).to_bytes(4, "little") for unit in units)
        as_recorded = content[:1] + name.encode().ljust(7, b"\0") + content[8 : -4 - len(sums)] + sums
        as_recorded += zlib.crc32(as_recorded).to_bytes(4, "little")
        assert len(content) < 100 and (name == "crc32" or content == as_recorded)
        os.setxattr(path, ATTRIBUTE, as_recorded)
        flip(path, MIB + 100)
        with pytest.raises(ChecksumError):
            load(path)
        flip(path, MIB + 100)
        assert fingerprint(load(path)) == fingerprint(LARGE)


def test_no_attribute_without_the_setting(path: Path) -> None:
    """``off`` records nothing; ``write`` does."""
    for setting, expected in [("off", False), ("write", True), ("verify", True)]:
        with config.override(checksums=setting):
            checkpoints.save_checkpoint(path.parent, SMALL, 1, overwrite=True)
        assert (ATTRIBUTE in os.listxattr(path)) is expected


def rsync(path: Path, other: Path) -> None:
    """Copies to a temporary with the old times, which gets the name."""
    shutil.copyfile(other, temporary := path.with_name(".rsync"))
    os.utime(temporary, ns=(other.stat().st_atime_ns, other.stat().st_mtime_ns))
    os.replace(temporary, path)


ZEROS = {"w": np.zeros(50_000)}
REPLACED: dict[str, Callable[[Path, Path], Any]] = {
    "in place": lambda path, other: path.write_bytes(other.read_bytes()),
    "rsync": rsync,
    "cp": lambda path, other: subprocess.run(["cp", other, path], check=True),
    "cp -a": lambda path, other: subprocess.run(["cp", "-a", other, path], check=True),
    "mv": lambda path, other: os.replace(other, path),
    "real flax": lambda path, _: flax_checkpoints.save_checkpoint(path.parent, ZEROS, 1, overwrite=True),
}


@pytest.mark.parametrize("how", REPLACED)
def test_another_file_in_its_place_is_no_damage(path: Path, how: str) -> None:
    """The attribute of the old file, where it stays, does not count for the new one, though it has the same size."""
    write(path.with_name("other"), ZEROS)
    write(path, {"w": np.ones(50_000)})
    os.utime(path, ns=(1, path.stat().st_mtime_ns))
    REPLACED[how](path, path.with_name("other"))
    np.testing.assert_array_equal(load(path)["w"], ZEROS["w"])


def test_touched_and_copied_files_are_restored(path: Path) -> None:
    """``touch`` and plain copies lose the checksums, ``cp -a`` and renames keep them."""
    write(path, SMALL)
    names = {name: path.with_name(name) for name in ("cp", "cp-a", "mv", "touch")}
    subprocess.run(["cp", path, names["cp"]], check=True)
    for name in ("cp-a", "mv", "touch"):
        subprocess.run(["cp", "-a", path, names[name]], check=True)
    os.rename(names["mv"], path.with_name("moved"))
    names["mv"] = path.with_name("moved")
    os.utime(names["touch"])
    for name, file in names.items():
        assert fingerprint(load(file)) == fingerprint(SMALL)
        flip(file, 60)
        if name in ("cp-a", "mv"):
            with pytest.raises(ChecksumError):
                load(file)


@pytest.mark.parametrize("damage", [b"", b"x" * 40, None])
def test_a_strange_attribute_is_none(path: Path, damage: bytes | None) -> None:
    """What is not a record of ours, or damaged itself, does not condemn the file."""
    write(path, SMALL)
    content = bytearray(os.getxattr(path, ATTRIBUTE))
    content[-6] ^= 1
    os.setxattr(path, ATTRIBUTE, content if damage is None else damage)
    assert fingerprint(load(path)) == fingerprint(SMALL)


@pytest.mark.parametrize("names", [["setxattr", "getxattr"], []], ids=["no functions", "refused"])
def test_without_attributes_nothing_is_verified(path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """macOS lacks the functions, and some file systems refuse; saves and restores work."""
    for name in names:
        monkeypatch.delattr(os, name)
    for name in ["setxattr", "getxattr"] if not names else []:
        monkeypatch.setattr(os, name, Mock(side_effect=OSError(95, "Operation not supported")))
    write(path, SMALL)
    flip(path, 60)
    assert load(path)["step"] == 7


@pytest.mark.usefixtures("in_windows")
def test_parts_are_verified_where_they_fill_blocks(path: Path) -> None:
    """One large leaf is verified without the rest; a small one is read alone; leaves and slices may overlap."""
    write(path, LARGE)
    flip(path, path.stat().st_size - 40)  # of the last leaf
    reader = BACKEND.open(location_of(path), verify=True)
    leaves = {"/".join(at): leaf for at, leaf in iter_leaves(reader.tree)}
    both = [leaves["a"], leaves["a"].part((slice(1, 2), slice(0, MIB // 4))), leaves["s007"], leaves["a"]]
    for found, expected in zip(
        reader.read(both), [LARGE["a"], LARGE["a"][1:2], LARGE["s007"], LARGE["a"]], strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(reader.read([leaves["s299"]])[0], LARGE["s299"])
    assert reader.verify_checksums(leaves["a"]) is True
    for handle in (leaves["z"], None):
        with pytest.raises(ChecksumError, match="are not what was saved"):
            reader.verify_checksums(handle)
    reader.close()
    flip(path, 2 * MIB)  # of the first one
    reader = BACKEND.open(location_of(path), verify=True)
    with contextlib.closing(reader), pytest.raises(ChecksumError, match="'a'"):
        reader.read([reader.tree.children["a"]])
    reader = BACKEND.open(location_of(path), verify=True)
    path.write_bytes(bytes(path.stat().st_size))  # by another program, in place
    with contextlib.closing(reader), pytest.raises(ChecksumError, match="not what it was when it was opened"):
        reader.read([reader.tree.children["a"]])


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_seams_of_units(save: Any, data: Any) -> None:
    """Whatever is read together, in parts, twice and over the ends of units, arrives as it was saved."""
    tree = data.draw(st.lists(arrays(), min_size=1, max_size=8))
    unit, direct = data.draw(st.sampled_from([16, 64, 100])), data.draw(st.sampled_from([1, 9]))
    sizes = {
        "_core.checksums.BLOCK_BYTES": unit,
        "_core.byte_reads._DIRECT_FROM": direct, "_core.byte_reads._THREADS_FROM_BYTES": 500,
        "legacy.reader._SMALL": 40, "legacy.checksummed_file.PIECE_BYTES": 70,
        "_core.local.local_file._MAX_BLOCKS": data.draw(st.sampled_from([2, 256])),
        "legacy.reader._WHOLE": 0,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(f"flax_ckpt_compat.{name}", value)
        path = save({str(index): array for index, array in enumerate(tree)})
        with contextlib.closing(BACKEND.open(location_of(path), verify=True)) as reader:
            leaves = [leaf for _, leaf in iter_leaves(reader.tree)]
            for _ in range(3):
                chosen, expected = [], []
                for number in data.draw(st.lists(st.sampled_from(range(len(tree))), max_size=6)):
                    leaf, array = leaves[number], tree[number]
                    if array.ndim and data.draw(st.booleans()):
                        rows = sorted(data.draw(st.tuples(*[st.integers(0, len(array))] * 2)))
                        index = (slice(*rows), *(slice(0, length) for length in array.shape[1:]))
                        leaf, array = leaf.part(index), array[index]
                    chosen.append(leaf)
                    expected.append(array)
                assert fingerprint(reader.read(chosen)) == fingerprint(expected)
            assert fingerprint(reader.read(leaves)) == fingerprint(tree)
    path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system")
def test_the_attribute_is_there_before_the_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is acknowledged after a sync includes it."""
    seen = list[bool]()
    around(monkeypatch, os, "fsync", lambda descriptor: seen.append(ATTRIBUTE in os.listxattr(descriptor)))
    write(path, SMALL)
    assert seen == [True]
