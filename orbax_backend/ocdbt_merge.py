"""Merge the databases of several processes into one, by references to their values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.location import LocalLocation, Location
from flax_ckpt_compat._core.orbax_layout import MANIFEST, PROCESS_PREFIX
from flax_ckpt_compat._core.storage_errors import TENSORSTORE_ERRORS, translated
from flax_ckpt_compat._core.thread_pools import in_parallel

from .data_file_writer import DataFiles
from .files import AT_ONCE, write_file
from .ocdbt import read_entries
from .ocdbt_encode import write_index
from .ocdbt_nodes import Entries


def merge(path: str, names: Sequence[str], location: Location, locate: Callable[[str], Location] | None = None) -> None:
    """Write and sync a database in the directory ``path`` with all entries of others, without reading their values.

    Those lie in folders ``names`` of ``location``, or where ``locate`` finds their files by the names."""
    parts = in_parallel(lambda name: _entries_of(location, name, locate), names, AT_ONCE if location.is_remote else 1)
    entries = [entry for part in parts for entry in part.items()]
    if not entries:
        return
    files = DataFiles(path, None)
    try:
        with translated(path, "written", TENSORSTORE_ERRORS):
            manifest = write_index(entries, files.append)
            files.finish()
    finally:
        files.abandon(wait=True)
    write_file(os.path.join(path, MANIFEST), manifest)


def _entries_of(location: Location, name: str, locate: Callable[[str], Location] | None) -> Entries:
    folder = (location / name).path
    try:
        with translated(folder, "merged with those of the other processes", TENSORSTORE_ERRORS):
            return read_entries(location, f"{name}/", locate)
    except CorruptCheckpointError as error:
        raise StorageError(
            f"{folder} could not be merged with those of the other processes: {error}. Nothing else may change "
            f"it during a save; save again",
            path=folder,
        ) from error


def file_locator(local: str, store: Location) -> Callable[[str], Location]:
    """Return a function that resolves file names of a local directory with the process databases of a store in it."""
    return lambda file: (store if file.startswith(PROCESS_PREFIX) else LocalLocation(local)) / file
