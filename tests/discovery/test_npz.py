"""Files of arrays: ``.npz``, as numpy writes them, and what they have in common with safetensors."""

from __future__ import annotations

import io
import itertools
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import save_file

import flax_ckpt_compat
from flax_ckpt_compat import errors
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
    for _ in range(50):  # threads that read one archive got each other's bytes
        assert flax_ckpt_compat.verify(file).ok
    with zipfile.ZipFile(file) as archive:
        member = archive.getinfo("params/embedding/kernel.npy")
    content = bytearray(file.read_bytes())
    at = member.header_offset + 30 + len(member.filename) + member.compress_size
    content[at] ^= 1
    file.write_bytes(content)
    assert flax_ckpt_compat.verify(file).damaged


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


SHAPES = [(), (0, 3), (1,), (7,), (300, 5), (2, 3, 4), (40_000,)]
PARTS: list[tuple[str, tuple[slice, ...]]] = [
    ("int8_0", ()),
    ("int8_1", (slice(0, 0), slice(1, 3))),
    ("float64_3", (slice(2, 5),)),
    ("float32_4", (slice(1, 2), slice(0, 5))),
    ("float32_4", (slice(0, 300), slice(1, 3))),
    ("float64_5", (slice(1, 2), slice(0, 3), slice(1, 2))),
    ("float64_6", (slice(39_990, 40_000),)),
]
Write = Callable[[dict[str, Any], Path], object]
WRITERS: dict[str, Write] = {
    "a.safetensors": save_file,
    "a.npz": lambda tree, path: np.savez(path, **tree),
    "packed.npz": lambda tree, path: np.savez_compressed(path, **tree),
}


def _tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        f"{np.dtype(dtype).name}_{number}": rng.integers(0, 100, shape).astype(dtype)
        for number, shape in enumerate(SHAPES)
        for dtype in (np.float32, np.int8, np.float64)
    }


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Write]:
    """Where a file of each kind will be, and what writes it."""
    return tmp_path / request.param, WRITERS[request.param]


def test_arrays_and_parts_of_them(written: tuple[Path, Write]) -> None:
    """As numpy has them: small and large, empty ones, rows, columns, and single elements."""
    path, write = written
    tree = _tree(0)
    write(tree, path)
    assert_same(flax_ckpt_compat.restore(path), tree)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        leaves = view.leaves()
        parts = [ArraySlice(leaves[name], index) for name, index in PARTS]
        for (name, index), found in zip(PARTS, leaves["int8_0"].reader.read(parts), strict=True):
            np.testing.assert_array_equal(found, tree[name][index])


def test_a_damaged_array_hides_no_other(tmp_path: Path) -> None:
    """It is told when it is asked for, and by `verify`."""
    np.savez(tmp_path / "a.npz", bad=np.full(3, 7.25), good=np.ones(3))
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(content.replace(np.full(3, 7.25).tobytes(), np.full(3, 7.5).tobytes()))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a.npz", {"good": np.zeros(3)}), {"good": np.ones(3)})
    with pytest.raises(errors.CorruptCheckpointError, match="bad does not decode"):
        flax_ckpt_compat.restore(tmp_path / "a.npz")
    (found,) = flax_ckpt_compat.verify(tmp_path / "a.npz").checkpoints
    assert {leaf.path: leaf.state for leaf in found.leaves} == {"good": "ok", "bad": "damaged"}


FORKS_BESIDE_THREADS = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import flax_ckpt_compat
np.savez(sys.argv[1], **{str(number): np.full(50_000, number) for number in range(4)})
with flax_ckpt_compat.open_checkpoint(sys.argv[1]) as view, ThreadPoolExecutor(2) as threads:
    is_right = lambda: all((array == int(name)).all() for name, array in view.read().items())
    others, children = [threads.submit(lambda: all(is_right() for _ in range(5))) for _ in range(2)], []
    for _ in range(2):
        if not (child := os.fork()):
            signal.alarm(60)  # ends a child that waits for ever
            os._exit(not all(is_right() for _ in range(5)))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert all(one.result() for one in others)
"""


def test_processes_and_threads_read_at_positions_of_their_own(tmp_path: Path) -> None:
    """A fork while other threads read neither waits for them, nor moves them; in a process of its own, as jax warns."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS_BESIDE_THREADS, str(tmp_path / "a.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_replaces_a_file_is_not_mixed_in(written: tuple[Path, Write]) -> None:
    """A reader that was opened gives the arrays of the file as it was."""
    path, write = written
    write(_tree(1), path)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        write(_tree(2), path.with_name(f"new-{path.name}"))
        os.replace(path.with_name(f"new-{path.name}"), path)
        assert_same(view.read(), _tree(1))
    assert_same(flax_ckpt_compat.restore(path), _tree(2))


def test_a_file_that_is_cut_off_while_it_is_open(written: tuple[Path, Write]) -> None:
    """The error names it; nothing that is not there is returned."""
    path, write = written
    write(_tree(3), path)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises((errors.CorruptCheckpointError, errors.StorageError), match=str(path)):
            view.read()
