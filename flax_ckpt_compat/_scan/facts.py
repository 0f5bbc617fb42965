"""Keep what is known so far of a project's names, and who has read it: only that is evaluated again when it changes."""

from __future__ import annotations

from collections.abc import Collection

from .values import NOTHING, Value, union

Key = tuple[int, str]  # the id of a scope, function or family of classes; a name, or what is said of it
NAMES: Key = (0, "names of checkpoints")
MADE: Key = (0, "directories that are made")


def returned(function: object) -> Key:
    """Return the key of what a function returns."""
    return id(function), "()"


def option(name: str) -> Key:
    """Return the key of an option of the command line."""
    return 0, f"option {name}"


class Facts:
    """Values by key; `reads` has the keys that were looked up since it was emptied."""

    def __init__(self) -> None:
        self.reads: set[Key] = set()
        self.changed: set[Key] = set()  # since it was emptied
        self.clock = 0
        self._known: dict[Key, Value] = {}
        self._since: dict[Key, int] = {}

    def get(self, key: Key) -> Value:
        """Return what a key is bound to."""
        self.reads.add(key)
        return self._known.get(key, NOTHING)

    def has(self, key: Key) -> bool:
        """Return whether a key is bound, if only to nothing."""
        self.reads.add(key)
        return key in self._known

    def add(self, key: Key, value: Value) -> None:
        """Bind a key to a value besides what it is bound to."""
        before = self._known.get(key)
        after = union([before or NOTHING, value])
        if after != before:
            self._known[key] = after
            self.change(key)

    def change(self, key: Key) -> None:
        """Take note that something changed."""
        self.clock += 1
        self._since[key] = self.clock
        self.changed.add(key)

    def are_old(self, keys: Collection[Key], clock: int) -> bool:
        """Return whether nothing that was read has changed since."""
        return all(self._since.get(key, 0) <= clock for key in keys)
