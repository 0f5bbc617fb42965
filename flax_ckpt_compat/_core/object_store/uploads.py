"""Upload local files as objects, zero-copy from the page cache, and conditionally where asked.

TensorStore copies the value of an object twice (measured), but writes an array from its own memory. So a large file is
memory-mapped as an array of bytes in one chunk, and the object is that stored chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local.listing import files_below
from flax_ckpt_compat._core.object_store import client, retrying
from flax_ckpt_compat._core.object_store.retrying import key_of, retry, split
from flax_ckpt_compat._core.thread_pools import in_parallel

if TYPE_CHECKING:  # listings of checkpoints do without it
    import numpy as np

# S3's limit for one request; an object from a single request appears whole or not at all.
MAX_OBJECT = 5 * 2**30
_MIN_MAPPED_BYTES = 2**20
_COMPARE_BYTES = 8 * 2**20
_TIMEOUT = 60.0  # s; TensorStore also retries by itself
# Key of the array's only chunk in the key-value store that maps it to the object.
_FOLDER, _CHUNK = "x/", "x/0"


class _ObjectExistsError(Exception):
    """An object of that name exists."""


def versions(url: str, names: Collection[str]) -> dict[str, bytes]:
    """Return the version of each object below ``url``, for `upload`; a missing object has one too."""
    found: dict[str, bytes] = {}

    def request(name: str) -> None:
        found[name] = client.version(f"{url}/{name}")

    in_parallel(request, names)
    return found


def download(url: str, directory: str, names: Collection[str]) -> None:
    """Write small objects below ``url`` as files of the same names in a new local directory."""
    for name in names:
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(client.read(f"{url}/{name}"))


def upload(directory: str, url: str, names: Collection[str], replaced: Mapping[str, bytes]) -> list[str]:
    """Upload files of a local directory as objects below ``url``, in parallel.

    Of the objects in ``replaced``, which other writers may write too, only these versions are replaced; return the
    names of those that had another one."""
    conflicts: list[str] = []

    def put(name: str) -> None:
        path, to = os.path.join(directory, name), f"{url}/{name}"
        if name not in replaced:
            upload_file(path, to)
        elif not write_if(to, _read(path), replaced[name]):
            conflicts.append(name)

    in_parallel(put, names)
    return conflicts


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def upload_file(path: str, url: str, *, new: bool = False) -> bool:
    """Upload a local file, which must not change meanwhile; return whether it was written.

    With ``new`` it is written only if there is no object with content yet."""
    nbytes = os.path.getsize(path)
    if nbytes < _MIN_MAPPED_BYTES:
        if new:
            return write_if(url, _read(path))
        client.write(url, _read(path))
        return True
    content = _memory_map(path)
    if not new:
        retry(url, "written", lambda: _start_write(url, content), nbytes)
    elif not _write_conditionally(url, content, lambda: _start_new(url, content), new=True):
        return False
    _check_arrived(url, content)
    return True


def _check_arrived(url: str, content: np.ndarray[Any, Any]) -> None:
    """Raise StorageError if the store, where it tells the CRC-32C of an object, tells another one than ours."""
    stored = client.stored_crc32c(url) if checksums.crc32c is not None else None
    if stored is None:
        return
    found = 0
    for start in range(0, content.nbytes, _COMPARE_BYTES):
        found = checksums.crc32c(content[start : start + _COMPARE_BYTES], found)
    if found != stored:
        raise StorageError(
            f"{url}: what was uploaded has the CRC-32C {found:08x}, and the store tells {stored:08x}: it was changed "
            "on its way, or another process wrote it at the same time; save it again with overwrite=True",
            path=url,
        )


def check_sizes(path: str, url: str) -> None:
    """Raise StorageError if a local file, or a file of a directory, is too large for one object."""
    if os.path.isdir(path):
        remedy = (
            "one shard of an array is too large and cannot be cut evenly: give the array a sharding of smaller ones"
        )
        for name in files_below(path):
            _check_size(f"{url}/{name}", os.path.getsize(os.path.join(path, name)), remedy)
    else:
        _check_size(url, os.path.getsize(path), "save in Orbax's format, which is many objects")


def _check_size(url: str, nbytes: int, remedy: str) -> None:
    if nbytes > MAX_OBJECT:
        message = f"{url}: an object of {nbytes} bytes is more than the {MAX_OBJECT} that stores take at once; {remedy}"
        raise StorageError(message, path=url)


def write_if(url: str, data: bytes, version: bytes = client.NO_OBJECT) -> bool:
    """Write an object if it has this version, or, by default, if there is none with content.

    A store without conditional writes writes it in any case. Return whether the object now has this content."""
    key = key_of(url)

    def request() -> Any:
        return client.bucket_store(url).write(key, data, if_equal=version)

    import numpy as np

    return _write_conditionally(url, np.frombuffer(data, np.uint8), request, new=version == client.NO_OBJECT)


def _write_conditionally(url: str, content: np.ndarray[Any, Any], request: Callable[[], Any], *, new: bool) -> bool:
    """Run a conditional write; a retry may find what an earlier try wrote, whose response was lost."""
    unknown = False
    try:
        stamp = retry(url, "written", request, content.nbytes)
        if stamp is None or stamp.generation:
            return True
    except _ObjectExistsError:
        pass
    except StorageError as error:
        unknown = isinstance(error.__cause__, NotImplementedError)
        if not unknown and not _size_of(url):
            raise
    nbytes = _size_of(url)
    if (new and not nbytes) or (unknown and not new):
        retry(url, "written", lambda: _start_write(url, content), content.nbytes)
        return True
    return nbytes == content.nbytes and _has_content(url, content)


def _size_of(url: str) -> int | None:
    """Return the size of an object, or None; a missing object costs one request."""
    if client.version(url) == client.NO_OBJECT:
        return None
    try:
        return client.size(url)
    except FileNotFoundError:
        return None


def _has_content(url: str, content: np.ndarray[Any, Any]) -> bool:
    """Return whether an object has this content, compared piece by piece."""
    with suppress(FileNotFoundError):
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
    return _as_array(url, content.nbytes).write(content, can_reference_source_data_indefinitely=True).commit


def _start_new(url: str, content: np.ndarray[Any, Any]) -> Any:
    """Start a write that fails if an object appears: a transaction that has read a missing object commits only then."""
    import tensorstore as ts

    there = _size_of(url)
    if there:
        raise _ObjectExistsError
    if there == 0:
        return _start_write(url, content)
    transaction = ts.Transaction(repeatable_read=True)
    array = _as_array(url, content.nbytes, transaction)
    try:
        array[:1].read().result(timeout=_TIMEOUT)
    except ValueError as error:
        if "NOT_FOUND" not in str(error):
            raise
    else:
        raise _ObjectExistsError
    array.write(content, can_reference_source_data_indefinitely=True).copy.result()
    return transaction.commit_async()


def _as_array(url: str, nbytes: int, transaction: Any = None) -> Any:
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
    return ts.open(spec, context=retrying.context(), transaction=transaction).result()
