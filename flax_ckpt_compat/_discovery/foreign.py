"""Identify files and directories that are not checkpoints, by first bytes and names."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence

from flax_ckpt_compat._core.location import Location

FIRST_BYTES = 512
_LARGE = 2**62  # bytes
LFS_POINTER = "a git-lfs pointer (the file itself was never fetched: run `git lfs pull`)"
_LFS_START = b"version https://git-lfs"
ZIP = (
    "a zip archive (a PyTorch checkpoint; a zipped directory: unpack that first; or a .npz file, which restores read "
    "if its name ends in .npz)"
)
_LOOKS: Sequence[tuple[bytes, str]] = (
    (_LFS_START, LFS_POINTER),
    (b"\x1f\x8b", "a gzip file (unpack it first)"),
    (b"PK\x03\x04", ZIP),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd file (unpack it first)"),
    (b"\xfd7zXZ", "an xz file (unpack it first)"),
    (b"BZh", "a bzip2 file (unpack it first)"),
    (b"\x04\x22\x4d\x18", "an lz4 file (unpack it first)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive (unpack it first)"),
    (b"\x89HDF", "an HDF5 file (h5py reads it)"),
    (b"\x93NUMPY", "a .npy file (numpy.load reads it)"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "a PNG image"),
    (b"\x7fELF", "a program"),
    (b"GGUF", "a GGUF file of llama.cpp"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"model_checkpoint_path:", "TensorFlow's list of checkpoints"),
    (b"SQLite format 3", "an SQLite database"),
)
# First bytes of a msgpack map, and of a Flax array that is the whole tree.
_TREE_STARTS = (*range(0x80, 0x90), 0xDE, 0xDF, 0xC7, 0xC8, 0xC9)
# Bytes of a msgpack file that is one scalar, by its first byte, and of those that give a length: the bytes of it.
_SCALAR_SIZES = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9} | {
    0xD0: 2,
    0xD1: 3,
    0xD2: 5,
    0xD3: 9,
    0xD4: 3,
    0xD5: 4,
    0xD6: 6,
    0xD7: 10,
    0xD8: 18,
    **dict.fromkeys((*range(129), 144, *range(224, 256)), 1),
    **{byte: byte - 0xA0 + 1 for byte in range(0xA0, 0xC0)},
}
_SIZED_SCALARS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}

_MAX_SHOWN = 3
SAFETENSORS = "a safetensors file (restores read it if its name ends in .safetensors)"
STREAM = "a stream of several msgpack objects, as EasyLM writes (restores read it unless its name is a checkpoint's)"
_SOMETHING_ELSE = "a folder of something else"
JAX_PYTREE = "pytreedef.json"
_FLAX_FILE = "flax_model.msgpack"  # of Hugging Face's save_pretrained
MSGPACK_SUFFIXES = (".msgpack", ".mpk", ".mpack", ".flax")
_HUGGING_FACE = re.compile(
    r"flax_model(-\d+-of-\d+)?\.msgpack|pytorch_model.*\.bin|(model|adapter_model)(-\d+-of-\d+)?\.safetensors|"
    r"trainer_state\.json|diffusion_flax_model\.msgpack"
)
_SHARDS = "flax_model.msgpack.index.json"
_KINDS = (
    (re.compile(r"saved_model\.pb(txt)?"), "a SavedModel of TensorFlow, which tf.saved_model.load reads"),
    (re.compile(r".*\.data-\d{5}-of-\d{5}"), "a checkpoint of TensorFlow, which tf.train.load_checkpoint reads"),
    (re.compile(r"ckpt-\d+\.flax"), "a folder of checkpoints of CLU"),
    (re.compile(r".*\.(msgpack|mpk|mpack|flax)"), "a folder of msgpack files"),
    (re.compile(r".*\.distcp"), "a distributed checkpoint of PyTorch, which torch.distributed.checkpoint reads"),
    (re.compile(r".*\.(pt|pth|ckpt|bin)"), "a folder of PyTorch checkpoints, which torch.load reads"),
    (re.compile(r".*\.safetensors"), "a folder of safetensors files"),
    (re.compile(r".*\.(h5|hdf5|keras)"), "a folder of HDF5 files, which h5py reads"),
    (re.compile(r".*\.np[yz]"), "a folder of numpy files, which numpy.load reads"),
    (re.compile(r"events\.out\.tfevents\..*"), "a folder of TensorBoard's events"),
)


def file_looks_like(path: Location, head: bytes | None = None) -> str | None:
    """Return what a file that is not a checkpoint looks like; None for msgpack, and for bytes of no known kind.

    ``head`` are its first bytes, if they are known: of most checkpoints they are enough."""
    head = path.head() if head is None else head
    if head[:1] and head[0] in _TREE_STARTS and bytes_look_like(head, _LARGE) is None:
        return None
    return bytes_look_like(path.read(0, FIRST_BYTES), path.size())


def bytes_look_like(first: bytes, size: int) -> str | None:
    """Return what a file with these first bytes, and this size in bytes, looks like; see `file_looks_like`."""
    # First: the length at its beginning may look like a pickle or any other magic number.
    if first[8:9] == b"{" and 2 <= int.from_bytes(first[:8], "little") <= size - 8:
        return SAFETENSORS
    if is_one_scalar(first, size):
        return None
    for magic, what in _LOOKS:
        if first.startswith(magic):
            return what
    # msgpack's empty map is the single byte 0x80, the first byte of every pickle of protocol 2 or later.
    if len(first) > 2 and first[0] == 0x80 and first[1] in range(2, 6):
        return "a Python pickle (it is not opened, because unpickling runs code)"
    if b"brain.Event:" in first[:64]:
        return "an event file of TensorBoard"
    if _begins_like_stream(first):
        return STREAM
    if first[257:262] == b"ustar":
        return "a tar archive (unpack it first)"
    return _text_looks_like(first)


def is_one_scalar(first: bytes, size: int) -> bool:
    """Return whether a file is as long as the one msgpack scalar, or empty container, with which it begins."""
    if not first:
        return False
    width = _SIZED_SCALARS.get(first[0])
    if width is not None:
        return size == 1 + width + int.from_bytes(first[1 : 1 + width], "big")
    return size == _SCALAR_SIZES.get(first[0])


def _begins_like_stream(first: bytes) -> bool:
    """Return whether a file begins with a pair of a key path and bytes, as EasyLM writes for each leaf (documented)."""
    if len(first) < 2 or first[0] != 0x92:
        return False
    is_path = first[1] in range(0x91, 0xA0)
    at, names = (2, first[1] - 0x90) if is_path else (1, 1)
    for _ in range(names):
        if at + 1 >= len(first):
            return False
        if first[at] in range(0xA0, 0xC0):
            at += 1 + first[at] - 0xA0
        elif first[at] == 0xD9:
            at += 2 + first[at + 1]
        else:
            return False
    return first[at : at + 1] in (b"\xc4", b"\xc5", b"\xc6")


def is_lfs_pointer(path: Location) -> bool:
    """Return whether a file is a pointer of git-lfs, whose content was never fetched."""
    return path.isfile() and path.read(0, len(_LFS_START)) == _LFS_START


def may_be_msgpack_tree(path: Location) -> bool:
    """Return whether a file begins like Flax's checkpoints, and looks like nothing else."""
    head = path.head()
    return bool(head) and head[0] in _TREE_STARTS and file_looks_like(path, head) is None


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
    return names_look_like(path.listdir())


def names_look_like(found: Collection[str]) -> str:
    """Return what a directory with these names looks like, or some of them."""
    names = sorted(found)
    if _SHARDS in names:
        return f"a model of Hugging Face in several files, or shards (restore {_SHARDS}, which lists them)"
    if JAX_PYTREE in names:
        return "what jax.experimental.array_serialization.pytree_serialization saved, whose load() reads it"
    if "config.json" in names and any(map(_HUGGING_FACE.fullmatch, names)):
        return "a model folder of Hugging Face"
    for pattern, what in _KINDS:
        if any(map(pattern.fullmatch, names)):
            return f"{what} ({_shown(names)})"
    return f"{_SOMETHING_ELSE} ({_shown(names)})"


def is_unknown_look(look: str) -> bool:
    """Return whether a look of `names_look_like` tells no more than names."""
    return look.startswith(_SOMETHING_ELSE)


def _shown(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"it holds {', '.join(names[:_MAX_SHOWN])}{more}"


def msgpack_file_in(path: Location) -> Location | None:
    """Return the path of the only msgpack file in a directory, or of Hugging Face's; None if it is ambiguous."""
    names = [name for name in path.listdir() if name.endswith(MSGPACK_SUFFIXES)]
    name = _FLAX_FILE if _FLAX_FILE in names else names[0] if len(names) == 1 else None
    return None if name is None else (path / name)


def foreign_remedy(path: Location) -> str:
    """Return the remedy for a directory that is not a checkpoint."""
    file = msgpack_file_in(path)
    if file is not None:
        return f"Restore the file in it: {file}."
    names = sorted(name for name in path.listdir() if name.endswith(MSGPACK_SUFFIXES))
    if names:
        return f"Restore one of the files in it, such as {(path / names[-1])}."
    return "Restore another step or path, or read it with the program that wrote it."
