"""Define the results of `verify`, and report them: each checkpoint with what is wrong below it, the counts last."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from flax_ckpt_compat._core.fold_names import Row, one_line, shown
from flax_ckpt_compat._core.text_formatting import count_of_leaves, counted, format_size, printable
from flax_ckpt_compat._view.report import Line, Report, _Shown

State = Literal["ok", "unverified", "damaged", "unreadable"]
_WORDS = {"ok": "ok", "unverified": "unverified", "damaged": "DAMAGED", "unreadable": "UNREADABLE"}
_COLORS = {"ok": "green", "unverified": "yellow", "damaged": "red", "unreadable": "yellow"}
_WIDTH = max(map(len, _WORDS.values()))


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
        if not self.readable:
            return "unreadable"
        states = {leaf.state for leaf in self.leaves}
        if self.damage or "damaged" in states:
            return "damaged"
        if "unreadable" in states:
            return "unreadable"
        return "unverified" if "unverified" in states or not self.format else "ok"

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
        return max((one.state for one in self.checkpoints), key=list(_WORDS).index, default="ok")

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


def report(found: Sequence[Verification], *, strict: bool = False) -> Report:
    """Return what is shown below the checkpoints; if ``strict``, missing checksums and unexpected files count, too."""
    checkpoints = [checkpoint for one in found for checkpoint in one.checkpoints]
    is_bad = not all(one.verified if strict else not one.damaged for one in found)
    return Report([Line(_summary(checkpoints), hang=2)], lambda: list(map(_to_json, found)), found=is_bad)


def lines_of(checkpoint: VerifiedCheckpoint) -> Iterator[Line]:
    """Yield a line with state, leaves, size, format and path, then what is wrong and what lies there unexpectedly."""
    count = count_of_leaves(len(checkpoint.leaves))
    what = f"{count:>12}  {format_size(checkpoint.nbytes):>8}  {checkpoint.format or '-':<7}"
    title = f"{_WORDS[checkpoint.state]:<{_WIDTH}}  {what}  {printable(checkpoint.path, one_line=True)}"
    yield Line(title, _COLORS[checkpoint.state], hang=2)
    for detail in _details(checkpoint):
        yield Line(f"  {detail}", hang=4)


def _details(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, and what lies in it unexpectedly."""
    for state in ("damaged", "unreadable"):
        rows = [Row((leaf.path, _without_place(leaf, checkpoint))) for leaf in checkpoint.leaves if leaf.state == state]
        found, more = shown(rows)
        by_reason: dict[str, list[str]] = {}
        for row in found:
            by_reason.setdefault(row.names[1], []).append(row.names[0] + row.note)
        for why, names in by_reason.items():
            yield printable(f"{state}: {', '.join(names)}: {why}", one_line=True)
        yield from [f"{state}: {more} more"] * bool(more)
    yield from (printable(text.removeprefix(f"{checkpoint.path}: "), one_line=True) for text in checkpoint.damage)
    if checkpoint.unexpected:
        yield f"unexpected: {one_line(checkpoint.unexpected)}"


def _without_place(leaf: VerifiedLeaf, checkpoint: VerifiedCheckpoint) -> str:
    """Return why a leaf is damaged, without the path that the lines above name."""
    why = leaf.why
    for start in (f"{checkpoint.path}: ", f"{leaf.path}: "):
        why = why.removeprefix(start)
    return why


def _summary(checkpoints: Sequence[VerifiedCheckpoint]) -> str:
    """Return the last lines: how many checkpoints are in which state, and what the states mean."""
    counts = {state: sum(one.state == state for one in checkpoints) for state in _WORDS}
    words = [f"{counts['ok']} ok"] + [f"{count} {state}" for state, count in counts.items() if count and state != "ok"]
    strange = sum(bool(one.unexpected) for one in checkpoints)
    words += [f"{strange} with unexpected files"] if strange else []
    total = f"{counted(len(checkpoints), 'checkpoint')}: {', '.join(words)}."
    note = "Unverified: all leaves decode, but no recorded checksums cover them, so that changed values would not show."
    return f"{total}\n{note}" if counts["unverified"] else total


def _to_json(found: Verification) -> dict[str, Any]:
    """Return a `Verification` as what JSON holds; `state` and `ok` are included."""
    checkpoints = [dataclasses.asdict(one) | {"state": one.state, "nbytes": one.nbytes} for one in found.checkpoints]
    verdict = {"state": found.state, "ok": found.ok, "verified": found.verified}
    return {"path": found.path} | verdict | {"checkpoints": checkpoints}
