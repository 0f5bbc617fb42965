"""Whether optimizers' states go where their parameters go."""

from __future__ import annotations

from collections.abc import Iterator

from flax_ckpt_compat._core.tree import Branch, Node, Path, show_path
from flax_ckpt_compat._suggest._akin import tells_apart
from flax_ckpt_compat._suggest._looks import MOMENTS, Spot, bare, items, node_at
from flax_ckpt_compat._suggest._outcome import Outcome

_COUNTS = frozenset(("count", "gradient_step", "step"))


def doubts(outcome: Outcome, stored: Node, target: Node) -> list[str]:
    """Return the doubts about the sources of optimizer leaves."""
    found = list(_other_role(outcome, stored, target))
    found += _apart(outcome)
    found += _dropped(outcome)
    found += _recounted(outcome)
    return found


def _spots(outcome: Outcome) -> Iterator[tuple[Path, Path, Spot, Spot]]:
    for new, old in outcome.pairs.items():
        ours, theirs = outcome.has.spot(new), outcome.had.spot(old)
        if ours.field or theirs.field:
            yield new, old, ours, theirs


def _other_role(outcome: Outcome, stored: Node, target: Node) -> Iterator[str]:
    origins = _origins(outcome)
    alike: dict[tuple[Path, Path], bool] = {}
    for new, old, ours, theirs in _spots(outcome):
        told = f"{show_path(new)} would come from {show_path(old)}"
        if {bare(new)[-1], bare(old)[-1]} <= {"step", "count"} and "step" in (bare(new)[-1], bare(old)[-1]):
            continue
        if ours.field != theirs.field:
            yield f"{told}, which is something else"
            return
        wanted = origins.get(ours.suffix, {ours.suffix})
        if ours.suffix and not any(source[-len(theirs.suffix) :] == theirs.suffix for source in wanted):
            yield f"{told}, which belongs to another parameter"
            return
        key = (theirs.prefix, ours.prefix)
        if key not in alike:
            alike[key] = _names(stored, theirs.prefix) == _names(target, ours.prefix)
        if theirs.prefix[:1] != ("optimizer",) and not alike[key]:
            yield f"{told}, but that is another optimizer's"
            return


def _origins(outcome: Outcome) -> dict[Path, set[Path]]:
    """Key path of a parameter, less its first names → where parameters of that path would come from."""
    found: dict[Path, set[Path]] = {}
    for new, old in outcome.pairs.items():
        if not outcome.has.is_optimizer(new):
            path = bare(new)
            for start in range(min(3, len(path))):
                found.setdefault(path[start:], set()).add(bare(old))
    return found


def _recounted(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt if step counts restart while moments are restored: a schedule would start again unnoticed."""
    if not any(outcome.has.is_optimizer(path) for path in outcome.pairs):
        return
    for path in outcome.kept:
        if outcome.has.spot(path).field in _COUNTS:
            yield f"{show_path(path)} would begin anew, and with it a schedule that goes by it"
            return


def _names(tree: Node, path: Path) -> set[str]:
    node = node_at(tree, path)
    if not isinstance(node, Branch):
        return set()
    return {name for name, child in node.children.items() if not isinstance(child, Branch) or items(child)}


def _apart(outcome: Outcome) -> Iterator[str]:
    """Several moments of one name for one parameter, of which nothing says which is which."""
    ours: dict[tuple[str, Path], list[tuple[Path, Path]]] = {}
    for new, old, spot, theirs in _spots(outcome):
        if spot.field in MOMENTS or spot.field == "count":
            ours.setdefault((theirs.field, theirs.suffix), []).append((old, new))
    tops = {(old[0], new[0]) for new, old in outcome.pairs.items() if not outcome.has.is_optimizer(new)}
    for group in ours.values():
        for number, (old, new) in enumerate(group):
            for other_old, other_new in group[number + 1 :]:
                with_params = {(old[0], new[0]), (other_old[0], other_new[0])} <= tops and old[0] != other_old[0]
                if with_params and (old[0], other_new[0]) not in tops:
                    continue
                if (old, other_old) != (new, other_new) and not _told_apart(old, other_old, new, other_new):
                    yield f"nothing tells {show_path(old)} and {show_path(other_old)} apart"
                    return
    for path in outcome.unused:
        spot = outcome.had.spot(path)
        for old, new in ours.get((spot.field, spot.suffix), ()) if spot.field in MOMENTS else ():
            if old != new:
                yield f"{show_path(path)} fits {show_path(new)} as well as {show_path(old)} does"
                return


def _told_apart(one: Path, other: Path, new: Path, other_new: Path) -> bool:
    for left, right in zip(one, other, strict=False):
        if left != right:
            for ours, theirs in zip(new, other_new, strict=False):
                if ours != theirs:
                    return bool(tells_apart((left, right), (ours, theirs)))
    # One below the other, as a count of the whole and one of a part.
    return (len(one) < len(other)) == (len(new) < len(other_new))


def _dropped(outcome: Outcome) -> Iterator[str]:
    """Moments that the target would begin anew although they are stored, in the same shape."""
    idle = {
        (spot.field, spot.suffix, seen)
        for path, seen in outcome.unused.items()
        if (spot := outcome.had.spot(path)).field in MOMENTS or spot.field == "count"
    }
    origins = _origins(outcome)
    for path, seen in outcome.kept.items():
        spot = outcome.has.spot(path)
        sources = origins.get(spot.suffix, {spot.suffix}) if spot.suffix else {()}
        tails = {source[start:] for source in sources for start in range(len(source) + 1)}
        if any((spot.field, tail, seen) in idle for tail in tails):
            yield f"{show_path(path)} would begin anew although the checkpoint has {spot.field} of it"
            return
