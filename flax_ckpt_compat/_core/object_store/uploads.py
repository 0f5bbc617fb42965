"""Upload local files as objects, zero-copy from the page cache, and conditionally where asked.

TensorStore copies the value of an object twice (measured), but writes an array from its own memory. So a large file is
memory-mapped as an array of bytes in one chunk, and the object is that stored chunk.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.local.directories import files_below
from flax_ckpt_compat._core.object_store import client, retrying
from flax_ckpt_compat._core.object_store.retrying import key_of, retry, split
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.thread_pools import in_parallel, results_of

if TYPE_CHECKING:  # listings of checkpoints do without it
    import numpy as np

# S3's limit for one request; an object from a single request appears whole or not at all.
MAX_OBJECT = 5 * 2**30
_MIN_MAPPED_BYTES = 2**20
PARTS_FROM_BYTES = 64 * 2**20  # a connection sends less in the time of some requests
_COMPARE_BYTES = 8 * 2**20
_TIMEOUT = 60.0  # s; TensorStore also retries by itself
# Key of the array's only chunk in the key-value store that maps it to the object.
_FOLDER, _CHUNK = "x/", "x/0"
# How often a write looks again for the version that it replaces.
_TRIALS = 5


class _ReplacedError(Exception):
    """The object does not have the version that a write is to replace."""


def versions(url: str, names: Collection[str]) -> dict[str, bytes]:
    """Return the version of each object below ``url``, for `upload`; a missing object has one too."""
    return results_of(lambda name: client.version(f"{url}/{name}"), names)


def download(url: str, directory: str, names: Collection[str]) -> None:
    """Write small objects below ``url`` as files of the same names in a new local directory."""
    for name in names:
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(client.read(f"{url}/{name}"))


def upload(
    directory: str, url: str, names: Collection[str], replaced: Mapping[str, bytes], meter: Meter = OFF
) -> list[str]:
    """Upload files of a local directory as objects below ``url``, in parallel.

    Of the objects in ``replaced``, which other writers may write too, only these versions are replaced; return the
    names of those that had another one."""
    conflicts: list[str] = []

    def put(name: str) -> None:
        path, to = os.path.join(directory, name), f"{url}/{name}"
        if name not in replaced:
            upload_file(path, to)
            meter.add(os.path.getsize(path), name)
        elif not write_if(to, _read(path), replaced[name]):
            conflicts.append(name)

    in_parallel(put, names)
    return conflicts


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def upload_file(path: str, url: str) -> None:
    """Upload a local file, which must not change meanwhile, under a name that no other save uses."""
    nbytes = os.path.getsize(path)
    if nbytes < _MIN_MAPPED_BYTES:
        client.write(url, _read(path))
        return
    content = _memory_map(path)
    retry(url, "written", lambda: _start_write(url, content), nbytes)
    _check_arrived(url, content)


def publish_file(path: str, url: str, meter: Meter = OFF, *, new: bool) -> bool:
    """Upload a local file in place of the object that is found, or, with ``new``, of none with content.

    Each request has the version that it replaces as its condition: one that the store executes late, or twice, brings
    nothing back. Return False if other writers replaced what was found, each time that it was looked for."""
    content = _memory_map(path)
    for _ in range(1 if new else _TRIALS):
        if _write_if(url, content, client.NO_OBJECT if new else client.version(url), meter):
            if content.nbytes >= _MIN_MAPPED_BYTES:
                _check_arrived(url, content)
            return True
    return False


def _check_arrived(url: str, content: np.ndarray[Any, Any]) -> None:
    """Raise StorageError if the store reports a CRC-32C of the object that is not ours."""
    stored = client.stored_crc32c(url)
    if stored is None:
        return
    found = 0
    for start in range(0, content.nbytes, _COMPARE_BYTES):
        found = checksums.crc32c(content[start : start + _COMPARE_BYTES].data, found)
    if found != stored:
        raise StorageError(
            f"{url}: what was uploaded has the CRC-32C {found:08x}, and the store tells {stored:08x}: it was changed "
            "on its way, or another process wrote it at the same time; save it again with overwrite=True",
            path=url,
        )


def check_sizes(path: str, url: str) -> None:
    """Raise StorageError if a local file, or a file of a directory, is too large for one object."""
    files, remedy = {path: url}, "save in Orbax's format, which is many objects"
    if presence.isdir(path):
        files = {os.path.join(path, name): f"{url}/{name}" for name in files_below(path)}
        why = "one shard of an array is too large and cannot be cut evenly"
        remedy = f"{why}: give the array a sharding of smaller ones"
    for file, to in files.items():
        if (nbytes := os.path.getsize(file)) > MAX_OBJECT:
            what = f"an object of {nbytes} bytes is more than the {MAX_OBJECT} that stores take at once"
            raise StorageError(f"{to}: {what}; {remedy}", path=to)


def write_if(url: str, data: bytes, version: bytes = client.NO_OBJECT) -> bool:
    """Write an object if it has this version, or, by default, if there is none with content.

    A store without conditional writes writes it in any case. Return whether the object now has this content."""
    import numpy as np

    return _write_if(url, np.frombuffer(data, np.uint8), version)


def _write_if(url: str, content: np.ndarray[Any, Any], version: bytes, meter: Meter = OFF) -> bool:
    only_new = version == client.NO_OBJECT
    for _ in range(_TRIALS):
        if _was_written(url, content, version, meter):
            return True
        if not only_new or _has_bytes(url):
            return _has_content(url, content)
        version = client.version(url)  # an empty object is replaced
    return False


def _was_written(url: str, content: np.ndarray[Any, Any], version: bytes, meter: Meter) -> bool:
    """Run a conditional write; False if its condition did not hold, maybe because of a try whose answer was lost."""
    try:
        if content.nbytes >= PARTS_FROM_BYTES:
            written = client.scheme_of(url).write_in_parts(url, content, version, meter)
            if written is not None:
                return written
        stamp = retry(url, "written", lambda: _start_write_if(url, content, version), content.nbytes)
        return stamp is None or bool(stamp.generation)
    except _ReplacedError:
        return False
    except StorageError as error:
        if isinstance(error.__cause__, NotImplementedError):
            if version == client.NO_OBJECT and _has_bytes(url):
                return False
            retry(url, "written", lambda: _start_write(url, content), content.nbytes)
        elif not _has_content(url, content):
            raise
        return True


def _has_bytes(url: str) -> bool:
    with suppress(FileNotFoundError):
        return bool(client.head(url))
    return False


def _has_content(url: str, content: np.ndarray[Any, Any]) -> bool:
    """Return whether an object has this content, compared piece by piece."""
    with suppress(FileNotFoundError):
        if client.size(url) != content.nbytes:
            return False
        for start in range(0, content.nbytes, _COMPARE_BYTES):
            stop = min(start + _COMPARE_BYTES, content.nbytes)
            if client.read_range(url, start, stop) != content[start:stop].tobytes():
                return False
        return True
    return False


def _memory_map(path: str) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)


def _start_write(url: str, content: np.ndarray[Any, Any]) -> Any:
    if not content.nbytes:
        return client.bucket_store(url).write(key_of(url), b"")
    array = _as_array(url, content.nbytes, retrying.context())
    return array.write(content, can_reference_source_data_indefinitely=True).commit


def _start_write_if(url: str, content: np.ndarray[Any, Any], version: bytes) -> Any:
    """Start a write that fails if the object has another version: one to memory, or by a transaction that read it."""
    if content.nbytes < _MIN_MAPPED_BYTES:
        return client.bucket_store(url).write(key_of(url), content.tobytes(), if_equal=version)
    import tensorstore as ts

    # One context for both: in another one, which a timeout elsewhere may bring, the write would have no condition.
    transaction, context = ts.Transaction(repeatable_read=True), retrying.context()
    there = client.bucket_store(url, context).with_transaction(transaction).read(key_of(url), byte_range=slice(0, 0))
    if there.result(timeout=_TIMEOUT).stamp.generation != version:
        raise _ReplacedError
    array = _as_array(url, content.nbytes, context, transaction)
    array.write(content, can_reference_source_data_indefinitely=True).copy.result()
    return transaction.commit_async()


def _as_array(url: str, nbytes: int, context: Any, transaction: Any = None) -> Any:
    """Open the object as an array of bytes in one chunk, without a request."""
    import tensorstore as ts

    _, bucket, key = split(url)
    base = {**client.scheme_of(url).bucket_spec(bucket), "path": key}
    layer = {"base": base, "exact": _CHUNK, "strip_prefix": len(_CHUNK)}
    metadata = {
        "zarr_format": 2,
        "shape": [nbytes],
        "chunks": [nbytes],
        "dtype": "|u1",
        "fill_value": None,
        "order": "C",
        "compressor": None,
        "filters": None,
    }
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "kvstack", "layers": [layer], "path": _FOLDER},
        "metadata": metadata,
        "assume_metadata": True,
        "open": True,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, context=context, transaction=transaction).result()
