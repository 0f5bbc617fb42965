"""``.npz`` files, as numpy writes them and big_vision and ViT publish them."""

from __future__ import annotations

import io
import itertools
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.backend import ArraySlice
from tests.support.layouts import assert_every_function_reads, assert_same

PARAMS = {
    "params": {
        "embedding": {"kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "bias": np.arange(4.0)},
        "Transformer": {"encoderblock_0": {"MlpBlock_3": {"kernel": np.asfortranarray(np.arange(6).reshape(2, 3))}}},
        "cls": np.zeros((0, 3), np.float16),
    },
    "step": np.array(7),
}
SAVES = {"stored": np.savez, "compressed": np.savez_compressed}


@pytest.fixture(params=SAVES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of arrays that are named by their key paths."""
    SAVES[request.param](tmp_path / "ViT-B_16.npz", **traverse_util.flatten_dict(PARAMS, sep="/"))
    return tmp_path / "ViT-B_16.npz"


def test_every_function_reads_it(file: Path, tmp_path: Path) -> None:
    """Names with slashes are nested; arrays in Fortran's order have the same values."""
    assert_every_function_reads(file, PARAMS, "npz", tmp_path / "converted")


def test_checksums_are_verified(file: Path) -> None:
    """The archive has a CRC-32 of each array, and `verify` finds what differs from it."""
    assert flax_ckpt_compat.verify(file).ok
    with zipfile.ZipFile(file) as archive:
        member = archive.getinfo("params/embedding/kernel.npy")
    content = bytearray(file.read_bytes())
    at = member.header_offset + 30 + len(member.filename) + member.compress_size
    content[at] ^= 1
    file.write_bytes(content)
    assert flax_ckpt_compat.verify(file).damaged


def test_slices(file: Path) -> None:
    """A slice is what numpy cuts out, whatever the order and the compression."""
    with flax_ckpt_compat.open_checkpoint(file) as view:
        for name, box in (("params/embedding/kernel", np.s_[1:2, 0:3, 2:4]),
                          ("params/Transformer/encoderblock_0/MlpBlock_3/kernel", np.s_[0:2, 1:2])):  # fmt: skip
            handle = view.leaves()[name]
            (found,) = handle.reader.read([ArraySlice(handle, box)])
            expected = traverse_util.flatten_dict(PARAMS, sep="/")[name][box]
            assert_same(found, np.ascontiguousarray(expected))


def test_two_raw_bytes_are_bfloat16(tmp_path: Path) -> None:
    """numpy writes bfloat16 as raw bytes, which big_vision takes for what they were."""
    expected = np.arange(5, dtype=ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", w=expected.view("V2"))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a.npz"), {"w": expected})


@pytest.mark.parametrize("names", [("a", "a/b"), ("a//b", "c"), ("/a",), ("a/",)])
def test_names_that_are_no_key_paths(names: tuple[str, ...], tmp_path: Path) -> None:
    """They stay flat, all of them."""
    np.savez(tmp_path / "a.npz", **dict.fromkeys(names, np.ones(2)))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a.npz"), dict.fromkeys(names, np.ones(2)))


def test_foreign_byte_orders_stay(tmp_path: Path) -> None:
    """An array comes back with the dtype that numpy gives."""
    np.savez(tmp_path / "a.npz", w=np.arange(3, dtype=">i4"))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a.npz"), {"w": np.arange(3, dtype=">i4")})


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """An array of objects is refused when it is asked for, hides nothing else, and its pickle is not run."""
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (ran,))

    np.savez(tmp_path / "a.npz", good=np.ones(3), bad=np.array([Hostile()], dtype=object))
    with pytest.raises(errors.UnsupportedLeafError, match="bad holds Python objects"):
        flax_ckpt_compat.restore(tmp_path / "a.npz")
    (found,) = flax_ckpt_compat.verify(tmp_path / "a.npz").checkpoints
    assert {leaf.path: leaf.state for leaf in found.leaves} == {"good": "ok", "bad": "unreadable"}
    assert_same(flax_ckpt_compat.restore(tmp_path / "a.npz", {"good": np.zeros(3)}), {"good": np.ones(3)})
    with flax_ckpt_compat.open_checkpoint(tmp_path / "a.npz") as view:
        assert_same(view.read("good"), {"good": np.ones(3)})
    assert not ran.exists()


def test_it_is_no_checkpoint_of_a_directory(file: Path) -> None:
    """Under a checkpoint's name it is refused, and neither counted nor removed."""
    file.rename(file.with_name("checkpoint_1"))
    with pytest.raises(errors.UnrecognizedFormatError, match=r"\.npz"):
        flax_ckpt_compat.restore(file.with_name("checkpoint_1"))
    for step in (2, 3):
        checkpoints.save_checkpoint(file.parent, {"w": np.ones(2)}, step, keep=1)
    assert file.with_name("checkpoint_1").exists()


def archive(**members: bytes) -> bytes:
    """A zip archive of these files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as found:
        for name, content in members.items():
            found.writestr(name.replace("_npy", ".npy"), content)
    return stream.getvalue()


def npy(header: str, data: bytes = b"") -> bytes:
    """An ``.npy`` file with a header of this text."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def array(shape: str = "(2,)", descr: str = "'<f4'", nbytes: int = 8) -> bytes:
    """An ``.npy`` file of an array."""
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}", bytes(nbytes))


DAMAGED = [
    *(archive(a_npy=array())[:length] for length in (-1, 60)),
    archive(a_npy=array()).replace(b"a.npy", b"b.npy", 1),
    *(
        archive(a_npy=content)
        for content in (
            *(array(nbytes=7), array(nbytes=9), b"", b"\x93NUMPY\x09\x00", array(descr="'<q9'")),
            *(npy("__import__('os').system('false')"), npy("(" * 110)),
            *(array(shape) for shape in ("(-2,)", "(2**70,)")),
            *(array(shape, nbytes=0) for shape in ("(99999999999999999999,)", "(4611686018427387904, 0)")),
        )
    ),
]
# Other files in the archive, structured arrays, and text of no length are not left out silently.
UNSUPPORTED = [archive(notes=b"text"), *(archive(a_npy=array("(2,)", d)) for d in ("[('x', '<f4')]", "'|S0'"))]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        *((content, errors.CorruptCheckpointError) for content in DAMAGED),
        *((content, errors.UnsupportedLeafError) for content in UNSUPPORTED),
        (archive(**{"/".join("a" * 20_000) + "_npy": array()}), errors.DepthError),  # took seconds
    ],
    ids=itertools.count(),  # an archive holds the time at which it was made, and each worker has made its own
)
def test_hostile_files(content: bytes, error: type[Exception], tmp_path: Path) -> None:
    """The error names the file, before any array is allocated."""
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(error, match=r"a\.npz"):
        flax_ckpt_compat.restore(tmp_path / "a.npz")
