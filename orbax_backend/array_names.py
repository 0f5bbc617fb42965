"""Find the arrays of a directory that has no file with the tree: their names spell their key paths."""

from __future__ import annotations

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import PathLengths

from .files import corrupt
from .open_index import open_database


def names_of_arrays(location: Location) -> list[str]:
    """Return the names of all arrays: keys of the directory's database, or paths of folders in it."""
    if (location / layout.MANIFEST).isfile():
        keys = open_database(location).keys()
        files = [key.decode("utf-8", "surrogateescape") for key in keys]
    else:
        files = location.files_below()
    split = (file.rpartition("/") for file in files)
    names = sorted({folder for folder, _, file in split if folder and file in layout.ARRAY_METADATA_FILES})
    lengths = PathLengths(sum(map(len, files)))
    try:
        for name in names:
            name.encode()
            lengths.add((name,), 1)
    except ValueError as error:
        raise corrupt(location, f"its arrays have names that no tree can have ({error!r:.200})") from error
    return names
