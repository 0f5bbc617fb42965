"""Define `Listing`: one listing of a folder of a store, made by whoever begins a call, and handed down with locations.

A store answers look-ups by requests, so a call lists a folder once, whole, and takes its answers from there. On a disk
look-ups are quick, and nothing is kept: `Storage.listing` returns None.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import NamedTuple


class Stat(NamedTuple):
    """What a store tells of a file."""

    size: int  # in bytes
    version: str  # changes when the file is replaced
    crc32c: int | None = None


class Listing:
    """All files below a folder at one moment, and what was read of them since then."""

    __slots__ = ("contents", "files", "heads", "keys", "root")

    def __init__(self, root: str, files: Mapping[str, Stat]):
        """Keep the files below ``root``, by their paths relative to it."""
        self.root, self.files, self.keys = root, files, sorted(files)
        self.heads: dict[str, bytes] = {}  # path of a file → its first bytes
        self.contents: dict[str, bytes] = {}  # path of a small file → what it holds

    def covers(self, folder: str) -> bool:
        """Return whether a folder is this one, or below it."""
        return folder == self.root or folder.startswith(f"{self.root}/")

    def below(self, folder: str) -> dict[str, Stat] | None:
        """Return the files below a folder, relative to it; None if it is not covered."""
        if not self.covers(folder):
            return None
        if folder == self.root:
            return dict(self.files)
        inner = folder[len(self.root) + 1 :] + "/"
        first = bisect.bisect_left(self.keys, inner)
        last = bisect.bisect_left(self.keys, inner[:-1] + "0", first)  # "0" follows "/"
        return {key[len(inner) :]: self.files[key] for key in self.keys[first:last]}

    def file(self, path: str) -> Stat | None:
        """Return what is known of a file; None if it is not there, or in a folder that is not covered."""
        return self.files.get(path[len(self.root) + 1 :]) if path.startswith(f"{self.root}/") else None
