"""Render reports of `verify` as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from flax_ckpt_compat._core.escaping import count_of_leaves, format_size, printable
from flax_ckpt_compat._core.folding import Row, one_line, shown

Checkpoint = Any  # flax_ckpt_compat._view.verify_report.VerifiedCheckpoint, which imports this module
_WORDS = {"ok": "ok", "unverified": "ok*", "damaged": "DAMAGED", "unreadable": "UNREADABLE"}
_WIDTH = max(map(len, _WORDS.values()))


def of_checkpoint(checkpoint: Checkpoint) -> str:
    """Return a line, and one below for each problem."""
    return "\n".join([title(checkpoint), *map("  ".__add__, details(checkpoint))])


def title(checkpoint: Checkpoint) -> str:
    """Return state, leaves, size, format and path in one line."""
    count = count_of_leaves(len(checkpoint.leaves))
    what = f"{count:>12}  {format_size(checkpoint.nbytes):>8}  {checkpoint.format or '-':<7}"
    return f"{_WORDS[checkpoint.state]:<{_WIDTH}}  {what}  {printable(checkpoint.path, one_line=True)}"


def details(checkpoint: Checkpoint) -> Iterator[str]:
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


def _without_place(leaf: Any, checkpoint: Checkpoint) -> str:
    """Return why a leaf is damaged, without the path that the lines above name."""
    why: str = leaf.why
    for start in (f"{checkpoint.path}: ", f"{leaf.path}: "):
        why = why.removeprefix(start)
    return why


def summary(checkpoints: Sequence[Checkpoint]) -> str:
    """Return the last lines: how many checkpoints are in which state, and what the states mean."""
    counts = {state: sum(one.state == state for one in checkpoints) for state in _WORDS}
    good = counts["ok"] + counts["unverified"]
    words = [f"{good} ok"] + [f"{counts[state]} {state}" for state in ("damaged", "unreadable") if counts[state]]
    strange = sum(bool(one.unexpected) for one in checkpoints)
    words += [f"{strange} with unexpected files"] if strange else []
    total = f"{len(checkpoints)} checkpoint{'s' if len(checkpoints) != 1 else ''}: {', '.join(words)}."
    note = "Without recorded checksums; all leaves decode, but changed values would not show"
    return f"{total}\n* {note}: {counts['unverified']}." if counts["unverified"] else total


def to_json(report: Any) -> dict[str, Any]:
    """Return a `Verification` as what JSON holds; `state` and `ok` are included."""
    found = [dataclasses.asdict(one) | {"state": one.state, "nbytes": one.nbytes} for one in report.checkpoints]
    return {"path": report.path, "ok": report.ok, "verified": report.verified, "checkpoints": found}
