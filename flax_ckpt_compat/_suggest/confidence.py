"""Judge how certain a proposal is, by the source of each target leaf and not by how the proposal was found."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.module_names import numbered
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, joined, node_at, show_path, topmost
from flax_ckpt_compat._suggest import moved_layers
from flax_ckpt_compat._suggest.leaf_features import (
    EMPTY,
    KEPT,
    MOMENTS,
    Look,
    Roles,
    Spot,
    SubtreeMemo,
    bare,
    fits,
    flatten,
    is_t5x,
    leaves_at,
    look,
)
from flax_ckpt_compat._suggest.names import is_copy, share_a_word, unnumbered, words
from flax_ckpt_compat._suggest.stacked_layers import ProposedRule
from flax_ckpt_compat._suggest.torch_layouts import is_transposed
from flax_ckpt_compat._trees.leaf_sources import handles_of

# Layers of which the number of outputs is that of the classes, and belongs to the task.
_HEADS = frozenset(
    ("head", "heads", "classifier", "logits", "out", "output", "prediction", "predictor", "predictions", "score")
)
_VOCABULARIES = frozenset(("lm", "mlm", "vocab", "vocabulary", "token", "tokens", "embed", "embedding", "embedder"))
_TABLES = frozenset(("embed", "embedding", "embeddings", "table"))
_COUNTS = frozenset(("count", "gradient_step", "step"))


@dataclasses.dataclass
class Outcome:
    """Effect of a proposal."""

    pairs: dict[Path, Path]  # target path → path of the stored leaf it gets, or of the first one it is made of
    kept: dict[Path, Look]  # the target's leaves that stay as they are
    unused: dict[Path, Look]  # the stored leaves that nothing is made of
    stored: dict[Path, Look]
    goal: dict[Path, Look]
    had: Roles  # in the checkpoint
    has: Roles  # in the target
    other_shapes: dict[Path, LeafHandle]  # paths of kept leaves → what is stored for them, in another shape

    @functools.cached_property
    def last_numbers(self) -> dict[tuple[Path, str], int]:
        """Return the highest numbers of rows, by place and text before the number, in both trees."""
        found: dict[tuple[Path, str], int] = {}
        for path in itertools.chain(self.goal, self.stored):
            for place, name in enumerate(path):
                if row := numbered(name):
                    key = path[:place], row[0]
                    found[key] = max(found.get(key, 0), row[1])
        return found


def doubts(
    stored: Node, target: Node, tree: Node, steps: Sequence[ProposedRule], lacking: Sequence[Path], named: Node
) -> list[str]:
    """Return the doubts about the steps that produced ``tree`` and still lack leaves; none if certain.

    ``named`` is the tree before the target's own values were put in."""
    if lacking:
        return [f"{len(lacking)} leaves are still missing, such as {show_path(lacking[0])}"]
    outcome = _outcome(stored, target, tree, named)
    idle = {path: seen for path, seen in outcome.unused.items() if not outcome.had.is_optimizer(path)}
    fresh = {path: seen for path, seen in outcome.kept.items() if not outcome.has.is_optimizer(path)}
    own = {new: old for new, old in outcome.pairs.items() if not outcome.has.is_optimizer(new)}
    as_named, looks = _as_named(own, outcome, stored)
    judges = [
        *moved_layers.judges(as_named, looks, outcome.goal, idle, fresh),
        *(
            _same_size(fresh, idle),
            _resized(outcome, fresh),
            _copies(outcome, fresh, target),
            _foreign(outcome, fresh, idle),
            _untied(outcome, fresh),
        ),
        *(_exchanged(outcome), _apart(outcome), _twice(outcome), _dropped(outcome)),
    ]
    found = dict.fromkeys(step.doubt for step in steps if step.doubt)
    return [*found, *chain.from_iterable(islice(judge, 1) for judge in judges)]  # one doubt of each kind says enough


def _outcome(stored: Node, target: Node, tree: Node, named: Node) -> Outcome:
    """Return the source of each leaf after rules have produced ``tree`` from the checkpoint."""
    goal = flatten(target)
    result = Outcome({}, {}, unused(stored, tree, goal), flatten(stored), goal, Roles(stored), Roles(target), {})
    for path, leaf in leaves_at(tree):
        if goal.get(path, EMPTY) == EMPTY:
            continue
        if look(leaf) == KEPT:
            result.kept[path] = goal[path]
            if isinstance(there := node_at(named, path), LeafHandle):
                result.other_shapes[path] = there
        elif handles := handles_of(leaf):
            result.pairs[path] = handles[0].path
            if len(handles) > 1:  # the row, without the numbers in which two of its layers differ
                names = zip(handles[0].path, handles[1].path, strict=False)
                result.pairs[path] = tuple(one if one == other else one.rstrip("0123456789") for one, other in names)
                if unnumbered(handles[0].path) != unnumbered(handles[1].path):
                    result.pairs[path] = path  # several layers are joined, about which the rule has its own doubt
            result.stored.setdefault(result.pairs[path], look(handles[0]))
    # Likewise a layer that is divided into several, of other names than those of a row.
    parts: dict[Path, set[Path]] = {}
    for new, old in result.pairs.items():
        parts.setdefault(old, set()).add(unnumbered(new))
    divided = {old for old, news in parts.items() if len(news) > 1}
    for new, old in result.pairs.items():
        if old in divided and not result.has.is_optimizer(new) and look(node_at(tree, new)) != result.stored[old]:
            result.pairs[new] = new
            result.stored.setdefault(new, result.stored[old])
    return result


def _as_named(pairs: dict[Path, Path], outcome: Outcome, stored: Node) -> tuple[dict[Path, Path], dict[Path, Look]]:
    """Return the pairs and the stored looks with the names that stored leaves would have in a linen state.

    A name that holds a key path is that path, and T5X's ``target`` holds the parameters."""
    named: dict[Path, Path] = {}
    looks = dict(outcome.stored)
    from_t5x = is_t5x(stored)
    for new, old in pairs.items():
        in_target = from_t5x and old[:1] == ("target",) != new[:1]
        named[new] = ("params", *old[1:]) if in_target else old
        parts = _names_in(named[new])
        if len(old) != len(new) and new[:-1] in (parts[:-1], parts[1:-1]) and len(parts) > len(old):
            named[new] = (*new[:-1], parts[-1])
        looks[named[new]] = outcome.stored[old]
    return named, looks


def _names_in(path: Path) -> Path:
    """Return the names of a key path that names hold, joined with slashes, dots, or as Haiku does."""
    return tuple(joined(path).replace("/~/", "/").replace(".", "/").split("/"))


def unused(stored: Node, tree: Node, goal: dict[Path, Look]) -> dict[Path, Look]:
    """Map key paths to looks of the stored leaves that no leaf of the target uses."""
    wanted = (leaf for path, leaf in leaves_at(tree) if path in goal and fits(look(leaf), goal[path]))
    used = {id(handle) for leaf in wanted for handle in handles_of(leaf)}
    return {
        path: look(leaf) for path, leaf in leaves_at(stored) if isinstance(leaf, LeafHandle) and id(leaf) not in used
    }


def _foreign(outcome: Outcome, fresh: dict[Path, Look], idle: dict[Path, Look]) -> Iterator[str]:
    """Yield a doubt if arrays stay initial while stored ones are not used: one may be what became of the other."""
    resized = {handle.path for handle in outcome.other_shapes.values()}
    left = next((path for path, (shape, _) in idle.items() if shape and path not in resized), None)
    new = next((path for path, (shape, _) in fresh.items() if shape and path not in outcome.other_shapes), None)
    if left is not None and new is not None:
        yield f"{show_path(left)} is not used, and {show_path(new)} would stay as the target has it"


def _same_size(fresh: dict[Path, Look], idle: dict[Path, Look]) -> Iterator[str]:
    """Yield a doubt if an unused leaf has the shape of a new one, or as many elements in another layout."""
    sizes = {(math.prod(shape), kind): path for path, (shape, kind) in idle.items()}
    numbers = [bare(path) for path, (shape, _) in idle.items() if not shape]
    levels, names = {len(path) == 1 for path in numbers}, {path[-1:] for path in numbers}
    for path, (shape, kind) in fresh.items():
        other = sizes.get((math.prod(shape), kind)) if shape else None
        if other is not None and is_transposed(idle[other][0], shape):
            yield f"{show_path(path)} has, transposed, the shape of {show_path(other)}, which is not used"
        elif other is not None:
            yield f"{show_path(path)} has as many elements as {show_path(other)}, which is not used"
        if not shape and ((len(bare(path)) == 1) in levels or bare(path)[-1:] in names):
            yield f"{show_path(path)} may be a stored number that is not used"


def _resized(outcome: Outcome, fresh: dict[Path, Look]) -> Iterator[str]:
    """Yield a doubt if the checkpoint has a new leaf in another size; heads belong to the task."""
    for path, handle in outcome.other_shapes.items():
        there, shape = look(handle)[0], fresh.get(path, EMPTY)[0]
        if shape and there != shape and not _is_new_head(path, there, shape, outcome):
            yield f"{show_path(path)} has another size than the stored one; rules.pad or rules.cut may be meant"


def _untied(outcome: Outcome, fresh: dict[Path, Look]) -> Iterator[str]:
    """Yield a doubt if a new kernel has the shape of an embedding transposed: logits may have been made with that."""
    tables = {
        outcome.goal[new][0][::-1]: new
        for new in outcome.pairs
        if len(outcome.goal[new][0]) == 2 and words(bare(new)[-1]) & _TABLES and not outcome.has.is_optimizer(new)
    }
    for path, (shape, _) in fresh.items():
        table = tables.get(shape)
        if table is not None and shape[0] != shape[1] and path not in outcome.other_shapes:
            yield f"{show_path(path)} has the shape of {show_path(table)} transposed, and may begin as a copy of it"


def _exchanged(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt if a parameter becomes an optimizer's moment, or the other way round."""
    for new, old in outcome.pairs.items():
        is_moment, was_moment = outcome.has.spot(new).field in MOMENTS, outcome.had.spot(old).field in MOMENTS
        if is_moment != was_moment and (outcome.has.is_optimizer(new) or outcome.had.is_optimizer(old)):
            what = "a moment" if is_moment else "no moment"
            yield f"{show_path(new)} is {what}, unlike the stored {show_path(old)}"


def _axes(stored: tuple[int, ...], target: tuple[int, ...]) -> list[int]:
    """Return the axes on which two shapes differ; none if their ranks differ."""
    same_rank = len(stored) == len(target)
    return [axis for axis, size in enumerate(target) if size != stored[axis]] if same_rank else []


def _is_new_head(path: Path, stored: tuple[int, ...], target: tuple[int, ...], outcome: Outcome) -> bool:
    """Return whether a leaf is of a model's last layer, by its name or linen's number, with other outputs alone."""
    *layer, leaf = bare(path)
    outputs = {len(target) - 1} | ({0} if leaf in ("weight", "w") else set())
    if not layer or words(layer[-1]) & _VOCABULARIES or not outputs.issuperset(_axes(stored, target) or [-1]):
        return False
    if words(layer[-1]) & _HEADS:
        return True
    # It has the highest number of its row, in both trees, and is in no row of several modules: these are no heads.
    rows = [(place, found) for place, name in enumerate(layer) if (found := numbered(name))]
    last = outcome.last_numbers if numbered(layer[-1]) else {}
    alone = all(last.get((path[:place], stem), 0) <= 0 for place, (stem, _) in rows[:-1])
    return bool(last) and alone and all(last[path[:place], stem] <= number for place, (stem, number) in rows)


def _copies(outcome: Outcome, fresh: dict[Path, Look], target: Node) -> Iterator[str]:
    """Yield a doubt for a new subtree that looks like a copy of another, such as averaged parameters."""
    memo = SubtreeMemo()
    alike: dict[int, list[Path]] = {}
    for path, branch in iter_branches(target) if fresh else ():
        if path and not outcome.has.is_optimizer(path):
            alike.setdefault(memo.named(branch), []).append(path)
    for path in topmost(target, fresh.keys()):
        node = node_at(target, path)
        if not isinstance(node, Branch) or sum(memo.contents(node).values()) < 2:
            continue
        if is_copy(path[-1]):
            yield f"{show_path(path)} is called a copy, which from_target does not make"
        for other in alike[memo.named(node)]:
            if other != path and (_has_layers(node) or share_a_word(path[-1], other[-1])):
                yield f"{show_path(path)} looks like a copy of {show_path(other)}, which from_target does not make"


def _has_layers(node: Branch) -> bool:
    return any(isinstance(child, Branch) for child in node.children.values())


def _apart(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt if several moments of one name are stored for one parameter and cannot be told apart."""
    taken: dict[tuple[str, Path], list[tuple[Path, Path]]] = {}
    for new, old in outcome.pairs.items():
        field, suffix = outcome.had.spot(old)
        if field in MOMENTS or field == "count":
            taken.setdefault((field, suffix), []).append((old, new))
    # Counts go with the moments beside them, if these are of a parameter that no other optimizer has.
    sure = {_state(old, new) for group in taken.values() if len(group) == 1 for old, new in group if old[-1] != "count"}
    tops = {(old[0], new[0]) for new, old in outcome.pairs.items() if not outcome.has.is_optimizer(new)}
    for group in taken.values():
        for number, (old, new) in enumerate(group):
            for other_old, other_new in group[number + 1 :]:
                with_params = {(old[0], new[0]), (other_old[0], other_new[0])} <= tops and old[0] != other_old[0]
                if (with_params and (old[0], other_new[0]) not in tops) or (old, other_old) == (new, other_new):
                    continue
                if {(old[:-1], new[:-1]), (other_old[:-1], other_new[:-1])} <= sure:
                    continue
                # One below the other, as a count of the whole and one of a part.
                deeper_old, deeper_new = len(other_old) - len(old), len(other_new) - len(new)
                nested = deeper_old * deeper_new > 0
                if not moved_layers.told_apart((old, new), (other_old, other_new), nested=nested):
                    yield f"nothing tells {show_path(old)} and {show_path(other_old)} apart"
    for path in outcome.unused:
        spot = outcome.had.spot(path)
        for old, new in taken.get((spot.field, spot.suffix), ()) if spot.field in MOMENTS else ():
            if old != new:
                yield f"{show_path(path)} fits {show_path(new)} as well as {show_path(old)} does"


def _state(old: Path, new: Path) -> tuple[Path, Path]:
    """Return the paths of the optimizer's states that two moments belong to."""
    ends = [next((place for place, name in enumerate(path) if name in MOMENTS), len(path)) for path in (old, new)]
    return old[: ends[0]], new[: ends[1]]


def _twice(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt if a moment of two optimizers, for one parameter, comes from one that is stored."""
    first: dict[tuple[Path, Spot], Path] = {}
    for new, old in outcome.pairs.items():
        spot = outcome.has.spot(new)
        if spot.field in MOMENTS and (other := first.setdefault((old, spot), new)) != new:
            yield f"{show_path(other)} and {show_path(new)} would both come from {show_path(old)}"


def _dropped(outcome: Outcome) -> Iterator[str]:
    """Yield a doubt if moments that are stored start from zero, or counts do although their moments are restored."""
    if not outcome.kept:
        return
    idle = {_kind_of_moment(outcome.had.spot(path), seen) for path, seen in outcome.unused.items()}
    restored = any(outcome.has.is_optimizer(path) for path in outcome.pairs)
    fields = {outcome.has.spot(path).field for path in outcome.pairs if outcome.has.is_optimizer(path)} & MOMENTS
    trained = {path[start:] for path in outcome.pairs if not outcome.has.is_optimizer(path) for start in range(3)}
    for path, seen in outcome.kept.items():
        spot = outcome.has.spot(path)
        if restored and spot.field in _COUNTS:
            yield f"{show_path(path)} would begin anew, and so would a schedule that depends on it"
        if spot.field in fields and spot.suffix in trained:
            yield f"{show_path(path)} would begin anew although its parameter and other moments do not"
        if (spot.field in MOMENTS or spot.field == "count") and _kind_of_moment(spot, seen) in idle:
            yield f"{show_path(path)} would begin anew although the checkpoint has {spot.field} of it"


def _kind_of_moment(spot: Spot, seen: Look) -> tuple[str, Path, Look]:
    return spot.field, spot.suffix[-1:], seen
