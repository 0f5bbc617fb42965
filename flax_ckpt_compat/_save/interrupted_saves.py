"""Find and remove what interrupted saves left behind: temporaries, uploads, and arrays without their checkpoint."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import CheckpointError, StorageError, add_sentence
from flax_ckpt_compat._core.local import atomic, gda_folder, presence, temporaries
from flax_ckpt_compat._core.location import Location, of_text
from flax_ckpt_compat._core.orbax_layout import PARTIAL_SAVE, TEMPORARY, ZARR2_METADATA
from flax_ckpt_compat._core.storage_errors import FULL_DISK, translated
from flax_ckpt_compat._core.text_formatting import format_size, one_line
from flax_ckpt_compat._discovery import contents, not_found, walk

_FLAX_TEMPORARIES = ("checkpoint_" + steps.FLAX_TEMPORARY, "checkpoint_" + steps.FLAX_TEMPORARY + steps.ARRAYS_POSTFIX)

_REMOVED_MEANWHILE = (
    "If another program removed the unfinished save meanwhile, as orbax's CheckpointManager does with "
    "cleanup_tmp_directories=True: create such a manager before you save, or save to another directory."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """Something that an interrupted save left behind."""

    location: Location  # of the file or directory
    what: str
    nbytes: int  # size in bytes; in a store, of the whole folder, of which only the unfinished part goes
    kept: str = ""  # why it is not removed: who may still write it; empty if it can go
    by_time: bool = False  # it is kept because it was changed not long ago, and for nothing else


def find_leftovers(root: Location) -> list[Leftover]:
    """Return what interrupted saves left in a directory and all below it, what may still be written included."""
    if not root.isdir():
        raise not_found.no_directory(root).error(root)
    denied: list[StorageError] = []
    found = [leftover for folder, _ in walk.folders_below(root, denied) for leftover in in_folder(folder)]
    why = "the system refused to list it"
    return [*found, *(Leftover(root.at(str(error.path)), "a directory, perhaps with more", 0, why) for error in denied)]


def remove(leftover: Leftover, *, force: bool = False) -> bool:
    """Remove a leftover if still nobody may write it; return whether it is gone. What is not ours in it stays.

    ``force``: also what only time protects."""
    folder, name = leftover.location.parent, leftover.location.name
    if any(not one.kept or (force and one.by_time) for one in in_folder(folder, [name])):
        with translated(leftover.location.path):
            _remove(folder, name, force=force)
    return not list(in_folder(folder, [name]))


def _remove(folder: Location, name: str, *, force: bool) -> None:
    if temporaries.is_temporary(name) and not folder.is_remote:
        atomic.remove_stale(folder.path, [name], force=force)
    elif folder.is_remote:
        folder.remove_leftovers([name])
    elif name.endswith(steps.ARRAYS_POSTFIX) and name not in _FLAX_TEMPORARIES:
        gda_folder.remove_orphan((folder / name).path)
    else:
        for error in folder.discard([name]).values():
            raise error


@contextmanager
def explaining_failures(location: Location) -> Iterator[None]:
    """Let an error say what interrupted saves left on a full disk, or who may have removed what was being written."""
    try:
        yield
    except StorageError as error:
        if error.errno == errno.ENOENT and location.parent.isdir():
            add_sentence(error, _REMOVED_MEANWHILE)
        if error.errno in FULL_DISK:
            with suppress(CheckpointError, OSError):
                folder = of_text(os.path.dirname(location.temporary_path()))
                if found := [one for one in in_folder(folder) if not one.kept or one.by_time]:
                    add_sentence(error, _described(folder, found))
        raise


def _described(folder: Location, found: Collection[Leftover]) -> str:
    certain = [one for one in found if not one.kept]
    nbytes, names = sum(one.nbytes for one in found), one_line([one.location.name for one in found])
    text = f"Interrupted saves left {format_size(nbytes)} in {folder}: {names}. "
    if len(certain) == len(found):
        return f"{text}`flax-ckpt clean` removes them."
    return f"{text}If nothing is saving there, `flax-ckpt clean --force` removes them."


def in_folder(folder: Location, names: Collection[str] | None = None) -> Iterator[Leftover]:
    """Yield the leftovers directly in a folder, or those with these names."""
    if folder.is_remote:
        yield from (one for one in _in_store(folder) if names is None or one.location.name in names)
        return
    if names is None:
        with translated(folder.path):
            names = sorted(os.listdir(folder.path))
    stale = set(atomic.stale_names(folder.path, names))
    for name in names:
        path = (folder / name).path
        if not presence.lexists(path):
            continue
        if temporaries.is_temporary(name):
            match = temporaries.parse(name)
            assert match is not None
            by_time = name not in stale and temporaries.writer_of(match, path) == "perhaps"
            kept = "" if name in stale else "its writer may be running"
            if by_time:
                kept += ", on another machine or in another container: it was changed lately"
            what = f"unfinished save of {match['name']}"
            if match["role"] == "old":
                is_there = (folder / match["name"]).exists()
                what = f"replaced {match['name']}" if is_there else f"{match['name']}, set aside: it is put back"
            yield Leftover(folder / name, what, (folder / name).total_size(), kept, by_time)
        elif PARTIAL_SAVE in name:
            whose = contents.temporary_of(name) or ""
            kept = "it holds values that were saved, and can be completed"
            yield Leftover(folder / name, whose, (folder / name).total_size(), kept)
        elif TEMPORARY in name:
            yield _of_others(folder / name, f"unfinished save of {name.partition(TEMPORARY)[0]} by Orbax")
        elif name in _FLAX_TEMPORARIES and contents.is_only_arrays(folder / name):  # or a file
            yield _of_others(folder / name, "unfinished save by Flax")
        elif name.endswith(steps.ARRAYS_POSTFIX) and _is_orphan(path):
            main = path.removesuffix(steps.ARRAYS_POSTFIX)
            found = _of_others(folder / name, f"arrays of {os.path.basename(main)}, which does not exist")
            is_live = atomic.has_live_writer(main)
            yield dataclasses.replace(found, kept="a save of it may be running", by_time=False) if is_live else found


def _of_others(location: Location, what: str) -> Leftover:
    """Return a leftover of a writer that does not say which process it is: what changed within a day stays."""
    is_old = temporaries.is_long_unchanged(location.path)
    kept = "" if is_old else "changed in the last 24 hours, so its writer may be running"
    return Leftover(location, what, location.total_size(), kept, by_time=bool(kept))


def _is_orphan(folder: str) -> bool:
    """Return whether a folder holds the arrays of a msgpack file that does not exist."""
    main = folder.removesuffix(steps.ARRAYS_POSTFIX)
    # Directories of Orbax's format have no arrays beside them.
    if not presence.isdir(folder) or (presence.lexists(main) and not presence.isdir(main)):
        return False
    if not contents.is_only_arrays(of_text(folder)):
        return False
    files = [name for _, _, names in os.walk(folder) for name in names]
    # An interrupted removal may have left an empty one.
    return ZARR2_METADATA in files or (not files and main[-1:].isdecimal())


def _in_store(folder: Location) -> Iterator[Leftover]:
    for name, is_whole in folder.leftovers().items():
        what = "unfinished upload" if is_whole else "what an unfinished upload left in a complete checkpoint"
        yield Leftover(folder / name, what, (folder / name).total_size())
