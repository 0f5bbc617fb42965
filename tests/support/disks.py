"""Folders on a disk: the quick tests keep their files in memory, where nothing is written past the page cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flax_ckpt_compat._core.local import new_file


@contextmanager
def folder_on_disk(preferred: Path) -> Iterator[Path | None]:
    """A folder, the preferred one if it is on a disk, whose file system says that it can; None if there is none."""
    if _passes_cache(preferred):
        yield preferred
        return
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), Path("/var/tmp"))):
        if parent.is_dir() and _passes_cache(parent):
            with tempfile.TemporaryDirectory(dir=parent, prefix="flax_ckpt_compat-") as folder:
                yield Path(folder)
            return
    yield None


def _passes_cache(folder: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        file = new_file.create(str(Path(inside, "probe")), past_cache=True)
        file.discard()
        return file.is_past_cache
