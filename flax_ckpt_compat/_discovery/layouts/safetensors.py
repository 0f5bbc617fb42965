"""Read safetensors files, alone or in Hugging Face's shards: the length of a JSON header, the header, the tensors.

Names joined with dots become nested dicts, as `convert` and most programs write them. What `convert` keeps in the
header's free text (``__metadata__``) is read back: numbers, text, None, empty containers, and names with dots of their
own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from flax_ckpt_compat._core import errors, memory
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, LeafHandle, LeafKind
from flax_ckpt_compat._core.byte_reads import Read, Source, neighbours, read_runs
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.local.presence import stays_inside
from flax_ckpt_compat._core.location import Location, of_text
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, from_leaves
from flax_ckpt_compat._discovery.layouts.layout import WholeReader, check_depth, damaged, nbytes_of

# Those of safetensors 0.8, by numpy's names.
DTYPE_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
METADATA, OURS, PATHS = "__metadata__", "flax_ckpt_compat", "flax_ckpt_compat.paths"
_LENGTH = 8  # bytes of the header's length
_MAX_HEADER = 100_000_000  # bytes, of the format's own reader
_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_DECODE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


class SafetensorsReader(WholeReader):
    """Reader of a file, or of the index of shards; the locator of an array is its file and the offset of its bytes."""

    def __init__(self, location: Location):
        """Read the headers; raise CorruptCheckpointError if one contradicts its file."""
        self.location = location.unlisted()
        leaves: dict[Path, Any] = {}
        files = _files_of(self.location) if location.name.endswith(_INDEX) else [self.location]
        self._sources: list[Source] = []
        for file, source, header in in_parallel(self._open, files):
            for path, leaf in self._leaves(file, source, header):
                if path in leaves:
                    raise damaged(file, f"{'.'.join(path)} is in another shard, too")
                leaves[path] = leaf
        try:
            self.tree: Node = from_leaves(leaves)
        except errors.NameCollisionError:  # "a" and "a.b": the names are no key paths
            flat: dict[Path, Any] = {(".".join(path),): leaf for path, leaf in leaves.items()}
            self.tree = from_leaves(flat)
            if len(flat) < len(leaves):
                raise damaged(self.location, "two of its key paths are one name") from None

    def _open(self, file: Location) -> tuple[Location, Source, bytes]:
        """Return a file, open, and the text of its header."""
        source = file.open_file()
        self._sources.append(source)
        length = int.from_bytes((head := source.read(0, _LENGTH)), "little")
        if len(head) < _LENGTH or length > min(_MAX_HEADER, source.size - _LENGTH):
            raise damaged(file, f"a header of {length} bytes, in a file of {source.size}")
        with translated(file.path, "read"):
            return file, source, source.read(_LENGTH, _LENGTH + length)

    def _leaves(self, file: Location, source: Source, text: bytes) -> Iterator[tuple[Path, Any]]:
        try:
            header = json.loads(text)
            kept = header.pop(METADATA, None) or {}
            paths = {name: _key_path(file, names) for name, names in json.loads(kept.get(PATHS, "{}")).items()}
            for names, value in json.loads(kept.get(OURS, "[]")):
                path = _key_path(file, names)
                yield path, self._value(path, value)
            for name in header.keys() - paths:
                check_depth(file, name.count(".") + 1)
            data = end = _LENGTH + len(text)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                leaf = self._array(file, source, paths.get(name, tuple(name.split("."))), name, entry, data, end)
                end += leaf.nbytes
                yield leaf.path, leaf
            if end != source.size:
                raise damaged(file, f"{source.size - end} bytes behind the last tensor")
        except _DECODE_ERRORS as error:
            if isinstance(error, errors.CheckpointError):
                raise
            raise damaged(file, f"its header does not decode ({error!r:.200})") from error

    def _value(self, path: Path, value: Any) -> Any:
        if isinstance(value, dict):
            return Branch({}, Container(value["empty"]))
        return None if value is None else LeafHandle(path, KIND_OF_TYPE[type(value)], (), None, 0, None, self, value)

    def _array(
        self, file: Location, source: Source, path: Path, name: str, entry: Any, data: int, begin: int
    ) -> LeafHandle:
        """Return a tensor, whose bytes begin where those before it end."""
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list) or any(type(one) is not int for one in (*shape, start, stop)):
            raise ValueError(f"the shape {shape!r:.100} of {name}, or offsets, that are no integers")
        known = _DTYPES.get(entry["dtype"])
        dtype = dtype_from_name(known) if known else None
        nbytes = stop - start if dtype is None else nbytes_of(shape, dtype)
        if stop > source.size - data or stop - start != nbytes or nbytes < 0 or data + start != begin:
            found = f"{start} to {stop} of {source.size - data}, and needs {nbytes} from {begin - data}"
            raise damaged(file, f"{name} has bytes {found}", name)
        if dtype is not None:
            return LeafHandle(path, LeafKind.ARRAY, tuple(shape), dtype, nbytes, name, self, (source, begin))
        what = f"{file}: {name} is of the dtype {entry['dtype']!r:.40}, which numpy does not have; cast it elsewhere"
        error = errors.UnsupportedLeafError(what, path=file.path, leaf=name)
        return LeafHandle(path, LeafKind.UNSUPPORTED, tuple(shape), None, nbytes, name, self, error)

    def read_whole(self, leaves: Sequence[LeafHandle]) -> list[Any]:
        """See `WholeReader.read_whole`."""
        found, reads = list[Any](), list[Read]()
        for leaf in leaves:
            found.append(leaf.locator)
            if leaf.dtype is not None:
                source, offset = leaf.locator
                if source.is_closed:
                    what = f"{source.path}: the checkpoint was closed; open it again"
                    raise errors.StorageError(what, path=source.path)
                found[-1] = array = memory.empty(leaf.shape, leaf.dtype)
                if array.nbytes:
                    reads.append(Read(source, offset, array.nbytes, leaf.path, memory.as_bytes(array), leaf))
        read_runs(neighbours(reads), lambda _: None, _ended, self.meter)
        return found

    def close(self) -> None:
        """Close the files."""
        for source in self._sources:
            source.close()


def _files_of(index: Location) -> list[Location]:
    """Return the files that an index of Hugging Face names; raise if one is missing."""
    try:
        names = sorted(set(json.loads(index.read(0, _MAX_HEADER))["weight_map"].values()))
        bad = [name for name in names if not name.endswith(_SUFFIX) or not stays_inside(name)]
    except _DECODE_ERRORS as error:
        raise damaged(index, f"it is not an index of {_SUFFIX} files ({error!r:.200})") from error
    if bad:
        raise damaged(index, f"it names {bad[0]!r:.100}, which is not a {_SUFFIX} file beside it")
    files = [index.parent / name for name in names]
    if lost := [file.name for file in files if not file.isfile()]:
        what = f"{index}: {len(lost)} of {len(files)} shards are missing, such as {lost[0]}"
        raise errors.IncompleteCheckpointError(f"{what}; copy them beside it, or download them again", path=index.path)
    return files


def _key_path(file: Location, names: Any) -> Path:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the key path {names!r:.100}, which is no list of text")
    check_depth(file, len(names))
    return tuple(names)


def _ended(read: Read | None) -> Exception:
    assert read is not None  # no run goes on behind its reads
    leaf = read.content
    return damaged(of_text(read.source.path), f"it ends within the {leaf.nbytes} bytes of {leaf.name}", leaf.name)
