"""EasyLM's streams, which are read and never written; Flax and msgpack write them here as EasyLM does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization, traverse_util

import flax_ckpt_compat
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.backend import ArraySlice
from tests.support.layouts import assert_every_function_reads, assert_same

EASYLM = {
    "step": np.int32(80000),
    "params": {
        "params": {
            "wte": {"embedding": np.arange(12, dtype=np.float32).reshape(4, 3)},
            "h": {str(n): {"kernel": np.full((3, 3), n, ml_dtypes.bfloat16)} for n in range(12)},
            "large": np.arange(30_000, dtype=np.float32).reshape(300, 100),
        }
    },
}


def stream(state: Any) -> bytes:
    """What EasyLM writes: a pair of key path and bytes for each leaf."""
    packer = msgpack.Packer()
    leaves = traverse_util.flatten_dict(serialization.to_state_dict(state))
    return b"".join(packer.pack((key, serialization.to_bytes(leaf))) for key, leaf in leaves.items())


def test_every_function_reads_a_stream(tmp_path: Path) -> None:
    """By its own path."""
    (tmp_path / "it-7").write_bytes(stream(EASYLM))
    assert_every_function_reads(tmp_path / "it-7", EASYLM, "stream", tmp_path / "converted")


def test_one_entry(tmp_path: Path) -> None:
    """A stream of one leaf is a stream, also if its key is one name."""
    (tmp_path / "a").write_bytes(stream({"w": np.ones(3)}))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a"), {"w": np.ones(3)})
    (tmp_path / "b").write_bytes(msgpack.packb(("w", serialization.to_bytes(np.ones(3)))))
    assert_same(flax_ckpt_compat.restore(tmp_path / "b"), {"w": np.ones(3)})


def test_arrays_above_a_gibibyte_are_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flax splits large arrays into pieces, here too."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1000)
    (tmp_path / "a").write_bytes(stream(EASYLM))
    assert_same(flax_ckpt_compat.restore(tmp_path / "a"), EASYLM)


def test_slices_are_read_alone(tmp_path: Path) -> None:
    """A slice of one leaf is what numpy cuts out."""
    (tmp_path / "a").write_bytes(stream(EASYLM))
    with flax_ckpt_compat.open_checkpoint(tmp_path / "a") as view:
        handle = view.leaves()["params/params/large"]
        (found,) = handle.reader.read([ArraySlice(handle, (slice(17, 19), slice(3, 5)))])
    np.testing.assert_array_equal(found, EASYLM["params"]["params"]["large"][17:19, 3:5])


GOOD = stream({"w": np.ones(3), "v": np.ones(2)})


@pytest.mark.parametrize(
    "damaged",
    [
        GOOD[:-1],
        GOOD[: len(GOOD) // 2 + 5],
        GOOD + b"\x92",
        GOOD + b"\x00",
        GOOD + GOOD[: len(GOOD) // 2 + 8],
        msgpack.packb((("w",), serialization.to_bytes(np.ones(3)) + b"\xc0")),
        msgpack.packb((("w",), b"")),
        msgpack.packb((("w",), b"\xc1")),
        msgpack.packb((("w",), b"\x81\xa1a\xc1")),
        GOOD + msgpack.packb((("w", "x"), serialization.to_bytes(np.ones(3)))),
        GOOD + msgpack.packb((("x", 3), serialization.to_bytes(np.ones(3)))),
        GOOD + msgpack.packb((["x"] * 2000, serialization.to_bytes(np.ones(3)))),
        GOOD + b"\x92\x91\xa1x\xc6\xff\xff\xff\xff",
        GOOD + b"\x92\xdc\xff\xff",
    ],
    ids=str,
)
def test_damaged_streams(damaged: bytes, tmp_path: Path) -> None:
    """What ends early, says one thing twice or is no stream to its end is an error that names the file."""
    (tmp_path / "stream").write_bytes(damaged)
    with pytest.raises(errors.CorruptCheckpointError, match="stream"):
        flax_ckpt_compat.restore(tmp_path / "stream")
