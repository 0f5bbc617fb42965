"""List and look up the checkpoints of a prefix in a directory by names and sizes; decode nothing.

The steps are ``prefix + number``, and for look-ups the steps of an Orbax CheckpointManager in the same directory.
Without any of them, other names that begin with the prefix count for look-ups: see `Directory.tiers`. Saves overwrite
and remove by the literal prefix: `counted_steps`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from flax_ckpt_compat._core.errors import CheckpointNotFoundError, MissingPathError, StorageError
from flax_ckpt_compat._core.location import Location, location_of, normal, resolved
from flax_ckpt_compat._discovery import contents, foreign, steps
from flax_ckpt_compat._discovery.contents import STEP_DIRECTORY, ChangedError, Contents, Layout, State, contents_of

_log = logging.getLogger("flax_ckpt_compat")
_Result = TypeVar("_Result")
# A manager names its steps without Flax's prefix, so this prefix does not select a manager.
_DEFAULT_PREFIXES = ("", "checkpoint_")
# Beside a writer that keeps one checkpoint and never pauses, one read in 500 took eight, and one failed after twenty.
ROUNDS = 100  # of a look-up or read, each of which fails if others change the directory meanwhile
_MAX_KNOWN = 1000
# Changed by single operations only: with a lock, a signal handler or a fork that looks could wait for ever.
_logged: OrderedDict[Hashable, str] = OrderedDict()


def log_once(subject: Hashable, message: str | None, level: int = logging.WARNING) -> None:
    """Log a message, unless it was the last one about the same subject, for programs that poll a directory.

    None clears it, so that the next is logged."""
    before = _logged.pop(subject, None)
    if message is None:
        return
    _logged[subject] = message
    if len(_logged) > _MAX_KNOWN:
        _logged.popitem(last=False)
    if message != before:
        _log.log(level, "%s", message)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointDir:
    """Directory and prefix of checkpoints, made once of what a caller passed, and handed down."""

    root: Location  # what the caller passed, which may be one checkpoint
    given_prefix: str  # the caller's, whose part before the last ``/`` leads from there to the directory
    directory: Location

    @property
    def prefix(self) -> str:
        """Return the beginning of the checkpoints' names."""
        return self.given_prefix.rpartition("/")[2]

    def listed(self, where: Location | None = None) -> CheckpointDir:
        """Return this directory with a listing of its own, or that of a location above it; see `Location.listed`."""
        listing = (where or self.directory).listed().listing
        return CheckpointDir(self.root.with_listing(listing), self.given_prefix, self.directory.with_listing(listing))


def shown_directory(ckpt_dir: str | os.PathLike[str], prefix: str) -> str:
    """Return the directory to which a prefix leads as the caller wrote it, for returned paths."""
    return os.path.join(ckpt_dir, head) if (head := os.path.dirname(prefix)) else os.fspath(ckpt_dir)


def checkpoint_dir(ckpt_dir: str, prefix: str) -> CheckpointDir:
    """Resolve a caller's directory and prefix; raise StorageError for a URL of an unsupported scheme."""
    head, tail = os.path.split(prefix)
    path = shown_directory(ckpt_dir, prefix)
    # ".." out of a symlinked directory can only be resolved by the file system.
    directory = resolved(path) if os.pardir in head.split(os.sep) else location_of(path)
    if tail and directory.is_remote:
        normal((directory / tail).path)  # raises for characters that stores do not take
    return CheckpointDir(location_of(ckpt_dir), prefix, directory)


def all_names(checkpoint_dir: CheckpointDir) -> list[str]:
    """Return all names in the directory, with those that dead writers set aside put back; none without a directory."""
    directory = checkpoint_dir.directory
    try:
        names = directory.listdir()
        return names + directory.restore_set_aside(names)
    except MissingPathError:
        return []


def counted_steps(checkpoint_dir: CheckpointDir, names: list[str], *, with_items: bool = False) -> dict[str, bool]:
    """Return the numeric checkpoints that retention counts, oldest first: name → `Contents.may_be_removed`.

    Incomplete ones, and what is not a checkpoint of Flax, Orbax or this library, stay uncounted, with a warning."""
    counted, broken = dict[str, bool](), []
    checkpoint_dir = checkpoint_dir.listed()
    ours = steps.in_order(names, checkpoint_dir.prefix)
    checkpoint_dir.directory.prefetch(ours, heads=True)
    for name, found in _looked_at(checkpoint_dir, ours):
        if found.counts_for_keep:
            counted[name] = found.may_be_removed(with_items=with_items)
        # Otherwise another process has just evicted it.
        elif found.state in (State.INCOMPLETE, State.DENIED) and found.location.exists():
            broken.append(f"{name} ({found.why})")
    if broken:
        _log.warning("Skipping incomplete checkpoints in %s: %s", checkpoint_dir.directory, "; ".join(broken))
    return counted


def newest_step(checkpoint_dir: CheckpointDir, since: float, *, but: Container[str] = ()) -> str | None:
    """Return the newest numeric checkpoint not in ``but`` or older than ``since`` that is complete, or denied."""
    checkpoint_dir, prefix = checkpoint_dir.listed(), checkpoint_dir.prefix
    ours = reversed(steps.in_order(all_names(checkpoint_dir), prefix))
    ours = itertools.takewhile(lambda name: (steps.step_of(name, prefix) or 0) >= since, ours)
    found = _looked_at(checkpoint_dir, (name for name in ours if name not in but))
    return next((name for name, one in found if one.is_complete or one.state is State.DENIED), None)


def _looked_at(checkpoint_dir: CheckpointDir, names: Iterable[str]) -> Iterator[tuple[str, Contents]]:
    """Yield names and what they hold; warn of what is foreign."""
    for name in names:
        found = contents_of(checkpoint_dir.directory / name, lists_denied=True)
        if found.state is State.FOREIGN:
            what = f"{found.location} is named like a checkpoint, but looks like {found.why}: it stays, is not counted "
            log_once((found.location, "foreign"), f"{what}for keep, and prevents no save of a lower step")
        yield name, found


def is_checkpoint(path: Location) -> bool:
    """Return whether a path is complete and resembles a checkpoint, for suggestions; False if in doubt."""
    try:
        found = contents_of(path)
        is_other = found.layout is Layout.FILE and not foreign.may_be_msgpack_tree(path)
    except StorageError:
        return False
    return found.is_complete and found.is_one_checkpoint and not is_other


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A listed name that may be a checkpoint."""

    name: str  # in its directory
    location: Location
    step: float | None  # its number; None for ``prefix + text``
    text: str  # the step as the name spells it
    managed: bool = False  # a CheckpointManager's name, not one of the caller's prefix


class Directory:
    """One listing of a directory, with entries oldest first; each is classified on demand."""

    def __init__(self, checkpoint_dir: CheckpointDir, *, tolerant: bool = False):
        """Raise `ChangedError` for a listed name that is not there, unless ``tolerant``; see `contents_of`."""
        self.checkpoint_dir, self.tolerant = checkpoint_dir, tolerant
        self._classified: dict[str, Contents] = {}

    @functools.cached_property
    def names(self) -> list[str]:
        """Return all names."""
        return all_names(self.checkpoint_dir)

    @functools.cached_property
    def steps(self) -> list[Entry]:
        """Return the steps of the prefix and of a CheckpointManager; of equal steps, the prefix's comes last."""
        prefix = self.checkpoint_dir.prefix
        ours = [self._entry(name, name[len(prefix) :]) for name in steps.in_order(self.names, prefix)]
        taken = {entry.name for entry in ours}
        managed = self._family("") if prefix else []
        return sorted([*(entry for entry in managed if entry.name not in taken), *ours], key=_order)

    @functools.cached_property
    def other_family(self) -> list[Entry]:
        """Return the steps of the only CheckpointManager with its own prefix, if the caller chose none."""
        if self.checkpoint_dir.prefix not in _DEFAULT_PREFIXES:
            return []
        heads = {match[1] for match in map(STEP_DIRECTORY.fullmatch, self.names) if match and match[1]}
        families = [family for head in sorted(heads - {self.checkpoint_dir.prefix}) if (family := self._family(head))]
        return families[0] if len(families) == 1 else []

    @functools.cached_property
    def texts(self) -> list[Entry]:
        """Return ``prefix + text`` in natural order: ``checkpoint_best``, ``checkpoint_epoch10``."""
        return self._named(steps.is_text)

    @functools.cached_property
    def longer(self) -> list[Entry]:
        """Return numbered names of longer prefixes that begin with this one, in natural order."""
        return self._named(functools.partial(steps.is_text, of_longer_prefix=True))

    def tiers(self) -> Iterator[Sequence[Entry]]:
        """Yield groups of entries; a group can hold the latest only if all groups before are empty."""
        yield self.steps
        if not self.checkpoint_dir.prefix:  # with which every name begins
            yield self.other_family
        yield self.texts
        yield self.other_family
        yield self.longer

    def classify(self, entry: Entry) -> Contents:
        """Return what an entry holds; raise `ChangedError` if it has vanished since it was listed."""
        found = self._classified.get(entry.name)
        if found is None:
            found = contents_of(entry.location, lists_denied=True, tolerant=self.tolerant)  # the restore tells why
            if entry.managed and found.layout is Layout.FILE:  # it is named like a step of a manager, and none
                found = dataclasses.replace(found, state=State.FOREIGN, why=found.why or "a file")
            self._classified[entry.name] = found
        if found.state is State.ABSENT and not self.tolerant:
            raise ChangedError
        return found

    def check_unchanged(self) -> None:
        """Raise `ChangedError` if the local directory now holds other names: a listing misses those that change."""
        is_final = self.tolerant or self.checkpoint_dir.directory.is_remote
        if not is_final and set(self.names) != set(all_names(self.checkpoint_dir)):
            raise ChangedError

    def numbered(self) -> Sequence[Entry]:
        """Return the steps, oldest first, of which all will be classified."""
        entries = self.steps or self.other_family
        self.checkpoint_dir.directory.prefetch((entry.name for entry in entries), heads=True)
        return entries

    def newest(self, is_wanted: Callable[[Contents], bool]) -> Entry | None:
        """Return the newest step, or else ``prefix + text``, whose contents are wanted."""
        texts = self.texts if self.checkpoint_dir.prefix else []  # all names begin with the empty prefix
        entries = reversed([*texts, *(self.steps or self.other_family)])
        return next((entry for entry in entries if is_wanted(self.classify(entry))), None)

    def counts(self, entry: Entry) -> bool:
        """Return whether look-ups include it: complete checkpoints, what may be one, and, as in Flax, foreign ones."""
        state = self.classify(entry).state
        if state is State.FOREIGN:  # without a prefix every other folder of the directory would count
            return not entry.managed and (entry.step is not None or self.checkpoint_dir.prefix != "")
        return state in (State.COMPLETE, State.DENIED)

    def warn_of_incomplete(self, entries: Iterable[Entry]) -> None:
        """Warn of the entries that are incomplete and were passed over, once."""
        found = [one for one in map(self.classify, entries) if one.state is State.INCOMPLETE]
        shown = "; ".join(sorted({f"{one.location.name} ({one.why})" for one in found}))
        folder = self.checkpoint_dir.directory
        message = f"Skipping incomplete checkpoints in {folder}: {shown}" if found else None
        log_once((folder.path, self.checkpoint_dir.prefix, "incomplete"), message)

    def _entry(self, name: str, text: str, *, managed: bool = False) -> Entry:
        return Entry(name, self.checkpoint_dir.directory / name, steps.parse_step(text), text, managed)

    def _named(self, belongs: Callable[[str, str], bool]) -> list[Entry]:
        prefix = self.checkpoint_dir.prefix
        # Unsigned: the dash in ``ckpt-10`` belongs to the text.
        texts = (name[len(prefix) :] for name in self.names if belongs(name, prefix))
        return [self._entry(prefix + text, text) for text in steps.natural_sort(texts, signed=False)]

    def _family(self, head: str) -> list[Entry]:
        """Return the steps named ``head + digits``, if at least one is a complete step of a manager."""
        matches = filter(None, map(STEP_DIRECTORY.fullmatch, self.names))
        found = [self._entry(match[0], match[2], managed=True) for match in matches if (match[1] or "") == head]
        found.sort(key=_order)
        is_manager = any(contents.is_step_of_manager(entry.location) for entry in reversed(found))
        return found if is_manager else []


def _order(entry: Entry) -> tuple[float, bool, str]:
    assert entry.step is not None
    return entry.step, not entry.managed, entry.name


def in_one_listing(
    checkpoint_dir: CheckpointDir, look: Callable[[Directory], _Result], *, root: Location | None = None
) -> _Result:
    """Return what ``look`` finds, or reads, in one listing; list again, up to `ROUNDS` times, after a `ChangedError`.

    The last listing is tolerant: with that, ``look`` raises none. All look-ups and reads retry here alone."""
    where = root or checkpoint_dir.directory  # in a store one listing of the root, which may be above, tells
    for rest in reversed(range(ROUNDS)):
        try:
            return look(Directory(checkpoint_dir.listed(where), tolerant=not rest))
        except ChangedError:
            where = where.unlisted()
    raise AssertionError


def latest_of(directory: Directory) -> Entry | None:
    """Return the latest checkpoint of one listing; raise if newer ones than that are listed and not there."""
    folder, prefix, passed = directory.checkpoint_dir.directory, directory.checkpoint_dir.prefix, list[Entry]()
    for tier in directory.tiers():
        is_longer = tier is directory.longer
        for entry in reversed(tier):
            found = directory.classify(entry)
            if found.state is State.ABSENT:  # in list after list, and not there: an older one is not the latest
                what = f"{folder} lists {entry.name}, but it is not there: others have changed the directory, or its "
                what += "network file system still shows an old list. Try again in a minute, or name a step"
                raise CheckpointNotFoundError(what, path=entry.location.path)
            is_denied = found.state is State.DENIED  # it may be the latest: a restore of it tells of the permission
            may_be = not is_longer or is_denied or (found.is_complete and is_checkpoint(entry.location))
            if may_be and directory.counts(entry):
                directory.warn_of_incomplete(passed)
                if is_longer:
                    what = f"{folder} holds no checkpoint with exactly the prefix {prefix!r}; taking {entry.name}, the "
                    what += "last name that begins with it, as Flax does: pass the whole prefix"
                    log_once((folder.path, prefix, "longer"), what)
                return entry
            passed.append(entry)
    directory.check_unchanged()
    directory.warn_of_incomplete(passed)
    return None


def available_in(directory: Directory) -> list[Entry]:
    """Return the available steps of one listing, oldest first, each number once; warn about incomplete ones."""
    entries = directory.numbered()
    counted = [entry for entry in entries if directory.counts(entry)]
    if not counted:
        directory.check_unchanged()
    directory.warn_of_incomplete(entries)
    shadowed = {entry.step for entry in counted if not entry.managed}
    return [entry for entry in counted if not (entry.managed and entry.step in shadowed)]


def all_of(directory: Directory) -> list[Entry]:
    """Return every checkpoint that is not incomplete, ``prefix + text`` first, so that the latest step comes last."""
    found = everything_of(directory)
    return sorted(filter(directory.counts, found), key=lambda entry: entry.step is not None)


def everything_of(directory: Directory) -> list[Entry]:
    """Return every checkpoint of one listing, the unfinished and foreign ones too: steps, then ``prefix + text``."""
    unfinished = (State.INCOMPLETE, State.TEMPORARY)
    entries = [*directory.numbered(), *directory.texts]
    ours = [one for one in entries if directory.counts(one) or directory.classify(one).state in unfinished]
    if not ours:
        directory.check_unchanged()
    return ours
