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
        raise CorruptCheckpointError(
            f"{path} has files that are pointers of git-lfs, such as {pointer}: their content was never fetched. Run "
            "`git lfs pull` in that repository, and try again.",
            path=path.path,
            leaf=error.leaf,
        ) from error


def _first_pointer(path: Location) -> Location | None:
    """Return a file of a local checkpoint that is a pointer; the first one by name, of some."""
    if path.is_remote:  # git has none there, and each look is a request
        return None
    with suppress(OSError, CheckpointError):
        if not path.isdir():
            return None
        for name in sorted(path.files_below())[:_MAX_FILES]:
            file = path / name
            with suppress(OSError, StorageError):
                if file.size() <= _MAX_POINTER and foreign.is_lfs_pointer(file):
                    return file
    return None
