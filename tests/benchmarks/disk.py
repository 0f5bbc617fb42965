"""Whether what was written has reached the disk, or is in the page cache, and facts of the machine."""

import ctypes
import datetime
import os
import platform
import subprocess
import sys

# Linux 6.5 and newer have cachestat(2) under this number on every architecture.
_CACHESTAT = 451


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "in_writeback", "evicted", "recently_evicted")
    )


def unsynced(directory: str) -> int | None:
    """Bytes of the files under a directory that are only in the page cache.

    Returns:
        The number, or None where the system cannot say.
    """
    if not sys.platform.startswith("linux"):
        return None
    found = [_pages(path) for path in files_below(directory)]
    if None in found:
        return None
    return os.sysconf("SC_PAGE_SIZE") * sum(int(pages.dirty + pages.in_writeback) for pages in found if pages)


def cached(path: str) -> int | None:
    """Bytes of a file that are in the page cache, or None where the system cannot say."""
    pages = _pages(path) if sys.platform.startswith("linux") else None
    return None if pages is None else os.sysconf("SC_PAGE_SIZE") * int(pages.cached)


def files_below(directory: str) -> list[str]:
    """Paths of all files, at any depth."""
    return [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]


def _pages(path: str) -> _Pages | None:
    whole, pages = _Range(0, 0), _Pages()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        system = ctypes.CDLL(None, use_errno=True)
        failed = system.syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(pages), 0)
    finally:
        os.close(descriptor)
    return None if failed else pages


def file_system(path: str) -> str:
    """Type of the file system that a path is on, or ``unknown`` where `df` cannot say."""
    said = subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True, check=False).stdout
    return (said.split() or ["unknown"])[-1]


def machine_facts(workdir: str) -> dict[str, str]:
    """What of the machine matters for the figures, without names or paths."""
    from importlib.metadata import version

    libraries = ("flax", "orbax-checkpoint", "jax", "jaxlib", "tensorstore", "msgpack", "numpy", "optax")
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "CPUs": f"{os.cpu_count()} ({platform.machine()})",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "file system": file_system(workdir),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "Python": platform.python_version(),
        **{library: version(library) for library in libraries},
    }
