"""Write arrays, or one process's shards of them, to a new OCDBT database.

Values are written in the background, as they come (data_file_writer.py); the index of all of them follows at the end.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import re
from typing import Any, NamedTuple

from flax_ckpt_compat._core import array_boxes, memory
from flax_ckpt_compat._core.array_boxes import Box
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.jax_shards import Memo
from flax_ckpt_compat._core.orbax_layout import key_prefix
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.tree import Shard, is_jax_array

from .chunk_codecs import CHECKSUM_NBYTES, with_checksum
from .data_file_writer import DataFiles, Value, padded, write_index
from .encode_leaves import EncodedLeaf
from .ocdbt import Entry
from .ocdbt_encode import INLINE_BYTES
from .zarr import ArrayInfo, Encoding, dump_metadata, parse_array_metadata

# A copy of a smaller array is cheaper than an entry of its own in a system call.
_COPY_BELOW_BYTES = 16 << 10
# Paths that real Orbax could not open: TensorStore writes ``a\\b`` to ``a/b``.
_REFUSED = {r"\\": "has a backslash", r"\.__lock(/|$)": "ends in .__lock", "[\ud800-\udfff]": "is not UTF-8"}


class Database(DataFiles):
    """A new OCDBT database."""

    def __init__(
        self,
        path: str,
        encoding: Encoding,
        sums: dict[str, bytes] | None = None,
        meter: Meter = OFF,
        *,
        past_cache: bool = False,
    ) -> None:
        """Begin a database in the directory ``path``; ``sums`` gets the checksums of chunks that have none.

        ``past_cache``: see `WriteOptions`."""
        for pattern, why in _REFUSED.items():
            if re.search(pattern, path):
                what = f"a name in this path {why}, and TensorStore, which reads Orbax's format, takes no such path"
                raise StorageError(f"{path}: {what}; rename it, or save as msgpack", path=path, errno=errno.EILSEQ)
        super().__init__(path, sums, meter, past_cache=past_cache)
        self._inline: list[Entry] = []  # what lies in the index
        self._forms = Memo(functools.partial(_form, encoding))
        self._known_cells: dict[Any, list[_Cells]] = {}

    def put(self, name: str, stored: EncodedLeaf, is_primary: bool = True) -> None:
        """Add one array, or its shards in this process; its memory must not change before the database is finished."""
        form, prefix = self._forms[stored.shape, stored.write_shape, stored.dtype], key_prefix(name)
        encoding, info = form.encoding, form.info
        if is_primary:
            self._inline.append(((prefix + encoding.metadata_file).encode(), form.text))
        if not form.nbytes:
            return
        if form.is_small and info.chunks == stored.shape and not stored.spans_processes:
            self._put_bytes(prefix + form.first_key, stored.whole().tobytes(), encoding)
            return
        shards = stored.shards()
        may_change = memory.may_change(stored.source)
        for shard, cells in zip(shards, self._cells(stored, info, shards), strict=True):
            for key, box in cells:
                data = shard.data if box is None else shard.data[box]
                if form.is_small:
                    self._put_bytes(prefix + key, padded(data, info.chunks).tobytes(), encoding)
                else:
                    self.add(Value(prefix + key, data, encoding, info.chunks, may_change))

    def finish(self) -> None:
        """Write all values and the index, and sync them; the directory itself remains to be synced."""
        super().finish()
        if self._inline or self.values:
            write_index(self._path, self._inline + [(value.key.encode(), value.entry) for value in self.values])

    def _cells(self, stored: EncodedLeaf, info: ArrayInfo, shards: list[Shard]) -> list[_Cells]:
        """Return the chunks of each shard; those of jax arrays of one shape and sharding are the same."""
        if not is_jax_array(stored.source):
            return [_cells_of(shard, info) for shard in shards]
        known = stored.sharding, stored.shape, info.chunks, info.zarr3
        if known not in self._known_cells:
            self._known_cells[known] = [_cells_of(shard, info) for shard in shards]
        return self._known_cells[known]

    def _put_bytes(self, key: str, data: bytes, encoding: Encoding) -> None:
        """Add the bytes of a small chunk without compression."""
        if len(data) + encoding.checksums * CHECKSUM_NBYTES > INLINE_BYTES:
            self.add(Value(key, data, encoding))
        else:
            self._inline.append((key.encode(), with_checksum(data) if encoding.checksums else data))


class _Form(NamedTuple):
    """The storage of arrays of one shape and dtype."""

    encoding: Encoding
    text: bytes  # of the metadata
    info: ArrayInfo
    first_key: str
    nbytes: int  # of one shard
    is_small: bool  # whether chunks are copied, and put into the index if that takes them


def _form(encoding: Encoding, described: tuple[tuple[int, ...], tuple[int, ...], Any]) -> _Form:
    shape, write_shape, dtype = described
    # Not of the largest local shard: processes without any must decide as the others do.
    nbytes = math.prod(write_shape) * dtype.itemsize
    if encoding.codec is not None and nbytes <= INLINE_BYTES:
        encoding = Encoding(checksums=True)
    text, info = metadata_of(shape, write_shape, dtype, encoding)
    is_small = encoding.codec is None and info.chunk_nbytes < _COPY_BELOW_BYTES
    return _Form(encoding, text, info, info.first_key, nbytes, is_small)


_Cells = list[tuple[str, Box | None]]  # key of a chunk below the array's prefix, and its box in a shard, if not all


def _cells_of(shard: Shard, info: ArrayInfo) -> _Cells:
    """Return the chunks of a shard, which has all of each."""
    found: _Cells = []
    for cell, box in array_boxes.cells(shard.index, info.chunks):
        box = array_boxes.overlap(box, array_boxes.full_box(info.shape))
        if array_boxes.overlap(box, shard.index) != box:
            raise ValueError(f"the chunk {info.chunk_key(cell)} was expected to lie in one shard")
        found.append((info.chunk_key(cell), None if box == shard.index else array_boxes.relative_to(box, shard.index)))
    return found


@functools.lru_cache(maxsize=4096)
def metadata_of(
    shape: tuple[int, ...], write_shape: tuple[int, ...], dtype: Any, encoding: Encoding
) -> tuple[bytes, ArrayInfo]:
    """Return the text of an array's metadata, and its parsed form."""
    text = json.dumps(dump_metadata(shape, write_shape, dtype, encoding), separators=(",", ":")).encode()
    return text, parse_array_metadata(text, zarr3=encoding.checksums)
