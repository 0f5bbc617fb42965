"""Tell files of Flax from all others by first bytes, and name what some others are; folders by names.

A file is Flax's if it begins with a map or list whose first entries decode, is one value, or is zeros, which a lost
power leaves. Whatever else has a checkpoint's name is something else, and is never removed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgpack  # type: ignore[import-untyped]

from flax_ckpt_compat._core import errors
from flax_ckpt_compat._core.location import Location

FIRST_BYTES = 1024
UNUSABLE = (errors.CorruptCheckpointError, errors.IncompleteCheckpointError, errors.UnrecognizedFormatError)
LFS_POINTER = "a git-lfs pointer (the file itself was never fetched: run `git lfs pull`)"
_LFS_START = b"version https://git-lfs"
ZIP = (
    "a zip archive (a PyTorch checkpoint; a zipped directory: unpack that first; or a .npz file, which restores read "
    "if its name ends in .npz)"
)
_LOOKS: Sequence[tuple[bytes, str]] = (
    (_LFS_START, LFS_POINTER),
    (b"\x93NUMPY", "a .npy file, or several in a row (numpy.load reads it, or equinox.tree_deserialise_leaves)"),
    (b"\x1f\x8b", "a gzip file (unpack it first)"),
    (b"PK\x03\x04", ZIP),
    (b"\x28\xb5\x2f\xfd", "a zstd file (unpack it first)"),
    (b"\x89HDF", "an HDF5 file (h5py reads it)"),
    (b"SQLite format 3", "an SQLite database"),
)
# Tags of msgpack: maps, lists, and the extension types of Flax (arrays, complex numbers, numpy scalars).
_MAPS, _LISTS = (*range(0x80, 0x90), 0xDE, 0xDF), (*range(0x90, 0xA0), 0xDC, 0xDD)
_EXTENSIONS = {0xC7: 2, 0xC8: 3, 0xC9: 5, **dict.fromkeys(range(0xD4, 0xD9), 1)}  # → where the type is
_FLAX_TYPES = (1, 2, 3)
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # tags of bytes and text → bytes of their length
_BYTES = (0xC4, 0xC5, 0xC6)
_UNDECODABLE = (ValueError, TypeError, msgpack.exceptions.UnpackException)  # TypeError: a list as a key
_TREES = (*_MAPS, *_LISTS, *_EXTENSIONS)
_ENTRIES = 4  # of a map, to look at
_CONTROL = re.compile(rb"[^\t\n\f\r\x20-\x7e\x80-\xff]")  # characters that no text has
_MAX_SHOWN = 3
_MAX_FILES = 200  # to look at; a pointer of git-lfs is rarely alone
SAFETENSORS = "a safetensors file (restores read it if its name ends in .safetensors)"
STREAM = "a stream of several msgpack objects, as EasyLM writes (restores read it unless its name is a checkpoint's)"
_TENSORFLOW = "a checkpoint of TensorFlow, which tf.train.load_checkpoint reads"
_SOMETHING_ELSE, _UNKNOWN_FILE = "a folder of something else", "a file of another program"
# To restore from a folder, the best first.
_READ_SUFFIXES = (".safetensors.index.json", ".msgpack", ".mpk", ".mpack", ".flax", ".npz", ".safetensors")
_HUGGING_FACE = r".*flax_model.*\.msgpack|pytorch_model.*\.bin|(adapter_)?model.*\.safetensors|trainer_state\.json"
_KINDS = (
    (re.compile(r".*\.index\.json"), "a model of Hugging Face in several files, or shards"),
    (re.compile(_HUGGING_FACE), "a model folder of Hugging Face"),
    (re.compile(r"pytreedef\.json"), "what jax's pytree_serialization saved, and loads"),
    (re.compile(r"\.zarray|zarr\.json"), "an array of zarr, which TensorStore reads"),
    (re.compile(r"saved_model\.pb(txt)?"), "a SavedModel of TensorFlow, which tf.saved_model.load reads"),
    (re.compile(r".*\.data-\d{5}-of-\d{5}"), _TENSORFLOW),
    (re.compile(r"ckpt-\d+\.flax"), "a folder of checkpoints of CLU"),
    (re.compile(r".*\.(msgpack|mpk|mpack|flax)"), "a folder of msgpack files"),
    (re.compile(r".*\.(pt|pth|ckpt|bin|distcp)"), "a folder of PyTorch checkpoints, which it reads"),
    (re.compile(r".*\.(safetensors|h5|hdf5|keras|np[yz])"), "a folder of files of safetensors, HDF5 or numpy"),
)


def file_looks_like(path: Location, head: bytes | None = None) -> str | None:
    """Return what a file that is not a checkpoint looks like; None for Flax's. ``head`` are first bytes, if known."""
    head = path.head() if head is None else head
    # A header's length, with which safetensors files begin, may look like a container; their size tells.
    if head[8:9] != b"{" and _begins_like_container(head) and not _begins_like_other(head):
        return None
    first, size = path.read(0, FIRST_BYTES), path.size()
    if first[8:9] == b"{" and 2 <= int.from_bytes(first[:8], "little") <= size - 8:
        return SAFETENSORS
    if (other := _begins_like_other(first)) is not None:
        return other
    if _is_one_value(first, size) or not first.strip(b"\0"):
        return None
    known = next((what for magic, what in _LOOKS if first.startswith(magic)), None)
    if known is None and _begins_like_container(first):
        return None
    if path.name.endswith(".index") and first[:1] == b"\0":
        return _TENSORFLOW
    return known or _text_looks_like(first) or f"{_UNKNOWN_FILE} (it begins with the bytes {first[:6].hex(' ')})"


def _begins_like_other(first: bytes) -> str | None:
    """Return what a file looks like whose first byte may be that of a map or list of msgpack, and which is neither."""
    # msgpack's empty map is the single byte 0x80, the first byte of every pickle of protocol 2 or later.
    if len(first) > 2 and first[0] == 0x80 and first[1] in range(2, 6):
        return "a Python pickle (it is not opened, because unpickling runs code)"
    return STREAM if _begins_like_stream(first) else None


def _is_one_value(first: bytes, size: int) -> bool:
    """Return whether a file is exactly one value of msgpack: a small one, or long text or bytes."""
    if size > len(first):
        width = _SIZED.get(first[0]) if first else None
        return width is not None and size == 1 + width + int.from_bytes(first[1 : 1 + width], "big")
    unpacker = _unpacker(first)
    with suppress(*_UNDECODABLE):
        unpacker.skip()
        return bool(unpacker.tell() == size)
    return False


def _begins_like_container(first: bytes) -> bool:
    """Return whether first bytes are those of a map with names, a list, or an array of Flax."""
    tag = first[0] if first else -1
    if tag in _EXTENSIONS:
        at = _EXTENSIONS[tag]
        return len(first) <= at or first[at] in _FLAX_TYPES
    unpacker = _unpacker(first)
    try:
        if tag in _MAPS:
            count = min(unpacker.read_map_header(), _ENTRIES)
            return count > 0 and all(_is_entry(unpacker, first) for _ in range(count))
        for _ in range(unpacker.read_array_header() if tag in _LISTS else 0):
            unpacker.skip()
    except msgpack.exceptions.OutOfData:  # all that is here decodes
        return True
    except _UNDECODABLE:
        pass
    return False  # also where something goes on behind the list


def _is_entry(unpacker: msgpack.Unpacker, first: bytes) -> bool:
    """Return whether a name and a value come next; a number is a name before a map, a list or an array only."""
    key, value = unpacker.unpack(), unpacker.tell()
    is_name = isinstance(key, str | bytes) or (value < len(first) and first[value] in _TREES)
    unpacker.skip()
    return is_name


def _begins_like_stream(first: bytes) -> bool:
    """Return whether a file begins with a pair of a key path and bytes, as EasyLM writes for each leaf (documented)."""
    if first[:1] != b"\x92":
        return False
    unpacker = _unpacker(first)
    with suppress(*_UNDECODABLE):
        unpacker.read_array_header()
        path, at = unpacker.unpack(), unpacker.tell()
        names = path if isinstance(path, list) and path else [path]
        return all(isinstance(name, str) for name in names) and at < len(first) and first[at] in _BYTES
    return False


def _unpacker(data: bytes) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=False)
    unpacker.feed(data)
    return unpacker


def is_lfs_pointer(path: Location) -> bool:
    """Return whether a file is a pointer of git-lfs, whose content was never fetched."""
    return path.isfile() and path.read(0, len(_LFS_START)) == _LFS_START


@contextmanager
def naming_lfs_pointers(path: Location) -> Iterator[None]:
    """Name a pointer of git-lfs in an error of damage, if the checkpoint's directory has one."""
    try:
        yield
    except UNUSABLE as error:
        with suppress(OSError, errors.CheckpointError):  # in a store one listing tells
            listed = path.unlisted().listed()
            files = [listed / name for name in sorted(listed.files_below())[:_MAX_FILES]] if listed.isdir() else []
            pointer = next((file for file in files if file.size() <= FIRST_BYTES and is_lfs_pointer(file)), None)
            if pointer is not None and LFS_POINTER not in str(error):
                errors.add_sentence(error, f"{pointer} is {LFS_POINTER}.")
        raise


def may_be_msgpack_tree(path: Location) -> bool:
    """Return whether a file begins like a map, a list or an array of Flax, and looks like nothing else."""
    head = path.head()
    return bool(head) and head[0] in _TREES and file_looks_like(path, head) is None


def _text_looks_like(first: bytes) -> str | None:
    text = first.lstrip()[:64].lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML or XML page (a failed download?)"
    if text.startswith((b'{"', b"[", b"{\n", b"{\r")):
        return "JSON text"
    with suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(first)  # not final: the last character may be truncated
        return None if _CONTROL.search(first) else "a text file"
    return None


def names_look_like(found: Collection[str]) -> str:
    """Return what a directory with these names looks like, or some of them."""
    names = sorted(found)
    what = next((what for pattern, what in _KINDS if any(map(pattern.fullmatch, names))), _SOMETHING_ELSE)
    more = f", and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"{what} (it holds {', '.join(names[:_MAX_SHOWN])}{more})"


def is_unknown_look(look: str) -> bool:
    """Return whether a look tells no more than names, or bytes."""
    return look.startswith((_SOMETHING_ELSE, _UNKNOWN_FILE))


def foreign_remedy(path: Location) -> str:
    """Return the remedy for something else than a checkpoint."""
    parts = "Restore each of its parts by its own path, and join the dicts."
    if not path.isdir():
        is_index = path.name.endswith(".msgpack.index.json")
        return parts if is_index else "Expected a msgpack file of Flax or an Orbax directory."
    names = sorted(path.listdir(), reverse=True)
    found = [name for suffix in _READ_SUFFIXES for name in names if name.endswith(suffix)]
    whole = [name for name in found if not re.search(r"-\d{5}-of-\d{5}\.", name)]
    if found and not is_lfs_pointer(path / (whole or found)[0]):
        return f"Restore a file in it, such as {path / whole[0]}." if whole else parts
    return "Restore another step or path, or read it with the program that wrote it."
