"""Verify checkpoints: read every leaf, compare checksums, look for what is missing or unexpected; report it."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Literal, SupportsFloat

from flax_ckpt_compat._core import backend, errors, text_formatting
from flax_ckpt_compat._core.backend import LeafHandle, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import STEP_FILES
from flax_ckpt_compat._core.text_formatting import Row, counted, format_size, printable
from flax_ckpt_compat._core.thread_pools import Pool, in_parallel
from flax_ckpt_compat._core.tree import Path, show_path
from flax_ckpt_compat._discovery import locating, opening, walk
from flax_ckpt_compat._restore.call_arguments import check_function
from flax_ckpt_compat._view import metadata
from flax_ckpt_compat._view.report import Line, Report, _Shown, for_json

State = Literal["ok", "unverified", "damaged", "unreadable"]
# From the best to the worst, with the colours of their lines.
_COLORS: dict[State, str] = {"ok": "green", "unverified": "yellow", "unreadable": "yellow", "damaged": "red"}
_AT_ONCE = 4
_NO_DAMAGE = (errors.StorageError, errors.OutOfMemoryError, errors.UnsupportedLeafError, errors.ReplacedError)
_UNOPENED = (errors.IncompleteCheckpointError, errors.CorruptCheckpointError, *_NO_DAMAGE)


@dataclasses.dataclass(frozen=True, slots=True)
class VerifiedLeaf:
    """One leaf of a verified checkpoint.

    Attributes:
        path: its key path, joined with ``/``.
        state: ``ok`` (it decodes, and its checksums hold), ``unverified`` (it decodes, and has no checksums),
            ``damaged``, or ``unreadable`` (the file system or store refused, or memory did not suffice).
        why: what is wrong with it; else empty.
        nbytes: size in memory, in bytes.
    """

    path: str
    state: State
    why: str
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """One verified checkpoint.

    Attributes:
        path: absolute path, or URL.
        format: ``msgpack`` or ``orbax``; empty if it cannot be opened, or has only items of unknown kinds.
        leaves: every leaf.
        damage: what is wrong beside the leaves: why it cannot be opened, or which file does not decode.
        unexpected: what lies in it and belongs to no leaf, as relative paths with notes.
        readable: false if the file system or store refused to open it, or memory did not suffice.
    """

    path: str
    format: str
    leaves: tuple[VerifiedLeaf, ...]
    damage: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    readable: bool = True

    @property
    def state(self) -> State:
        """Return the worst state of its leaves and files; ``unverified`` if one has no checksums, or none was read."""
        states: list[State] = [leaf.state for leaf in self.leaves] + ["damaged"] * bool(self.damage)
        states += ["unverified"] * (not self.format)
        return _worst(states) if self.readable else "unreadable"

    @property
    def nbytes(self) -> int:
        """Return the size of all leaves in memory, in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclasses.dataclass(frozen=True, slots=True)
class Verification(_Shown):
    """Result of `verify`; prints as text.

    Attributes:
        path: what was verified.
        checkpoints: every checkpoint there.
    """

    path: str
    checkpoints: tuple[VerifiedCheckpoint, ...]

    @property
    def state(self) -> State:
        """Return the worst state of the checkpoints, ``ok`` only if recorded checksums cover all of them."""
        return _worst([one.state for one in self.checkpoints])

    @property
    def ok(self) -> bool:
        """Return whether every leaf decodes, and is covered by checksums that hold."""
        return self.state == "ok"

    @property
    def damaged(self) -> bool:
        """Return whether anything is damaged or unreadable; if not, it is ``ok`` or ``unverified``."""
        return any(one.state in ("damaged", "unreadable") for one in self.checkpoints)

    @property
    def verified(self) -> bool:
        """Return whether it is `ok`, and nothing unexpected is there."""
        return all(checkpoint.state == "ok" and not checkpoint.unexpected for checkpoint in self.checkpoints)

    def _report(self) -> Report:
        found = report([self])
        return dataclasses.replace(found, lines=[*itertools.chain(*map(lines_of, self.checkpoints)), *found.lines])


def _worst(states: Sequence[State]) -> State:
    return max(states, key=list(_COLORS).index, default="ok")


def verify(
    path: str | os.PathLike[str],
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    progress: Callable[[VerifiedCheckpoint], None] | None = None,
) -> Verification:
    """Read every leaf of checkpoints, and report which ones are damaged.

    Memory stays bounded: large arrays are read in slices, along their chunks.

    Args:
        path: one checkpoint, or a directory; all checkpoints below it are verified, of every prefix and format.
        step: only this step of the directory.
        prefix: with ``step``: literal text before it in the checkpoints' names.
        progress: called with each verified checkpoint, in their order, as it completes.

    Returns:
        The report. Damage is reported there, not raised.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ForkedProcessError: this process was forked from one that had used TensorStore.
        StorageError: the file system or store refused to list the directory.

    Example:
        >>> _ = save("runs", {"w": np.ones(2)}, step=1)
        >>> verify("runs").ok
        True
    """
    check_function(progress, "progress")
    import numpy as np  # noqa: F401  (before several threads import it at once, which may abort the process)

    checkpoint_dir = metadata.dir_without_pending_saves(path, prefix)
    root = checkpoint_dir.root
    if step is None:
        found = walk.checkpoints_below(root)
    else:
        located = locating.find(checkpoint_dir, step)
        assert isinstance(located, locating.LocatedCheckpoint)  # an explicit step is there, or it raises
        found = [located.location.unlisted()]
    if not found:
        raise locating.Absence(f"{root} holds no checkpoints").error(root, "nothing to verify: ")
    is_named = step is not None or found == [root]  # the only one
    count = metadata.BAR.get()(lambda: sum(one.total_size() for one in found))
    results = []
    with Pool(_AT_ONCE) as pool:
        tasks = [pool.submit(_verify, one, count, is_named) for one in found]
        for result in filter(None, (task.result() for task in tasks)):
            results.append(result)
            if progress is not None:
                progress(result)
    return Verification(root.path, tuple(results))


def _verify(location: Location, count: Callable[[int], None], is_named: bool) -> VerifiedCheckpoint | None:
    """Verify one checkpoint; None if another program removed it meanwhile, and the caller did not name it."""
    reported = _UNOPENED if is_named else (*_UNOPENED, errors.UnrecognizedFormatError, errors.CheckpointNotFoundError)
    try:
        listed = location.listed()
        with locating.unchanged(listed):
            found = _verify_files(listed, count, is_named)
    except reported as error:
        is_damaged = not isinstance(error, (*_NO_DAMAGE, errors.CheckpointNotFoundError))
        found = VerifiedCheckpoint(location.path, "", (), (str(error),), readable=is_damaged)
    if found.state in ("ok", "unverified") or locating.is_there(location):
        return found
    if is_named:
        raise locating.removed_error(location)
    return None


def _verify_files(location: Location, count: Callable[[int], None], is_named: bool) -> VerifiedCheckpoint:
    leaves: list[VerifiedLeaf] = []
    damage: list[str] = []
    format, readable = "", True
    # What only its own handler reads is no damage among others, and nothing to verify alone.
    with closing(opening.Opened(location, verify=True, allows_unknown=not is_named)) as opened:
        unexpected = _strange_names(opened)
        for name, item in opened.items.items():
            try:
                with closing(opening.open_item(item, verify=True)) as reader:
                    format, inspection = opened.format, reader.inspect()
                    unexpected += [os.path.join(name, one) for one in inspection.unexpected]
                    damage += inspection.damaged
                    for leaf in _verify_leaves(reader, (name,) * opened.is_mapping, inspection.contradictions):
                        leaves.append(leaf)
                        count(leaf.nbytes)
                    reader.verify_checksums()
            except (errors.ForkedProcessError, errors.UnrecognizedFormatError):
                raise
            except errors.CheckpointError as error:
                damage.append(str(error))
                readable = readable and not isinstance(error, _NO_DAMAGE)
    # A block of bytes that is damaged makes all leaves in it so, for the same reason.
    others = sorted(set(damage) - {leaf.why for leaf in leaves})
    return VerifiedCheckpoint(location.path, format, tuple(leaves), tuple(others), tuple(unexpected), readable)


def _strange_names(opened: opening.Opened) -> list[str]:
    """Return the names beside the items of a checkpoint that are not part of any layout."""
    if "" in opened.items:
        return []  # its reader knows
    if "" in opened.contents.unknown:
        return ["all files (of an unknown kind: not verified)"]
    strange = sorted({*opened.location.listdir()}.difference(opened.items, STEP_FILES))
    folders = [name for name in strange if (opened.location / name).isdir()]
    return [f"{name} (an item of an unknown kind: not verified)" if name in folders else name for name in strange]


def _verify_leaves(reader: Reader, prefix: Path, contradictions: Mapping[Path, str]) -> Iterator[VerifiedLeaf]:
    """Verify all leaves of a tree, in bounded memory."""
    for batch in backend.batches(backend.handles_of(reader)):
        results = _attempts(reader.verify_checksums, batch)
        # Bytes that are those that were saved decode as they did then.
        results |= _read(reader, [handle for handle, result in results.items() if result is False])
        for handle, result in results.items():
            why = contradictions.get(handle.path, "")
            state: State = "damaged" if why else "ok" if result is True else "unverified"
            if isinstance(result, errors.CheckpointError):
                is_unread = isinstance(result, (*_NO_DAMAGE, errors.UnrecognizedFormatError))
                why, state = str(result), "unreadable" if is_unread else "damaged"
            yield VerifiedLeaf(show_path((*prefix, *handle.path)), state, why, handle.nbytes)


def _attempts(check: Callable[[LeafHandle], Any], handles: Sequence[LeafHandle]) -> dict[LeafHandle, Any]:
    """Check leaves, some at the same time; return of each what that returned, or the error that it raised."""

    def run(handle: LeafHandle) -> Any:
        try:
            return check(handle)
        except errors.ForkedProcessError:
            raise
        except errors.CheckpointError as error:
            return error

    return dict(zip(handles, in_parallel(run, handles, _AT_ONCE), strict=True))


def _read(reader: Reader, batch: list[LeafHandle]) -> dict[LeafHandle, Any]:
    """Read leaves; return the errors of those that do not decode."""

    def read(handle: LeafHandle) -> None:
        for part in handle.parts():
            reader.read([part])

    if len(batch) > 1:
        with suppress(errors.CheckpointError):  # each leaf on its own tells which one it is
            reader.read(batch)
            return {}
    return _attempts(read, batch)


def report(found: Sequence[Verification], *, strict: bool = False) -> Report:
    """Return what is shown below the checkpoints; if ``strict``, missing checksums and unexpected files count, too."""
    checkpoints = [checkpoint for one in found for checkpoint in one.checkpoints]
    counts = Counter(one.state for one in checkpoints)
    words = [f"{counts[state]} {state}" for state in _COLORS if counts[state] or state == "ok"]
    strange = sum(bool(one.unexpected) for one in checkpoints)
    words += [f"{strange} with unexpected files"] if strange else []
    text = f"{counted(len(checkpoints), 'checkpoint')}: {', '.join(words)}."
    if counts["unverified"]:
        text += "\nUnverified: all leaves decode, but no recorded checksums cover them: changed values would not show."
    is_bad = not all(one.verified if strict else not one.damaged for one in found)
    return Report([Line(text, hang=2)], lambda: list(map(for_json, found)), found=is_bad)


def lines_of(checkpoint: VerifiedCheckpoint) -> Iterator[Line]:
    """Yield a line with state, leaves, size, format and path, then what is wrong and what lies there unexpectedly."""
    word = checkpoint.state if checkpoint.state in ("ok", "unverified") else checkpoint.state.upper()
    count, size = counted(len(checkpoint.leaves), "leaf"), format_size(checkpoint.nbytes)
    title = f"{word:<10}  {count:>12}  {size:>8}  {checkpoint.format or '-':<7}  {checkpoint.path}"
    yield Line(printable(title, one_line=True), _COLORS[checkpoint.state], hang=2)
    start = f"{checkpoint.path}: "  # which the line above names
    wrong = [(one, one.why.removeprefix(start).removeprefix(f"{checkpoint.path}/")) for one in checkpoint.leaves]
    rows = [Row((one.path, why.removeprefix(f"{one.path}: ")), (one.state,)) for one, why in wrong if why]
    found, more = text_formatting.shown(rows)
    details = [f"{row.detail[0]}: {row.names[0]}{row.note}: {row.names[1]}" for row in found]
    details += [f"and {more} more"] if more else []
    details += [text.removeprefix(start) for text in checkpoint.damage]
    if checkpoint.unexpected:
        details.append(f"unexpected: {text_formatting.one_line(checkpoint.unexpected)}")
    yield from (Line(printable(f"  {detail}", one_line=True), hang=4) for detail in details)
