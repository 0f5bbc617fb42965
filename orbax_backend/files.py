"""Access a checkpoint's files, in a local directory or an object store; raise `StorageError` for OSErrors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import tensorstore as ts

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.errors import CheckpointError, CorruptCheckpointError
from flax_ckpt_compat._core.local import atomic, presence, syncing
from flax_ckpt_compat._core.local.safe_open import ContainedFiles, stays_inside
from flax_ckpt_compat._core.object_store import request_timeouts
from flax_ckpt_compat._core.object_store.retrying import replaced_context_after_failure
from flax_ckpt_compat._core.storage_errors import store_errors, translated
from flax_ckpt_compat._core.thread_pools import in_parallel

# TensorStore retries by itself for this long, beside the time for the bytes.
_TIMEOUT = 60.0  # seconds
_SLOWEST_RATE = 2**20  # bytes/s
AT_ONCE = 16  # requests to a store
# Raises if a file of the checkpoint, by name and content, is damaged.
Check = Callable[[str, bytes], object]


class ByteRange(NamedTuple):
    """A range of bytes in a file of the checkpoint."""

    file: str  # relative to the checkpoint's directory
    offset: int  # in bytes, like the next
    length: int


def refuse_escape(relative: str, path: str) -> None:
    """Raise if a relative path leads outside the checkpoint's directory."""
    if not stays_inside(relative):
        raise CorruptCheckpointError(
            f"{path}: it refers to {relative!r:.300}, which lies outside its directory; it was tampered with: "
            "do not use it",
            path=path,
        )


def read_existing(file: str, start: int, stop: int | None, missing: CheckpointError) -> bytes:
    """Read a range of a file; raise ``missing`` if there is none, and StorageError if it cannot be read."""
    with translated(file, "read"):
        try:
            return paths.read(file, start, stop)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise missing from error


def list_names(folder: str) -> list[str]:
    """Return the names in a directory in order, none if there is no directory; raise StorageError if it is refused."""
    with translated(folder, "listed"):
        return sorted(paths.listdir(folder)) if paths.isdir(folder) else []


class CheckpointFiles:
    """The files of a checkpoint's directory, which its index and its links may not leave."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._local = None if paths.is_url(path) else ContainedFiles(path)

    def check(self, relative: str) -> int | None:
        """Return the size of a local file, None for all else; raise if its path leads out, or it is not regular."""
        refuse_escape(relative, self._path)
        return None if self._local is None else self._local.check(relative)

    def check_folder(self, folder: str) -> None:
        """Check all files directly in a local directory."""
        if self._local is not None and presence.isdir(os.path.join(self._path, folder)):
            self._local.check_folder(folder)


def make_directory(path: str) -> None:
    """Create a directory in an existing one."""
    with translated(path, "created"):
        os.mkdir(path)


def sync_directory(path: str) -> None:
    """Sync the entries of a directory."""
    with translated(path, "synced"):
        atomic.sync_directory(path)


def write_file(path: str, data: bytes) -> None:
    """Write and sync a new file."""
    with translated(path, "written"):
        syncing.write_file(path, data)


def write_files(contents: Mapping[str, bytes]) -> None:
    """Write and sync new files at once; the file system may sync them together."""
    in_parallel(lambda path: write_file(path, contents[path]), contents)


def read_json(path: str, name: str, check: Check | None = None) -> dict[str, Any] | None:
    """Return the JSON object in a file of the directory ``path``, None without a file; raise if it does not decode.

    ``check`` checks the file's content first.
    """
    file = os.path.join(path, name)
    if not paths.isfile(file):
        return None
    CheckpointFiles(path).check(name)
    with translated(file, "read"):
        text = paths.read(file)
    if check is not None:
        check(name, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt(file, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise corrupt(file, f"it holds a {type(value).__name__} where an object was expected")
    return value


def read_ahead(path: str, names: Collection[str]) -> None:
    """Prefetch files of a store for `read_json`; do nothing on a local disk."""
    storage = paths.storage_of(path)
    if storage.is_remote:
        with translated(path, "read"):
            storage.prefetch_contents([file for name in names if storage.isfile(file := os.path.join(path, name))])


def corrupt(file: str, what: str, remedy: str = "restore the file from a backup") -> CorruptCheckpointError:
    """Return the error for a file that is damaged or missing."""
    return CorruptCheckpointError(f"{file}: {what}; {remedy}", path=file)


def sizes_of(files: Collection[str]) -> dict[str, int | OSError]:
    """Return file → its size, or the error; query stores concurrently."""
    sizes = in_parallel(size_of, files, AT_ONCE if any(map(paths.is_url, files)) else 1)
    return dict(zip(files, sizes, strict=True))


def size_of(file: str) -> int | OSError:
    """Return the size of a file, or the error."""
    try:
        return paths.getsize(file)
    except OSError as error:
        return error


def tensorstore_context(path: str, cache_bytes: int) -> Any:
    """Return a TensorStore context with its own cache: nodes are cached by path, and paths are reused."""
    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}}, parent=paths.storage_of(path).context())


def wait(path: str, future: Any, nbytes: int = 0) -> Any:
    """Return the result of a TensorStore future about ``path``; a store must answer in time, with our errors."""
    if not paths.is_url(path):
        return future.result()
    with store_errors(path), replaced_context_after_failure():
        return request_timeouts.wait(future, nbytes, _TIMEOUT, _SLOWEST_RATE)
