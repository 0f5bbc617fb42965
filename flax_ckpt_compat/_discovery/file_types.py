"""Identify files that are no checkpoints by their first bytes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.storage_errors import translated

_FIRST_BYTES = 512
_LOOKS: Sequence[tuple[bytes, str]] = (
    (b"version https://git-lfs", "a git-lfs pointer (the file itself was never fetched: run `git lfs pull`)"),
    (b"\x1f\x8b", "a gzip file (unpack it first)"),
    (b"PK\x03\x04", "a zip archive (a .npz file, a PyTorch checkpoint, or a zipped directory)"),
    (b"\x28\xb5\x2f\xfd", "a zstd file (unpack it first)"),
    (b"\xfd7zXZ", "an xz file (unpack it first)"),
    (b"BZh", "a bzip2 file (unpack it first)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a .npy file"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "a PNG image"),
    (b"model_checkpoint_path:", "TensorFlow's list of checkpoints"),
    (b"SQLite format 3", "an SQLite database"),
)
# First bytes of a msgpack map, and of a Flax array that is the whole tree.
_TREE_STARTS = (*range(0x80, 0x90), 0xDE, 0xDF, 0xC7, 0xC8, 0xC9)


def looks_like(path: str) -> str | None:
    """Return what a file that does not decode as msgpack looks like, or None."""
    with translated(path):
        first, size = paths.read(path, 0, _FIRST_BYTES), paths.getsize(path)
    # First: the length at its beginning may look like a pickle or any other magic number.
    if first[8:9] == b"{" and 2 <= int.from_bytes(first[:8], "little") <= size - 8:
        return "a safetensors file"
    for magic, what in _LOOKS:
        if first.startswith(magic):
            return what
    # msgpack's empty map is the single byte 0x80, the first byte of every pickle of protocol 2 or later.
    if len(first) > 2 and first[0] == 0x80 and first[1] in range(2, 6):
        return "a Python pickle (it is not opened, because unpickling runs code)"
    if b"brain.Event:" in first[:64]:
        return "an event file of TensorBoard"
    if first[257:262] == b"ustar":
        return "a tar archive (unpack it first)"
    return _text_looks_like(first)


def may_be_msgpack_tree(path: str) -> bool:
    """Return whether a file begins like Flax's checkpoints, and looks like nothing else."""
    with translated(path):
        first = paths.read(path, 0, 1)
    return bool(first) and first[0] in _TREE_STARTS and looks_like(path) is None


def _text_looks_like(first: bytes) -> str | None:
    text = first.lstrip()[:64].lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML or XML page (a failed download?)"
    if text.startswith((b'{"', b"[", b"{\n", b"{\r")):
        return "JSON text"
    if any((byte < 0x20 and byte not in b"\t\n\f\r") or byte == 0x7F for byte in first):
        return None
    try:
        # Not final: the last character may be truncated.
        codecs.getincrementaldecoder("utf-8")().decode(first)
    except UnicodeDecodeError:
        return None
    return "a text file"
