"""Propose rules when a checkpoint lacks leaves of a target, from names, shapes, dtypes and structure alone.

What speaks against a proposal is told by what its rules do: values left unused, layers that may be others, restarts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.text_formatting import printable
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, joined, map_leaves, node_at, show_path
from flax_ckpt_compat._suggest import differences, features, layouts, proposals
from flax_ckpt_compat._suggest.features import EMPTY, MOMENTS, Look, Roles, bare, core, look, natural, unnumbered
from flax_ckpt_compat._suggest.layouts import ProposedRule
from flax_ckpt_compat._suggest.proposals import Pairing
from flax_ckpt_compat._trees.leaf_sources import Derived, handles_of
from flax_ckpt_compat.rules import Rule

__all__ = ["ProposedRule", "Suggestion", "suggest"]
_MANY = 5000  # missing leaves, above which one way less is tried
_COUNTS = frozenset(("count", "gradient_step", "step"))
_Pair = tuple[Path, Path]  # stored, of the target
# Renamed modules, or single leaves, with the names and looks of their leaves; the name of a single leaf is empty.
_Layers = dict[_Pair, set[tuple[str, Look]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """Rules that make a checkpoint fit a target; prints as Python to paste.

    Attributes:
        steps: in the order in which they apply.
        remaining: key paths, joined with ``/``, of what a restore with them still refuses: leaves of the target that
            are missing, or of another kind or shape; stored ones that the target lacks.
        doubts: what speaks against the steps, a sentence each.
    """

    steps: tuple[ProposedRule, ...]
    remaining: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def confident(self) -> bool:
        """Return whether the rules restore the target without an error, and nothing speaks against them."""
        return not (self.doubts or self.remaining or any(step.keeps for step in self.steps))

    @property
    def rules(self) -> list[Rule]:
        """Return the rules for ``transforms``, or ``orbax_transforms``, without those that print as comments."""
        return [step.rule for step in self.steps if not step.keeps]

    @property
    def is_about_layout(self) -> bool:
        """Return whether nothing is missing, and all that is uncertain is in which order values lie in an array."""
        own = {printable(step.doubt, one_line=True) for step in self.steps if step.doubt}
        return bool(self.doubts) and not self.remaining and own >= set(self.doubts)

    def __str__(self) -> str:
        lines = ["from flax_ckpt_compat import rules", "", "transforms = ["]
        for step in self.steps:
            # A name with a line break must not become a line of Python.
            reason = printable(step.reason, one_line=True)
            # What keeps values must not, pasted as it is, leave stored ones behind.
            mark = "# " if step.keeps else ""
            lines.append(f"    {mark}{step.rule},  # {reason}")
        return "\n".join([*lines, "]"])


@memory.pause_gc()
def suggest(stored: Node, target: Node, refused: Callable[[Node], Sequence[Path]] = lambda _: ()) -> Suggestion | None:
    """Propose steps from a checkpoint to a target that lacks leaves in it, or has them in other shapes; or None.

    ``target`` is a tree of `flax_ckpt_compat._trees.state_dict.describe`. No array data is read. ``refused`` returns
    what a restore of the tree refuses that steps without a doubt have made."""
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return None
    # Formats keep names in different orders, and what is proposed must not depend on it.
    stored, target = _in_order(stored), _in_order(target)
    pairing = proposals.Pairing(target)
    first = pairing.start(stored)
    lacking = len(pairing.missing(first))
    if not lacking:  # raw PRNG keys, which fit typed ones, may be all that differs
        typed = proposals.typed_keys(pairing, first)
        return Suggestion(typed.steps, tuple(map(show_path, refused(typed.tree)))) if typed.steps else None
    for prelude in proposals.preludes(pairing, stored, first.looks):
        first = pairing.tried(first, [prelude]) or first
    if first.steps:  # what they name anew is judged by its new name, and shown by that of the checkpoint
        stored, first = first.tree, dataclasses.replace(first, tree=map_leaves(_here, first.tree))
    collections = proposals.collections(pairing, first)
    begun = [first, *filter(None, (pairing.tried(first, [step]) for step in collections))]
    rest = pairing.leftovers(first) if lacking <= _MANY else first
    if len(rest.fitting) > len(first.fitting):
        begun.insert(0, rest)
    found = [pairing.laid_out(pairing.paired(state)) for state in begun]
    most = max(1, *(len(state.fitting) for state in found))
    made = list[Suggestion]()
    for state in sorted(found, key=lambda one: len(one.steps)):
        # Fewer leaves found is no better way, however sure; nor are more steps than those of what is certain.
        if len(state.fitting) == most and all(one.doubts for one in made):
            state = proposals.finished(pairing, state)
            remaining = pairing.missing(state)
            steps, against = _judged(_Outcome(stored, first, pairing, state), remaining)
            sentences = tuple(printable(doubt, one_line=True) for doubt in against)
            if len(remaining) <= lacking / 2:
                one = Suggestion(steps, tuple(map(show_path, remaining)), sentences)
                left = tuple(map(show_path, refused(state.tree))) if one.confident else one.remaining
                made.append(dataclasses.replace(one, remaining=left))
    return min(made, key=lambda one: (len(one.remaining), len(one.doubts), len(one.steps)), default=None)


def _here(path: Path, leaf: Any) -> Any:
    """Return a leaf that is named after its place, wherever it was before rules that were given, or in its item."""
    if isinstance(leaf, Derived) and leaf.shape is not None and leaf.dtype is not None:
        return LeafHandle(path, LeafKind.ARRAY, leaf.shape, leaf.dtype, 0, joined(path), leaf.handles[0].reader, None)
    return dataclasses.replace(leaf, path=path) if isinstance(leaf, LeafHandle) and leaf.path != path else leaf


def _in_order(node: Node, path: Path = ()) -> Any:
    """Return the tree with all names in natural order, and stored leaves `_here`."""
    if not isinstance(node, Branch):
        return _here(path, node)
    children = {name: _in_order(node.children[name], (*path, name)) for name in natural(node.children)}
    return Branch(children, node.container, node.int_keys, node.type_name)


class _Outcome:
    """Effects of rules on a checkpoint: leaves that they use, move, keep initial or leave unused."""

    def __init__(self, stored: Node, first: differences.State, pairing: Pairing, state: differences.State):
        self.shown: Callable[[Path], Path] = lambda path: handles_of(node_at(stored, path))[0].path  # in the checkpoint
        self.steps, self.had, self.has = state.steps, first.roles, pairing.roles
        is_t5x = isinstance(node_at(stored, ("state", "param_states")), Branch)  # its parameters are in ``target``
        self.collections = {"params", "batch_stats", *(["target"] if is_t5x else ())}
        self.looks = {path: first.looks[path] for path, leaf in iter_leaves(first.tree) if isinstance(leaf, LeafHandle)}
        self.unused = dict(self.looks)
        self.kept: dict[Path, Look] = {}  # the target's leaves that stay as they are
        self.news: dict[Path, list[Path]] = {}  # stored path, or that of a stacked row → target paths of what it gives
        self.restored: dict[Path, Look] = {}
        for path, leaf in iter_leaves(state.tree):
            rows = {source.path: source for source in handles_of(leaf)} if path in state.fitting else {}
            if rows:
                self.restored[path] = pairing.goal[path]
            elif state.looks[path] == features.KEPT and pairing.goal.get(path, EMPTY) != EMPTY:
                self.kept[path] = pairing.goal[path]
            for old in rows:
                self.unused.pop(old, None)
            if len(rows) > 1 and len(set(map(unnumbered, rows))) == 1:  # those of a stack are one
                start, *_, end = rows
                pairs = zip(start, end, strict=True)
                rows = {tuple(name if name == other else unnumbered((name,))[0] for name, other in pairs): rows[start]}
            for old in rows if len(rows) == 1 else ():
                self.looks[old] = self.looks.get(old) or look(rows[old])
                self.news.setdefault(old, []).append(path)
        # Stored path → target path of what went elsewhere as a whole, or to one row: rules that divide or copy say so.
        whole = {old: one[0] for old, one in self.news.items() if len(one) == 1 or len(set(map(unnumbered, one))) == 1}
        self.moved = {old: new for old, new in whole.items() if old != new}


def _judged(outcome: _Outcome, lacking: Sequence[Path]) -> tuple[tuple[ProposedRule, ...], list[str]]:
    """Return the steps, and doubts about them; steps that keep values say what is unused instead."""
    if lacking:
        return outcome.steps, [f"{len(lacking)} leaves are still missing, such as {show_path(lacking[0])}"]
    layers, optimizers = _layers(outcome)
    judges = [_names(layers), _exchanged(layers), _exchanged(optimizers)]
    judges += [_unused(outcome), _optimizers(outcome), _begun(outcome)]
    own = dict.fromkeys(step.doubt for step in outcome.steps if step.doubt)
    # One doubt of each kind says enough.
    against = [*own, *itertools.chain.from_iterable(itertools.islice(judge, 1) for judge in judges)]
    return tuple(_with_unused(step, outcome) if step.keeps else step for step in outcome.steps), against


def _with_unused(step: ProposedRule, outcome: _Outcome) -> ProposedRule:
    """Return a step that keeps the target's values, with the unused stored values in its reason, likely ones first."""
    kept = [path for path in outcome.kept if any(path[: len(top)] == top for top in step.keeps)]
    is_optimizer = any(map(outcome.has.is_optimizer, kept))
    looks, ends = {outcome.kept[path] for path in kept}, {path[-1] for path in kept}
    idle = [path for path in outcome.unused if outcome.had.is_optimizer(path) == is_optimizer]
    idle.sort(key=lambda path: (outcome.unused[path] not in looks, path[-1] not in ends))
    unused = layouts.listed([outcome.shown(path) for path in idle])
    return dataclasses.replace(step, reason=f"{step.reason}; stored and unused: {unused}") if idle else step


def _unused(outcome: _Outcome) -> Iterator[str]:
    """Yield a doubt for unused arrays as large as a leaf that stays initial, or that a moved leaf may stand for."""
    initial = [(path, seen) for path, seen in outcome.kept.items() if not outcome.has.is_optimizer(path)]
    places: dict[Any, Path] = {(math.prod(shape), kind): path for path, (shape, kind) in reversed(initial)}
    for old, news in outcome.news.items():
        if news != [old]:
            places.setdefault((_partners(outcome.had, old), outcome.looks[old]), min(news, key=old.__eq__))
    for path, seen in outcome.unused.items():
        place = places.get((_partners(outcome.had, path), seen))
        if not outcome.had.is_optimizer(path):
            place = places.get((math.prod(seen[0]), seen[1])) or place
        if seen[0] and place is not None:
            yield f"{show_path(outcome.shown(path))} is not used, and is as large as {show_path(place)}"


def _partners(roles: Roles, path: Path) -> Any:
    """Return what leaves that may stand for each other share: the last name; of moments but averages field and row."""
    spot = roles.spot(path)
    return bare(path)[-1] if spot.field in ("", "ema") else (spot.field, unnumbered(spot.suffix))


def _layers(outcome: _Outcome) -> tuple[_Layers, _Layers]:
    """Return, in the order of old names, modules and leaves with others, modules that stay beside them, optimizers."""
    found: tuple[_Layers, _Layers] = {}, {}
    for old, new in natural(outcome.moved.items(), lambda pair: joined(pair[0])):
        ends = (outcome.had.root_of(old), outcome.has.root_of(new))
        is_optimizer, name = all(ends), joined(outcome.had.spot(old).suffix)
        if not is_optimizer:
            ours, theirs = (_named(path, outcome.collections) for path in (old, new))
            end = features.same_start(ours[::-1], theirs[::-1])
            ends, name = (ours[: len(ours) - end], theirs[: len(theirs) - end]), joined(ours[len(ours) - end :])
        if ends[0] != ends[1]:
            found[is_optimizer].setdefault(ends, set()).add((name, outcome.looks[old]))
    parents = {old[: features.same_start(old, new)] for old, new in found[False]}
    for path in itertools.filterfalse(outcome.moved.get, outcome.news):
        kept = _named(path, outcome.collections)
        for end in (end for end in range(1, len(kept)) if kept[: end - 1] in parents):
            found[False].setdefault((kept[:end], kept[:end]), set()).add((joined(kept[end:]), outcome.looks[path]))
    return found


def _named(path: Path, collections: Set[str]) -> Path:
    """Return a key path without collections and NNX's ``value``."""
    return tuple(name for name in bare(path) if name not in collections) or path


def _telling(layers: _Layers) -> _Layers:
    """Return the layers without those inside of a row that keeps its one number, whose ends say as much of names."""
    rows: dict[Any, list[_Pair]] = {}
    for pair, leaves in layers.items():
        old, new = map(features.numbers, pair)
        is_row = len(old) == 1 and old == new
        rows.setdefault((*map(unnumbered, pair), frozenset(leaves)) if is_row else pair, []).append(pair)
    ends = {pair for row in rows.values() for pair in (row[0], row[-1])}
    return {pair: leaves for pair, leaves in layers.items() if pair in ends}


def _names(layers: _Layers) -> Iterator[str]:
    """Yield a doubt for a layer whose names differ in meaning, and for torch's weight of which all sides are equal."""
    known = {name for pair in layers for path in pair for name in path}
    for (old, new), leaves in _telling(layers).items():
        ours, theirs = core(old, new)
        is_digit = any("".join(path).isdecimal() for path in (ours, theirs)) and _COUNTS.isdisjoint((*ours, *theirs))
        is_number = is_digit and any(name == "" and not shape for name, (shape, _) in leaves)
        if is_number or not features.may_be_one(ours, theirs, known, leaf=any(name == "" for name, _ in leaves)):
            yield f"{show_path(new)} would come from {show_path(old)}, a name that says something else"
    turned = [pair for pair in layers if all(pair) and features.is_torch_name(pair[0][-1], pair[1][-1])]
    shapes = [shape for pair in turned for _, (shape, _) in layers[pair] if len(shape) > 1]
    # In one model all lie alike, and those whose sides differ tell how.
    if shapes and all(features.turned(shape, shape) for shape in shapes):
        yield f"{show_path(turned[0][0])} may be transposed, as torch's weights are, which its shape does not tell"


def _exchanged(layers: _Layers) -> Iterator[str]:
    """Yield a doubt for two layers that change places or order, or that neither leaves nor names tell apart."""
    whole = dict.fromkeys(pair for old, new in layers for pair in ((old, new), (old[:-1], new[:-1])))
    for old, new in whole:
        if old != new and (new, old) in whole:
            yield f"{show_path(old)} and {show_path(new)} would change places, and may be transposed instead"
    groups: dict[Any, dict[_Pair, _Pair]] = {}
    for (old, new), leaves in _telling(layers).items():
        contents, is_kept = frozenset(leaves), old == new
        start = len(old) - 1 if is_kept else features.same_start(old, new)
        is_linen = not is_kept or features.BY_FLAX.fullmatch(old[-1]) is not None
        # Beside it, of equal contents: rows that it leaves and gets into (Haiku's first has no number), and linen's.
        rows = (*(joined(unnumbered(path[start:])).rstrip("_#") for path in (old, new)), is_linen)
        others = () if is_kept else (contents, (unnumbered(old), unnumbered(new)))
        for key in (*((old[:start], row, contents) for row in rows), *others):
            # One of each change: layers inside of one that is renamed go with it.
            groups.setdefault(key, {}).setdefault(core(old, new), (old, new))
    neighbours = (itertools.pairwise(group.values()) for group in groups.values())
    for one, other in dict.fromkeys(itertools.chain.from_iterable(neighbours)):
        if not features.told_apart(one, other):
            yield f"nothing says which of {show_path(one[0])} and {show_path(other[0])} goes where"


def _optimizers(outcome: _Outcome) -> Iterator[str]:
    """Yield a doubt for moments that become parameters, or the reverse, and for those that two optimizers get."""
    for old, news in outcome.news.items():
        for new in news:
            if outcome.has.is_optimizer(new) != outcome.had.is_optimizer(old) and outcome.looks[old][0]:
                yield f"{show_path(new)} would come from {show_path(old)}, which is an optimizer's"
        fields = [outcome.has.spot(path) for path in news]
        if len(set(fields)) < len(fields) and fields[0].field in MOMENTS:
            yield f"{show_path(news[0])} and {show_path(news[1])} would both come from {show_path(old)}"


def _begun(outcome: _Outcome) -> Iterator[str]:
    """Yield a doubt if a count begins anew although moments do not, a moment, or a layer although others do not."""
    fields = {outcome.has.spot(path).field for path in outcome.restored if outcome.has.is_optimizer(path)}
    others = [bare(path) for path in outcome.restored if not outcome.has.is_optimizer(path)]
    trained = {path[start:] for path in others for start in range(len(path))}
    rows = {(unnumbered(path), seen) for path, seen in outcome.restored.items()}
    for path, seen in outcome.kept.items():
        spot = outcome.has.spot(path)
        if (fields and spot.field in _COUNTS) or (spot.field in fields & MOMENTS and spot.suffix in trained):
            yield f"{show_path(path)} would begin anew, although what belongs to it does not"
        if not spot.field and len(seen[0]) > 1 and (unnumbered(path), seen) in rows:
            yield f"nothing says whether {show_path(path)} is the layer that is new, or another one of its row"
