"""What came out of each pair of who saved and who restored, and the table of it."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from tests.support.interop import EVERYBODY

EQUAL, REFUSED = "equal", "refused"
# (who saved, who restored) → kind of tree → "equal", the name of a documented difference, or "refused"
OUTCOMES: dict[tuple[str, str], dict[str, str]] = {}
# who saved → kinds of trees that it refuses to save
NOT_SAVED: dict[str, list[str]] = {}
# name of a documented difference → why it is
REASONS: dict[str, str] = {}


def exported() -> list[Any]:
    """Return all that is known, for another process to merge."""
    return [[[*pair, found] for pair, found in OUTCOMES.items()], NOT_SAVED, REASONS]


def merge(known: list[Any]) -> None:
    """Add what another process found."""
    OUTCOMES.update({(writer, reader): found for writer, reader, found in known[0]})
    NOT_SAVED.update(known[1])
    REASONS.update(known[2])


def lines() -> Iterator[str]:
    """The table, then each difference with its reason, its kinds of trees and its pairs."""
    yield "kinds of trees that come back equal / as documented / refused, without a target"
    yield f"{'saved by':10}" + "".join(f"{reader:>12}" for reader in EVERYBODY) + f"{'cannot save':>14}"
    for writer in EVERYBODY:
        cells = "".join(f"{_cell(OUTCOMES.get((writer, reader))):>12}" for reader in EVERYBODY)
        yield f"{writer:10}{cells}{len(NOT_SAVED.get(writer, ())):>14}"
    for label, (kinds, pairs) in _by_difference().items():
        yield f"{label}: {REASONS.get(label, '')}".rstrip(": ")
        yield f"    {', '.join(kinds)}"
        yield "    " + "; ".join(f"{writer} → {', '.join(readers)}" for writer, readers in pairs.items())
    for writer, kinds in NOT_SAVED.items():
        if kinds:
            yield f"{writer} cannot save: {', '.join(kinds)}"


def _cell(outcomes: dict[str, str] | None) -> str:
    if outcomes is None:
        return "-"
    counts = collections.Counter(
        outcome if outcome in (EQUAL, REFUSED) else "documented" for outcome in outcomes.values()
    )
    return f"{counts[EQUAL]}/{counts['documented']}/{counts[REFUSED]}"


def _by_difference() -> dict[str, tuple[list[str], dict[str, list[str]]]]:
    found: dict[str, tuple[list[str], dict[str, list[str]]]] = {}
    for (writer, reader), outcomes in OUTCOMES.items():
        for kind, outcome in outcomes.items():
            if outcome == EQUAL:
                continue
            kinds, pairs = found.setdefault(outcome, ([], {}))
            if kind not in kinds:
                kinds.append(kind)
            readers = pairs.setdefault(writer, [])
            if reader not in readers:
                readers.append(reader)
    return found
