"""Save from several processes: each writes its own database, and process 0 merges them."""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Callable, Sequence

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import ProcessInfo, ProcessSave, WriteOptions
from flax_ckpt_compat._core.errors import CorruptCheckpointError, MissingPathError, MultiprocessSaveError, StorageError
from flax_ckpt_compat._core.jax_shards import Memo
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.local.presence import files_below
from flax_ckpt_compat._core.location import LocalLocation, Location, of_text
from flax_ckpt_compat._core.memory import pause_gc
from flax_ckpt_compat._core.object_store.multiprocess import Upload
from flax_ckpt_compat._core.orbax_layout import MANIFEST, PROCESS_PREFIX
from flax_ckpt_compat._core.storage_errors import TENSORSTORE_ERRORS, translated
from flax_ckpt_compat._core.thread_pools import in_parallel

from . import writer
from .data_file_writer import DataFiles
from .encode_leaves import EncodedLeaf
from .files import AT_ONCE, make_directory, size_of, sizes_of, sync_directory, write_file, write_files
from .missing_chunks import check_complete
from .ocdbt import read_entries
from .ocdbt_encode import write_index
from .ocdbt_nodes import Entries
from .open_index import open_database
from .recorded_checksums import Record, file_of_database
from .save_plan import SavePlan
from .shardings import ShardingEncoder
from .zarr import Encoding


def begin(save: ProcessSave) -> None:
    """Create the directories, in process 0; see `Backend.begin_multiprocess`."""
    writer.begin(save.path, save.prepared, save.options)


def write(save: ProcessSave) -> None:
    """Write this process's shards, and in process 0 all that is not spread; see `Backend.write_process_part`.

    All processes share the directory, or, for an upload, each has a local one.
    """
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
    make_directory(own)
    _assign_writers(plan, options)
    arrays = _arrays_of(plan, process)
    record = Record() if options.checksums else None
    with writer.writing_arrays(own, arrays, options, record, is_primary):
        # All processes would upload the same list.
        files = writer.write_metadata(path, plan, options, process.index, lists_arrays=is_primary or upload is None)
    if record is not None:
        # Those of process 0 go into the file of the whole checkpoint, which readers open first.
        (plan.record if is_primary else record).add_files(path, files)
        write_files(file_of_database(record, own, path))
    write_file(os.path.join(own, layout.PROCESS_DONE), _digest(plan).encode())
    sync_directory(own)
    if upload is not None:
        sent = [os.path.relpath(os.path.join(own, name), path) for name in files_below(own)]
        options.meter.begin_rest(sum(os.path.getsize(os.path.join(path, name)) for name in sent))
        done = os.path.relpath(os.path.join(own, layout.PROCESS_DONE), path)
        upload.upload_files(path, sent, done, options.meter)


def finish(save: ProcessSave) -> None:
    """Merge the parts of all processes and commit the checkpoint, in process 0; see `Backend.finish_multiprocess`."""
    path, plan, options, upload = save.path, save.prepared, save.options, save.upload
    _assign_writers(plan, options)
    digest, base = _digest(plan), LocalLocation(path) if upload is None else of_text(upload.url)
    names = [_name_of(index, upload) for index in range(save.process.count)]
    in_parallel(lambda number: _check_done(base, number, base / names[number], digest), range(len(names)))
    if plan.arrays:
        with pause_gc(enabled=upload is None):  # the index of many hosts has millions of entries
            _merge(path, names, upload)
            _check(path, plan, writer.encoding_of(options), upload)
    if upload is not None:
        in_parallel(upload.delete_harmless, [f"{name}/{layout.PROCESS_DONE}" for name in names])
        names = names[:1]
    in_parallel(_remove_done_file, [os.path.join(path, name) for name in names])
    writer.commit(path, plan, plan.record if options.checksums else None)


def _assign_writers(plan: SavePlan, options: WriteOptions) -> None:
    for entry, _ in plan.arrays if options.writers else ():
        entry.writer = options.writers.get(tuple(name for name, _ in entry.keys), 0)


def _arrays_of(plan: SavePlan, process: ProcessInfo) -> list[tuple[str, EncodedLeaf]]:
    """Return the arrays of which a process writes values or, process 0, the metadata."""
    found, here = [], process.index
    writer.start_transfers([stored for entry, stored in plan.arrays if entry.writer == here > 0])
    for entry, stored in plan.arrays:
        if entry.writer and here in (0, entry.writer):
            stored = stored.written_by_one(is_here=entry.writer == here)
        elif here and not stored.spans_processes:
            continue
        found.append((entry.name, stored))
    return found


def _merge(path: str, names: list[str], upload: Upload | None) -> None:
    """Write a database with references to the values of all others, without reading them."""
    uploaded = None if upload is None else set(upload.written())

    def is_written(name: str) -> bool:
        file = os.path.join(name, layout.MANIFEST)
        return presence.exists(os.path.join(path, file)) if uploaded is None else file in uploaded

    # A process that holds no first replica has written no database.
    written = list(filter(is_written, names))
    if upload is None:
        merge(path, written, LocalLocation(path))
    else:
        merge(path, written, of_text(upload.url), file_locator(path, of_text(upload.folder)))


def _check(path: str, plan: SavePlan, encoding: Encoding, upload: Upload | None) -> None:
    if upload is None:
        location = LocalLocation(path)
        check_complete(path, plan, encoding, open_database(location), lambda file: size_of(location / file))
        return
    folder = of_text(upload.folder)
    index = open_database(of_text(upload.url), locate=file_locator(path, folder))
    sizes = sizes_of(
        [folder / key for key in upload.written() if not key.endswith((layout.MANIFEST, layout.PROCESS_DONE))]
    )
    check_complete(upload.url, plan, encoding, index, lambda file: sizes.get(folder / file))


def _name_of(process: int, upload: Upload | None) -> str:
    """Return the name of a process's database."""
    return f"{layout.PROCESS_PREFIX}{process}{'' if upload is None else upload.tag}"


def _digest(plan: SavePlan) -> str:
    """Return a digest of what must be equal in all processes for their shards to fit together."""
    texts, numbers, dtypes = ShardingEncoder(), dict[str | None, int](), Memo(operator.attrgetter("name"))
    spread = []
    for entry, stored in plan.arrays:
        if stored.spans_processes:
            # Texts of shardings list all device ids, and few of them are distinct.
            number = numbers.setdefault(texts.of(stored.sharding), len(numbers))
            spread.append(
                (entry.name, dtypes[stored.dtype], stored.shape, stored.write_shape, str(stored.annotation), number)
            )
    return hashlib.sha256(json.dumps([spread, list(numbers)]).encode()).hexdigest()


def _check_done(location: Location, process: int, database: Location, digest: str) -> None:
    file, path = database / layout.PROCESS_DONE, location.path
    try:
        found = file.read().decode("ascii", "replace")
    except MissingPathError as error:
        where = "URL of one store" if location.is_remote else "directory that they share"
        raise StorageError(
            f"{path}: the share of process {process} is missing (it should have written {file}); all processes must "
            f"save to one {where}. Nothing was saved",
            path=path,
            errno=error.errno,
        ) from error
    if found != digest:
        raise MultiprocessSaveError(
            f"{path}: the arrays that process {process} spreads have other names, shapes, dtypes or shardings than "
            f"those of process 0; call save_checkpoint_multiprocess with the same tree in all processes. Nothing was "
            f"saved",
            path=path,
        )


def _remove_done_file(database: str) -> None:
    file = os.path.join(database, layout.PROCESS_DONE)
    with translated(file, "removed"):
        os.unlink(file)


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
