"""Folders on a disk, bits that flip there, and bytes that are read.

The quick tests keep their files in memory, where nothing is written past the page cache.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Change one bit as a decaying disk does: size and times stay."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the bytes that ``os.preadv`` and ``os.pread`` give within the block."""
    real, total = (os.preadv, os.pread), 0

    def counting(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal total
            given = read(*arguments)
            total += given if isinstance(given, int) else len(given)
            return given

        return call

    os.preadv, os.pread = map(counting, real)
    try:
        yield lambda: total
    finally:
        os.preadv, os.pread = real
