"""List what a directory holds under a prefix, judged by names and sizes; decode nothing.

The steps are ``prefix + number``, and the steps of an Orbax CheckpointManager in the same directory. Where there is
none of them, other names that begin with the prefix count for look-ups: see `Directory.tiers`. Every look-up,
listing and restore goes by this (`flax_ckpt_compat._discovery.lookups`). What a save may overwrite and remove is
decided by `flax_ckpt_compat._save.retention`, whose rules are literal.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flax_ckpt_compat._core import module_names, paths, steps
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._discovery import detect, listing

_Result = TypeVar("_Result")
_STEP_OF_MANAGER = re.compile(r"(.*_)?(\d+)", re.DOTALL)
# A manager names its steps without Flax's prefix, so this prefix says nothing about which manager is meant.
_DEFAULT_PREFIXES = ("", "checkpoint_")
# A name vanishes in a listing only when another process has committed or removed something meanwhile. The bound is
# for file systems that list what they do not find.
_ROUNDS = 20


class State(enum.Enum):
    """What a listed name is, judged by names and sizes alone."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    FOREIGN = "foreign"
    VANISHED = "vanished"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A name that may be a checkpoint.

    Attributes:
        name: in its directory.
        path: absolute path, or URL.
        step: its number; None for ``prefix + text``.
        text: the step as the name spells it.
        managed: the name is one of a CheckpointManager, not of the caller's prefix.
    """

    name: str
    path: str
    step: float | None
    text: str
    managed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """An entry and what it is.

    Attributes:
        entry: the name.
        state: what it is.
        why: what is missing, or what a foreign directory looks like.
    """

    entry: Entry
    state: State
    why: str | None = None

    @property
    def counts(self) -> bool:
        """Return whether look-ups name it: complete checkpoints, and foreign directories as Flax does."""
        return self.state is State.COMPLETE or (self.state is State.FOREIGN and not self.entry.managed)


class ChangedError(Exception):
    """The directory changed while it was listed and judged: list again."""


def list_again_while_it_changes(directory: str, look: Callable[[bool], _Result]) -> _Result:
    """Call ``look`` with a fresh listing until it does not raise `ChangedError`; at most `_ROUNDS` times.

    Args:
        directory: that is listed; in a store, one listing answers each round.
        look: takes whether a name that has vanished is to count as absent: so in the last round.
    """
    for left in reversed(range(_ROUNDS)):
        try:
            with paths.listing_cache(directory):
                return look(left == 0)
        except (ChangedError, FileNotFoundError, NotADirectoryError) as error:
            # Whatever else was not there was removed between two looks at it.
            if not left or isinstance(error, CheckpointError):
                raise
    raise AssertionError


class Directory:
    """One listing of a directory. Entries are in order, oldest first; each is judged when it is asked for."""

    def __init__(self, where: listing.CheckpointDir, *, tolerant: bool = False):
        """List the directory.

        Args:
            where: directory and prefix.
            tolerant: take what has vanished since for absent, instead of raising `ChangedError`.
        """
        self.where, self._tolerant = where, tolerant
        self.names: list[str] = listing.names_in(where)
        self._judged: dict[str, Judged] = {}

    @functools.cached_property
    def steps(self) -> list[Entry]:
        """The steps of the prefix and of a CheckpointManager; of two that are one step, the prefix's comes last."""
        prefix = self.where.prefix
        ours = [self._entry(name, name[len(prefix) :]) for name in steps.in_order(self.names, prefix)]
        taken = {entry.name for entry in ours}
        managed = self._family("") if prefix else []
        return sorted([*(entry for entry in managed if entry.name not in taken), *ours], key=_order)

    @functools.cached_property
    def other_family(self) -> list[Entry]:
        """The steps of the only CheckpointManager that gives its own prefix, where the caller chose none."""
        if self.where.prefix not in _DEFAULT_PREFIXES:
            return []
        heads = {match[1] for match in map(_STEP_OF_MANAGER.fullmatch, self.names) if match and match[1]}
        families = [family for head in sorted(heads - {self.where.prefix}) if (family := self._family(head))]
        return families[0] if len(families) == 1 else []

    @functools.cached_property
    def texts(self) -> list[Entry]:
        """``prefix + text`` in natural order: ``checkpoint_best``, ``checkpoint_epoch10``."""
        return self._named(lambda name: steps.is_text(name, self.where.prefix))

    @functools.cached_property
    def longer(self) -> list[Entry]:
        """Numbered names that begin with the prefix and belong to a longer one, in natural order."""
        prefix = self.where.prefix
        return self._named(lambda name: steps.is_of_longer_prefix(name, prefix)) if prefix else []

    def tiers(self) -> Iterator[Sequence[Entry]]:
        """Yield groups of entries, each of which counts as the latest only where the ones before hold nothing."""
        yield self.steps
        # Every name begins with the empty prefix, so there the steps of a manager say more.
        if self.where.prefix:
            yield self.texts
            yield self.other_family
        else:
            yield self.other_family
            yield self.texts
        yield self.longer

    def judge(self, entry: Entry) -> Judged:
        """Return what an entry is.

        Raises:
            ChangedError: it has vanished since it was listed.
        """
        if entry.name not in self._judged:
            self._judged[entry.name] = self._judge(entry)
        judged = self._judged[entry.name]
        if judged.state is State.VANISHED and not self._tolerant:
            raise ChangedError
        return judged

    def check_unchanged(self) -> None:
        """Raise `ChangedError` if the local directory now holds other names.

        Listing is not atomic: it can miss both a name that came and one that went meanwhile.
        """
        if self._tolerant or paths.is_url(self.where.directory):
            return
        if set(self.names) != set(listing.names_in(self.where)):
            raise ChangedError

    def _entry(self, name: str, text: str, *, managed: bool = False) -> Entry:
        return Entry(name, self.where.path(name), steps.parse_step(text), text, managed)

    def _named(self, belongs: Callable[[str], bool]) -> list[Entry]:
        start = len(self.where.prefix)
        # Unsigned: the dash in ``ckpt-10`` belongs to the text.
        texts = module_names.natural_sort((name[start:] for name in self.names if belongs(name)), signed=False)
        return [
            Entry(self.where.prefix + text, self.where.path(self.where.prefix + text), None, text) for text in texts
        ]

    def _family(self, head: str) -> list[Entry]:
        """Steps whose names are ``head + digits``, if one of them at least is the complete step of a manager."""
        matches = filter(None, map(_STEP_OF_MANAGER.fullmatch, self.names))
        found = [self._entry(match[0], match[2], managed=True) for match in matches if (match[1] or "") == head]
        found.sort(key=_order)
        is_manager = any(detect.is_step_of_manager(entry.path) for entry in reversed(found))
        return found if is_manager else []

    def _judge(self, entry: Entry) -> Judged:
        why = listing.what_is_missing(entry.path)
        if entry.managed and paths.isfile(entry.path):
            return Judged(entry, State.FOREIGN, "a file")
        if why is None:
            return Judged(entry, State.COMPLETE)
        is_there = why != detect.ABSENT if paths.is_url(entry.path) else paths.lexists(entry.path)
        if not is_there:
            return Judged(entry, State.VANISHED, why)
        foreign = detect.foreign_look(entry.path)
        if foreign is None:
            return Judged(entry, State.INCOMPLETE, why)
        # It may have gone while it was looked at.
        return Judged(entry, State.FOREIGN if paths.lexists(entry.path) else State.VANISHED, foreign)


def _order(entry: Entry) -> tuple[float, bool, str]:
    assert entry.step is not None
    return entry.step, not entry.managed, entry.name
