"""Name the files of a checkpoint whose content git-lfs never fetched: what reads them finds damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from flax_ckpt_compat._core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    UnrecognizedFormatError,
)
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import foreign

_DAMAGE = (CorruptCheckpointError, IncompleteCheckpointError, UnrecognizedFormatError)
_MAX_FILES = 200  # to look at; a pointer is rarely alone
_MAX_POINTER = 1024  # bytes


@contextmanager
def named(path: Location) -> Iterator[None]:
    """Raise, in place of an error of damage, one that names a pointer of git-lfs, if the checkpoint has one."""
    try:
        yield
    except _DAMAGE as error:
        if (pointer := _first_pointer(path)) is None:
            raise
        copied = " that they were copied from, copy them again" if path.is_remote else ""
        raise CorruptCheckpointError(
            f"{path} has files that are pointers of git-lfs, such as {pointer}: their content was never fetched. Run "
            f"`git lfs pull` in {'the' if path.is_remote else 'that'} repository{copied}, and try again.",
            path=path.path,
            leaf=error.leaf,
        ) from error


def _first_pointer(path: Location) -> Location | None:
    """Return a file of a checkpoint that is a pointer; the first one by name, of some. In a store one listing tells."""
    with suppress(OSError, CheckpointError):
        if not path.isdir():
            return None
        path = path.unlisted().listed()
        names = sorted(path.files_below())[:_MAX_FILES]
        for name in names:
            file = path / name
            with suppress(OSError, StorageError):
                if file.size() <= _MAX_POINTER and foreign.is_lfs_pointer(file):
                    return file
    return None
