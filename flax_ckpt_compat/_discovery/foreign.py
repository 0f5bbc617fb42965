"""Identify files and directories that are not checkpoints, by first bytes and names."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage_errors import translated

_FIRST_BYTES = 512
_LOOKS: Sequence[tuple[bytes, str]] = (
    (b"version https://git-lfs", "a git-lfs pointer (the file itself was never fetched: run `git lfs pull`)"),
    (b"\x1f\x8b", "a gzip file (unpack it first)"),
    (b"PK\x03\x04", "a zip archive (a .npz file, a PyTorch checkpoint, or a zipped directory: unpack that first)"),
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

_MAX_SHOWN = 3
_FLAX_FILE = "flax_model.msgpack"  # of Hugging Face's save_pretrained
_HUGGING_FACE = re.compile(
    r"flax_model(-\d+-of-\d+)?\.msgpack|pytorch_model.*\.bin|(model|adapter_model)(-\d+-of-\d+)?\.safetensors|"
    r"trainer_state\.json|diffusion_flax_model\.msgpack"
)
_KINDS = (
    (re.compile(r"saved_model\.pb(txt)?"), "a SavedModel of TensorFlow"),
    (re.compile(r".*\.data-\d{5}-of-\d{5}"), "a checkpoint of TensorFlow"),
    (re.compile(r".*\.distcp"), "a distributed checkpoint of PyTorch"),
    (re.compile(r".*\.(pt|pth|ckpt)"), "a folder of PyTorch checkpoints"),
    (re.compile(r"events\.out\.tfevents\..*"), "a folder of TensorBoard's events"),
)


def file_looks_like(path: Location) -> str | None:
    """Return what a file that does not decode as msgpack looks like, or None."""
    with translated(path.path):
        first, size = path.read(0, _FIRST_BYTES), path.size()
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


def may_be_msgpack_tree(path: Location) -> bool:
    """Return whether a file begins like Flax's checkpoints, and looks like nothing else."""
    with translated(path.path):
        first = path.read(0, 1)
    return bool(first) and first[0] in _TREE_STARTS and file_looks_like(path) is None


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


def folder_looks_like(path: Location) -> str:
    """Return what a directory that is not a checkpoint looks like, or names some of what it holds."""
    names = sorted(path.listdir())
    if "config.json" in names and any(map(_HUGGING_FACE.fullmatch, names)):
        return "a model folder of Hugging Face"
    for pattern, what in _KINDS:
        if any(map(pattern.fullmatch, names)):
            return what
    more = f", and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"a folder of something else (it holds {', '.join(names[:_MAX_SHOWN])}{more})"


def msgpack_file_in(path: Location) -> Location | None:
    """Return the path of the only msgpack file in a directory, or of Hugging Face's; None if it is ambiguous."""
    names = [name for name in path.listdir() if name.endswith(".msgpack")]
    name = _FLAX_FILE if _FLAX_FILE in names else names[0] if len(names) == 1 else None
    return None if name is None else path / name


def foreign_remedy(path: Location) -> str:
    """Return the remedy for a directory that is not a checkpoint."""
    file = msgpack_file_in(path)
    if file is not None:
        return f"Restore the file in it: {file}."
    return "Restore another step or path, or read it with the program that wrote it."
