"""Save from several processes: each writes its own database, and process 0 merges them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.array_boxes import Shape
from flax_ckpt_compat._core.backend import ProcessSave
from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError, translated
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.local.syncing import sync_directory
from flax_ckpt_compat._core.local.temporaries import create_directory
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.memory import pause_gc
from flax_ckpt_compat._core.object_store.commit import Upload
from flax_ckpt_compat._core.orbax_layout import MANIFEST
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Path, show_path

from . import stored_names, writer
from .encode_leaves import EncodedLeaf
from .files import AT_ONCE, write_files
from .ocdbt import Entries, read_entries
from .ocdbt_writer import form_of, write_index
from .open_index import Index
from .recorded_checksums import Record, file_of_database
from .save_plan import SavePlan


def begin(save: ProcessSave) -> None:
    """Create the directories, in process 0; see `Backend.begin_multiprocess`."""
    writer.begin(save.path, save.prepared)


def write(save: ProcessSave) -> None:
    """Write this process's shards, in process 0 all that is not spread; for an upload each to its own directory."""
    path, plan, options, process, upload = save.path, save.prepared, save.options, save.process, save.upload
    is_primary = process.index == 0
    if upload is not None and not is_primary:
        begin(save)
    if not presence.isdir(path):
        raise StorageError(
            f"process {process.index} does not find {path}, which process 0 made: all processes must save to one "
            f"directory that they share, on a network file system or an object store",
            path=path,
        )
    own = os.path.join(path, _name_of(process.index, upload))
    create_directory(own)
    arrays = _arrays_of(plan, options.writers, process.index)
    record = Record() if options.checksums else None
    writer.write_arrays(own, arrays, options, record, is_primary)
    # All processes would upload the same list.
    files = writer.write_metadata(path, plan, options, process.index, lists_arrays=is_primary or upload is None)
    if record is not None:
        # Those of process 0 go into the file of the whole checkpoint, which readers open first.
        (plan.record if is_primary else record).add_files(path, files)
        write_files(file_of_database(record, own, path))
    sync_directory(own)
    if upload is not None:
        sent = [os.path.relpath(os.path.join(own, name), path) for name in Location(own).files_below()]
        upload.send(path, sent, options.meter)


def finish(save: ProcessSave) -> None:
    """Merge the parts of all processes and commit the checkpoint, in process 0; see `Backend.finish_multiprocess`."""
    path, plan, options, upload = save.path, save.prepared, save.options, save.upload
    location = (Location(path) if upload is None else location_of(upload.url)).listed()
    if plan.arrays:
        names = [_name_of(index, upload) for index in range(save.process.count)]
        with pause_gc(enabled=upload is None):  # the index of many hosts has millions of entries
            _check_complete(save, location, names, merge(path, names, location))
    writer.commit(path, plan, plan.record if options.checksums else None)


def _arrays_of(plan: SavePlan, writers: Mapping[Path, int], here: int) -> list[tuple[str, EncodedLeaf]]:
    """Return the arrays of which the process ``here`` writes values or, process 0, the metadata."""
    found, arrays = [], [(entry.name, stored, writers.get(entry.path, 0)) for entry, stored in plan.arrays]
    if here != 0:  # at once, for `written_by_one`; all others are started as they are written
        writer.start_transfers([stored for _, stored, chosen in arrays if chosen == here])
    for name, stored, chosen in arrays:
        if chosen != 0 and here in (0, chosen):
            found.append((name, stored.written_by_one(is_here=here == chosen)))
        elif here == 0 or stored.spans_processes:
            found.append((name, stored))
    return found


def _check_complete(save: ProcessSave, location: Location, names: Sequence[str], entries: Entries) -> None:
    """Raise StorageError unless all chunks of the planned arrays are stored, in files that are long enough."""
    encoding = writer.encoding_of(save.options)

    @functools.cache
    def keys_of(shape: Shape, write_shape: Shape, dtype: Any) -> list[str]:
        return list(form_of(shape, write_shape, dtype, encoding).info.keys())

    for entry, stored in save.prepared.arrays:
        prefix = stored_names.key_prefix(entry.name)
        for key in (encoding.metadata_file, *keys_of(stored.shape, stored.write_shape, stored.dtype)):
            if (prefix + key).encode() not in entries:
                what = f"the value {prefix + key!r} of the leaf {show_path(entry.path)!r} is missing"
                # A process that holds no first replica has written none.
                if lost := one_line(name for name in names if not (location / name / MANIFEST).isfile()):
                    what += f", and no index is there of {lost}, which not all processes need to have written"
                raise _incomplete(location, what)
    for file, end in Index(location, entries).ends().items():
        at = location / file
        if not at.isfile() or at.size() < end:
            raise _incomplete(location, f"the file {file} is missing or too short")


def _incomplete(location: Location, what: str) -> StorageError:
    return StorageError(
        f"{location}: what the processes saved is not complete: {what}. All processes must save to one directory that "
        f"they share, and nothing else may change it. Nothing was saved",
        path=location.path,
    )


def _name_of(process: int, upload: Upload | None) -> str:
    """Return the name of a process's database."""
    return f"{layout.PROCESS_PREFIX}{process}{'' if upload is None else upload.tag}"


def merge(path: str, names: Sequence[str], location: Location) -> Entries:
    """Write a database in ``path`` with all entries of those in the folders ``names`` of ``location``; return them."""
    # A process that holds no first replica has written no database.
    written = [name for name in names if (location / name / MANIFEST).isfile()]
    try:
        at_once = AT_ONCE if location.is_remote else 1
        parts = in_parallel(lambda name: read_entries(location, f"{name}/"), written, at_once)
    except CorruptCheckpointError as error:
        raise _incomplete(location, str(error)) from error
    entries = [entry for part in parts for entry in part.items()]
    if entries:
        with translated(path, "written"):
            write_index(path, entries)
    return dict(entries)
