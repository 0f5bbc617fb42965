"""Whether what would stay as the target has it, outside of optimizers, is in the checkpoint after all."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flax_ckpt_compat._core.tree import Path, show_path
from flax_ckpt_compat._suggest._akin import akin, numbered, words
from flax_ckpt_compat._suggest._looks import Look, bare
from flax_ckpt_compat._suggest._outcome import Outcome

# Layers of which the number of outputs is that of the classes, and belongs to the task.
_HEADS = frozenset(("head", "heads", "classifier", "logits", "out", "output", "prediction", "predictor", "predictions"))
_VOCABULARIES = frozenset(("lm", "mlm", "vocab", "vocabulary", "token", "tokens", "embed", "embedding", "embedder"))


def doubts(outcome: Outcome) -> Iterator[str]:
    """Leaves that would stay as the target has them although something stored might belong there."""
    idle = {path: seen for path, seen in outcome.unused.items() if not outcome.had.is_optimizer(path)}
    fresh = {path: seen for path, seen in outcome.kept.items() if not outcome.has.is_optimizer(path)}
    yield from _same_size(fresh, idle)
    yield from _resized(outcome, fresh, idle)
    yield from _parts(outcome, fresh, idle)
    yield from _copies(outcome, fresh)
    yield from _foreign(outcome, fresh, idle)
    taken = [path for path in outcome.pairs if outcome.goal[path][0] and not outcome.has.is_optimizer(path)]
    arrays = [path for path, seen in fresh.items() if len(seen[0]) > 1]
    if len(arrays) > len(taken):
        yield "more arrays would stay as the target has them than come from the checkpoint"


def _foreign(outcome: Outcome, fresh: dict[Path, Look], idle: dict[Path, Look]) -> Iterator[str]:
    """Yield that as much as stays initial is stored under names that the target has not."""
    foreign = {path: math.prod(shape) for path, (shape, _) in idle.items() if shape and path not in outcome.goal}
    kept = sum(math.prod(shape) for shape, _ in fresh.values() if shape)
    if foreign and kept and kept / 4 <= sum(foreign.values()) <= kept * 4:
        path = max(foreign, key=foreign.__getitem__)
        yield f"{show_path(path)} and others of the checkpoint are not used, and as much stays as the target has it"


def _same_size(fresh: dict[Path, Look], idle: dict[Path, Look]) -> Iterator[str]:
    """Leaves for which an unused one has the right shape, or as many elements in another layout."""
    looks = set(idle.values())
    sizes = {(math.prod(shape), kind): path for path, (shape, kind) in idle.items() if shape}
    for path, seen in fresh.items():
        if seen in looks and (seen[0] or _may_be_number(path, idle)):
            yield f"{show_path(path)} has the shape of a stored leaf that is not used"
            return
        other = sizes.get((math.prod(seen[0]), seen[1])) if seen[0] else None
        if other is not None:
            yield f"{show_path(path)} has as many elements as {show_path(other)}, which is not used"
            return


def _resized(outcome: Outcome, fresh: dict[Path, Look], idle: dict[Path, Look]) -> Iterator[str]:
    """Leaves of which the checkpoint has one of another size, but for heads, which belong to the task."""
    unused: dict[str, list[tuple[int, ...]]] = {}
    for path, (shape, _) in idle.items():
        if len(shape) > 1 and path not in fresh:
            unused.setdefault(bare(path)[-1], []).append(shape)
    for path, (shape, _) in fresh.items():
        there, head = outcome.stored.get(path), _is_head(path, outcome)
        if not shape:
            continue
        if there is not None and there[0] != shape and not (head and _outputs(path, there[0], shape)):
            yield f"{show_path(path)} has another size than the stored one; rules.pad or rules.cut may be meant"
            return
        near = [one for one in unused.get(bare(path)[-1], ()) if len(_other_axes(one, shape)) == 1]
        if there is None and len(shape) > 1 and near and not head:
            yield f"{show_path(path)} differs from a stored leaf that is not used on one axis alone"
            return


def _other_axes(stored: tuple[int, ...], target: tuple[int, ...]) -> list[int]:
    """Return the axes on which two shapes differ; all axes if their ranks differ."""
    if len(stored) != len(target):
        return list(range(max(len(stored), len(target))))
    return [axis for axis, (one, other) in enumerate(zip(stored, target, strict=True)) if one != other]


def _outputs(path: Path, stored: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether two shapes differ in the number of outputs alone: the last axis, or the first of a ``weight``."""
    if len(stored) != len(target):
        return False
    own = [0, len(target) - 1] if bare(path)[-1] in ("weight", "w") else [len(target) - 1]
    return _other_axes(stored, target) in [[axis] for axis in own]


def _is_head(path: Path, outcome: Outcome) -> bool:
    """Return whether this is the last layer of a model, by its name or by the number that Flax gave it."""
    layer = bare(path)[:-1]
    if not layer or words(layer[-1]) & _VOCABULARIES:
        return False
    return bool(words(layer[-1]) & _HEADS) or (numbered(layer[-1]) is not None and _is_last(layer, outcome))


def _is_last(layer: Path, outcome: Outcome) -> bool:
    """Return whether every numbered name on the path has the highest number of its row, in both trees."""
    for place, name in enumerate(layer):
        found = numbered(name)
        if found is None:
            continue
        for paths in (outcome.goal, outcome.stored):
            row = (numbered(path[place]) for path in paths if len(path) > place and path[:place] == layer[:place])
            if any(other is not None and other[0] == found[0] and other[1] > found[1] for other in row):
                return False
    return True


def _parts(outcome: Outcome, fresh: dict[Path, Look], idle: dict[Path, Look]) -> Iterator[str]:
    """Layers of which a part is taken and a part is not, while the stored one has more than is taken."""
    sources: dict[Path, set[Path]] = {}
    for new, old in outcome.pairs.items():
        sources.setdefault(bare(new)[:-1], set()).add(bare(old)[:-1])
    left = {bare(path)[:-1] for path, seen in idle.items() if seen[0]}
    for path, seen in fresh.items():
        layer = bare(path)[:-1]
        halved = sources.get(layer, set())
        if seen[0] and len(layer) > 1 and halved & left:
            yield f"only a part of {show_path(layer)} would come from the checkpoint, which has more of it"
            return
        if path in outcome.stored and layer and numbered(layer[-1]) and halved:
            yield f"{show_path(layer)} has the number of a stored layer of other shapes, and may be another one"
            return


def _may_be_number(path: Path, idle: dict[Path, Look]) -> bool:
    """Return whether a number of the target may be an unused stored one: both at the top, both below, or alike."""
    path = bare(path)
    return any(
        not seen[0] and ((len(path) == 1) == (len(bare(other)) == 1) or akin(path[-1], bare(other)[-1]))
        for other, seen in idle.items()
    )


def _copies(outcome: Outcome, fresh: dict[Path, Look]) -> Iterator[str]:
    """Yield a doubt for a new collection that looks like a copy of another, such as averaged parameters."""
    tops: dict[str, dict[Path, Look]] = {}
    for path, seen in outcome.goal.items():
        tops.setdefault(path[0], {})[path[1:]] = seen
    for name, leaves in tops.items():
        if len(leaves) > 1 and all((name, *path) in fresh for path in leaves):
            for other, others in tops.items():
                if other != name and leaves == others:
                    yield f"{name} looks like a copy of {other}, which from_target does not make"
                    return
