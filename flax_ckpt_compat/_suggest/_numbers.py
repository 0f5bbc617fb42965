"""Whether numbers that Flax, or a loop, gave to layers may have shifted because one of them came or went."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from flax_ckpt_compat._core.tree import Path, show_path
from flax_ckpt_compat._suggest._akin import numbered
from flax_ckpt_compat._suggest._looks import Look, bare
from flax_ckpt_compat._suggest._outcome import Outcome

Print = frozenset[tuple[str, Look]]
Row = tuple[Path, str, Path]  # names before, text before the number, names after
_BY_FLAX = re.compile(r"[A-Z]\w*_\d+")


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """A stored layer, or a single leaf, that goes to another place.

    Attributes:
        old: its key path in the checkpoint.
        new: its key path in the target.
        print: names and looks of its leaves; for a leaf that gets another name, its look alone.
    """

    old: Path
    new: Path
    print: Print


def doubts(
    moved: Sequence[Moved], idle: dict[Path, dict[str, Look]], fresh: dict[Path, dict[str, Look]], outcome: Outcome
) -> Iterator[str]:
    """Layers numbered by Flax that stay where they are while one of their row comes or goes: they may have shifted."""
    had: dict[Row, Print] = {}
    has: dict[Row, Print] = {}
    for old, new, print_ in _found(outcome):
        for rows, path, other in ((had, old, new), (has, new, old)):
            for key in _rows(path, other, kept=True):
                rows[key] = rows.get(key, frozenset()) | print_
    changed: list[tuple[dict[Row, Print], Path, Path, Print]]
    changed = [(had, path, (), frozenset(own.items())) for path, own in idle.items()]
    changed += [(has, path, (), frozenset(own.items())) for path, own in fresh.items()]
    changed += [(had, one.old, one.new, one.print) for one in moved]
    changed += [(has, one.new, one.old, one.print) for one in moved]
    for rows, path, other, print_ in changed:
        # One leaf of the same name and shape is enough: the others may be what the change was about.
        if any(rows.get(key, frozenset()) & print_ for key in _rows(path, other, kept=False)):
            yield f"the numbers of others beside {show_path(path)} may have shifted, as it comes or goes"
            return
    by_flax = {
        (new[:-1], print_)
        for old, new, print_ in _found(outcome)
        if new and old[-1:] == new[-1:] and _BY_FLAX.fullmatch(new[-1])
    }
    for path, own in fresh.items():
        if (path[:-1], frozenset(own.items())) in by_flax:
            yield f"{show_path(path)} may be what Flax gave a number before"
            return


def _found(outcome: Outcome) -> list[tuple[Path, Path, Print]]:
    """Every layer that is found, as (stored path, target path, its leaves)."""
    found: dict[tuple[Path, Path], dict[str, Look]] = {}
    for new, old in outcome.pairs.items():
        if not outcome.has.spot(new).field:
            ours, theirs = bare(new), bare(old)
            found.setdefault((theirs[:-1], ours[:-1]), {})[ours[-1]] = outcome.stored[old]
    return [(old, new, frozenset(own.items())) for (old, new), own in found.items()]


def _rows(path: Path, other: Path, *, kept: bool) -> Iterator[Row]:
    """Yield the rows of numbered names in which a layer keeps its number, or changes it."""
    numbers = {(found[1], other[place + 1 :]) for place, name in enumerate(other) if (found := numbered(name))}
    for place, name in enumerate(path):
        if (found := numbered(name)) and ((found[1], path[place + 1 :]) in numbers) == kept:
            yield path[:place], found[0], path[place + 1 :]
