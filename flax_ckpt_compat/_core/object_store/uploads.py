"""Local files → objects: sent from the page cache without a copy of their own, and where asked for never over another.

TensorStore takes the value of an object as bytes, and copies them twice (measured), but it writes the elements of an
array from where they lie. So a large file is mapped into memory as an array of bytes that is one chunk, and the
object is what that chunk is stored as.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import client, specs
from flax_ckpt_compat._core.object_store.store_errors import attempt
from flax_ckpt_compat._core.object_store.threads import in_parallel

# S3 takes no more in one request, and one request is what makes an object appear whole or not at all.
MAX_OBJECT = 5 * 2**30
_MAPPED_FROM = 2**20
_COMPARED_AT_ONCE = 8 * 2**20
_PATIENCE = 60.0  # s, beside which TensorStore tries again by itself
# Where the array's only chunk lies in the key-value store that stands for the object.
_FOLDER, _CHUNK = "x/", "x/0"


class _TakenError(Exception):
    """There is an object already."""


def names_in(directory: str) -> list[str]:
    """Paths of all files below a local directory, relative to it."""
    return [
        os.path.relpath(os.path.join(where, name), directory)
        for where, _, files in os.walk(directory)
        for name in files
    ]


def versions(url: str, names: Collection[str]) -> dict[str, bytes]:
    """What version of each object below ``url`` there is, for `upload`; that there is none counts as one."""
    found: dict[str, bytes] = {}

    def ask(name: str) -> None:
        found[name] = client.version(f"{url}/{name}")

    in_parallel(ask, names)
    return found


def download(url: str, directory: str, names: Collection[str]) -> None:
    """Write small objects below ``url`` as files of the same names in a new local directory."""
    for name in names:
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(client.read(f"{url}/{name}"))


def upload(directory: str, url: str, names: Collection[str], replaced: Mapping[str, bytes]) -> list[str]:
    """Writes files of a local directory as objects below ``url``, side by side.

    Args:
        directory: local path.
        url: of the folder.
        names: of the files, relative to the directory.
        replaced: of the objects that another writer might write too, the only versions to be replaced.

    Returns:
        The names of which another writer has replaced or written the object meanwhile.

    Raises:
        StorageError: the store refused.
    """
    taken: list[str] = []

    def put(name: str) -> None:
        path, to = os.path.join(directory, name), f"{url}/{name}"
        if name not in replaced:
            upload_file(path, to)
        elif not write_if(to, _read(path), replaced[name]):
            taken.append(name)

    in_parallel(put, names)
    return taken


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def upload_file(path: str, url: str, *, new: bool = False) -> bool:
    """Writes a local file as an object.

    Args:
        path: of the file, which must not change meanwhile.
        url: of the object.
        new: only where there is no object with content yet.

    Returns:
        Whether it was written; False is for ``new`` alone.

    Raises:
        StorageError: the store refused.
    """
    nbytes = os.path.getsize(path)
    if nbytes < _MAPPED_FROM:
        if new:
            return write_if(url, _read(path))
        client.write(url, _read(path))
        return True
    content = _mapped(path)
    if not new:
        attempt(url, "written", lambda: _start(url, content), nbytes)
        return True
    return _written(url, content, lambda: _start_new(url, content), new=True)


def check_sizes(path: str, url: str) -> None:
    """Refuses a local file or directory of which one file is more than any store takes in one object.

    Args:
        path: local.
        url: of the checkpoint it is to be.
    """
    if os.path.isdir(path):
        remedy = (
            "one shard of an array is too large and cannot be cut evenly: give the array a sharding of smaller ones"
        )
        for name in names_in(path):
            _check_size(f"{url}/{name}", os.path.getsize(os.path.join(path, name)), remedy)
    else:
        _check_size(url, os.path.getsize(path), "save in Orbax's format, which is many objects")


def _check_size(url: str, nbytes: int, remedy: str) -> None:
    if nbytes > MAX_OBJECT:
        message = f"{url}: an object of {nbytes} bytes is more than the {MAX_OBJECT} that stores take at once; {remedy}"
        raise StorageError(message, path=url)


def write_if(url: str, data: bytes, version: bytes = client.NO_OBJECT) -> bool:
    """Writes an object where there is none with content, or where just this version of it is.

    A store that does not know conditions writes it, as if they were met.

    Returns:
        Whether the object is now what was to be written.

    Raises:
        StorageError: the store refused.
    """
    key = specs.split(url)[2]

    def ask() -> Any:
        return specs.bucket_store(url).write(key, data, if_equal=version)

    return _written(url, np.frombuffer(data, np.uint8), ask, new=version == client.NO_OBJECT)


def _written(url: str, content: np.ndarray[Any, Any], ask: Callable[[], Any], *, new: bool) -> bool:
    """Carries out a conditional write; a repeated one may find what it wrote itself, of which the answer was lost."""
    unknown = False
    try:
        stamp = attempt(url, "written", ask, content.nbytes)
        if stamp is None or stamp.generation:
            return True
    except _TakenError:
        pass
    except StorageError as error:
        unknown = isinstance(error.__cause__, NotImplementedError)
        if not unknown and not _size_of(url):
            raise
    nbytes = _size_of(url)
    if (new and not nbytes) or (unknown and not new):
        attempt(url, "written", lambda: _start(url, content), content.nbytes)
        return True
    return nbytes == content.nbytes and _same(url, content)


def _size_of(url: str) -> int | None:
    """Bytes of an object, or None; of what is not there, that costs one request."""
    if client.version(url) == client.NO_OBJECT:
        return None
    try:
        return client.size(url)
    except FileNotFoundError:
        return None


def _same(url: str, content: np.ndarray[Any, Any]) -> bool:
    """Whether an object is these bytes, of which few are in memory at a time."""
    with suppress(FileNotFoundError):
        for start in range(0, content.nbytes, _COMPARED_AT_ONCE):
            stop = min(start + _COMPARED_AT_ONCE, content.nbytes)
            if client.read_range(url, start, stop) != content[start:stop].tobytes():
                return False
        return True
    return False


def _mapped(path: str) -> np.ndarray[Any, Any]:
    return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)


def _start(url: str, content: np.ndarray[Any, Any]) -> Any:
    if not content.nbytes:
        return specs.bucket_store(url).write(specs.split(url)[2], b"")
    return _as_array(url, content.nbytes).write(content, can_reference_source_data_indefinitely=True).commit


def _start_new(url: str, content: np.ndarray[Any, Any]) -> Any:
    """A transaction that has seen that there is nothing writes only if that is still so."""
    import tensorstore as ts

    there = _size_of(url)
    if there:
        raise _TakenError
    if there == 0:
        return _start(url, content)
    transaction = ts.Transaction(repeatable_read=True)
    array = _as_array(url, content.nbytes, transaction)
    try:
        array[:1].read().result(timeout=_PATIENCE)
    except ValueError as error:
        if "NOT_FOUND" not in str(error):
            raise
    else:
        raise _TakenError
    array.write(content, can_reference_source_data_indefinitely=True).copy.result()
    return transaction.commit_async()


def _as_array(url: str, nbytes: int, transaction: Any = None) -> Any:
    """The object as an array of bytes in one chunk; nothing is asked of the store."""
    import tensorstore as ts

    scheme, bucket, key = specs.split(url)
    base = {**specs.bucket_spec(scheme, bucket), "path": key}
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
    return ts.open(spec, context=specs.context(), transaction=transaction).result()
