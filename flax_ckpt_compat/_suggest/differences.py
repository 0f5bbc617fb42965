"""Find changes: children of two branches that differ (rows, stacks, levels, renames), and what is left over in the end.

What is left over matches by the names inside of it and by shapes; of several, those of a row match by the numbers in
their names, and then the only one below the same names, or with a word in common."""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

import numpy as np

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, joined, node_at, show_path, topmost
from flax_ckpt_compat._suggest import features, layouts
from flax_ckpt_compat._suggest.features import EMPTY, KEPT, Roles, SubtreeMemo, akin, fits, look, natural, unnumbered
from flax_ckpt_compat._suggest.layouts import LayerRow, ProposedRule, all_but, numbers_of, plain
from flax_ckpt_compat._trees.leaf_sources import is_array

_MAX_PAIRS, _MAX_STACKS = 900, 12
_ROWS = (2, 3)  # numbers of rows that may be arrays with names of their own: gate and up, key and value
# Rows of stored nodes that are compared with one of the target's, and rows of the target: more are no evidence for any.
_MAX_LIKELY, _MAX_ROWS = 16, 300
_NO_WORDS = frozenset(string.ascii_lowercase) - features.LETTERS.keys() - {"w", "b"}  # as in ``c_fc`` and ``c_proj``
Looks = Mapping[Path, features.Look]
Pair = tuple[Path, Path]  # stored, of the target


@dataclasses.dataclass(slots=True)
class State:
    """A checkpoint's tree after some steps."""

    tree: Node  # of handles and what the rules made of them
    looks: dict[Path, features.Look]  # of its leaves
    steps: tuple[ProposedRule, ...]
    fitting: Set[Path]  # the target's leaves that are found with their shape
    roles: Roles


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Children with new names in the target."""

    path: Path  # of their branch, in both trees
    old: tuple[str, ...]
    new: tuple[str, ...]
    patterns: dict[str, str]  # for the old names → replacements
    reason: str


def torn(stored: Node, target: Node, memo: SubtreeMemo, *, at_root: bool) -> bool:
    """Return whether the nodes of one name have no leaf in common."""
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return isinstance(stored, Branch) or isinstance(target, Branch) or not fits(look(stored), look(target))
    one, other = memo.contents(stored), memo.contents(target)
    if not one or not other:
        return bool(one or other)
    modules = [any(isinstance(child, Branch) for child in node.children.values()) for node in (stored, target)]
    # Collections keep their names, whatever becomes of the model.
    return not (at_root and all(modules)) and not one & other


class Gap:
    """Two paired branches, with their removed and added children."""

    def __init__(self, path: Path, stored: Branch, target: Branch, memo: SubtreeMemo):
        self.path, self.memo = path, memo
        # Before a name: everywhere, or only below the name of this branch, where layers of other branches stay apart.
        self.heads = ("", *(f"{last}/" for last in path[-1:]))
        self.ours, self.theirs = stored.children, target.children
        both = self.ours.keys() & self.theirs.keys()
        same = {name for name in both if not torn(self.ours[name], self.theirs[name], memo, at_root=not path)}
        one, other = ({name: memo.print(node) for name, node in side.items()} for side in (self.ours, self.theirs))
        # Of the children that are not as they were: a tower is none that moved because another one is like it.
        self.prints = [{a[name] for name in a if a[name] != b.get(name)} for a, b in ((one, other), (other, one))]
        if path:  # layers that share a bias alone are others where each of the two has another name
            crossed = {name for name in same if one[name] != other[name] and other[name] in self.prints[0]}
            same -= {name for name in crossed if one[name] in self.prints[1]}
        self.common = len(same)
        self.gone = {name: node for name, node in self.ours.items() if name not in same and memo.contents(node)}
        self.new = {name: node for name, node in self.theirs.items() if name not in same and memo.contents(node)}

    def others(self) -> Iterator[list[ProposedRule] | Change]:
        """Yield the changes of the children outside rows: stacks, a level, renames."""
        if self.gone or self.new:
            yield from self._stacks()
            yield from self._named_rows()
            yield from self._levels()
            for old, new in self._aligned():
                shared = self.memo.contents(self.ours[old]) & self.memo.contents(self.theirs[new])
                yield Change(self.path, (old,), (new,), {literal(old): plain(new)}, in_words(shared))

    def _take(self, old: Iterable[str], new: Iterable[str], *, turned: bool = False) -> None:
        """Count children as paired: old ones with new ones, or, ``turned``, the other way round."""
        for name in new if turned else old:
            self.gone.pop(name, None)
        for name in old if turned else new:
            self.new.pop(name, None)

    def _open(self) -> tuple[list[LayerRow], list[LayerRow]]:
        """Return the rows of both branches that are not paired yet."""
        olds = [row for row in layouts.rows(self.ours) if self.gone.keys() & row.siblings]
        return olds, [row for row in layouts.rows(self.theirs) if self.new.keys() & row.siblings]

    def rows(self) -> Iterator[Change]:
        """Yield the changes between rows of the same layers; the number of layers may differ."""
        groups: dict[object, tuple[list[LayerRow], list[LayerRow]]] = {}
        for side, found in enumerate(self._open()):
            for row in found:
                prints = [self.memo.print(node) for node in row.nodes]
                key = bool(row.stem), *(prints[:1] if len(set(prints)) == 1 else prints)
                groups.setdefault(key, ([], []))[side].append(row)
        for olds, news in groups.values():
            named = [{row.stem: row for row in side} for side in (olds, news)]
            for one, other in ((named[0][old], named[1][new]) for old, new in features.pair_up(*map(list, named))):
                renamed_list = one.slash and other.slash and one.stem != other.stem
                # Fewer layers than are stored are not those that keep their names.
                whole = one.first == other.first and self.gone.keys() >= set(one.siblings)
                if not renamed_list and (len(one.nodes) == len(other.nodes) or whole):
                    self._take(one.siblings, other.siblings)
                    reason = f"both are {len(one.nodes)} equal layers"
                    patterns = {literal(old): plain(new) for old, new in zip(one.names, other.names, strict=False)}
                    if one.first == other.first:
                        patterns = {rf"{literal(one.stem)}{one.slash}(\d+)": rf"{plain(other.stem)}{other.slash}\1"}
                    yield Change(self.path, tuple(one.siblings), tuple(other.siblings), patterns, reason)

    def _stacks(self) -> Iterator[list[ProposedRule]]:
        """Yield the rules between a row and its stack, or stacks of every n-th layer each, here or one level below."""
        for found, others, stacking in zip(self._open(), (self.new, self.gone), (True, False), strict=True):
            inner = [(name, child.children) for name, child in others.items() if found and isinstance(child, Branch)]
            below = {f"{name}/{one}": node for name, children in inner for one, node in children.items()}
            shorts = [row for row in layouts.rows({**others, **below}) if len(row.nodes) <= _MAX_STACKS]
            wholes: dict[tuple[str, ...], Node] = {(name,): node for name, node in others.items() if found}
            wholes |= {tuple(row.names): row.nodes[0] for row in filter(self._is_even, shorts)}
            likely: dict[object, list[tuple[str, ...]]] = {}  # stacks by the sizes of their layers
            for names, node in wholes.items():
                for size in layouts.sizes(self.memo.contents(node), len(names)):
                    likely.setdefault(size, []).append(names)
            known: dict[object, dict[tuple[str, ...], tuple[int, str]]] = {}  # by a row's contents and number
            for row in filter(self._is_even, found):
                layer, count = self.memo.contents(row.nodes[0]), len(row.nodes)
                kind = self.memo.print(row.nodes[0]), count
                if kind not in known:
                    sizes = sorted(layouts.sizes(layer, count))
                    near = dict.fromkeys(names for size in sizes for names in likely.get(size, ()))
                    axes = {
                        names: layouts.axis_of(count // len(names), layer, self.memo.contents(wholes[names]))
                        for names in near
                        if count > len(names) and count % len(names) == 0
                    }
                    known[kind] = {names: axis for names, axis in axes.items() if axis}
                tops = {names: {one.partition("/")[0] for one in names} for names in known[kind]}
                if able := [names for names in tops if others.keys() >= tops[names]]:
                    names = max(able, key=lambda one: (len(one) == 1, one[0] == row.stem, akin(one[0], row.stem)))
                    self._take(row.siblings, tops[names], turned=not stacking)
                    yield from self._stacked(row, names, *known[kind][names], stacking=stacking)

    def _is_even(self, row: LayerRow) -> bool:
        """Return whether all layers of a row have the same contents."""
        return len(set(map(self.memo.print, row.nodes))) == 1

    def _stacked(
        self, row: LayerRow, names: Sequence[str], axis: int, doubt: str, *, stacking: bool
    ) -> Iterator[list[ProposedRule]]:
        """Yield the rules between a row and stacks, below the name of this branch alone or everywhere."""
        count, every, first = len(row.nodes), len(names), row.first
        reason = f"{names[0]} has an axis of {count // every}, there are {count} {row.stem}…"
        stacks, places = {f"{row.stem}{row.slash}": names[0]}, dict[str, str]()
        if every > 1:
            doubt = f"the shapes do not tell whether {names[0]} holds one layer in {every} or neighbours"
            places = {name: f"{names[number % every]}/{number // every}" for number, name in enumerate(row.names)}
            stacks, first = {f"{name}/": name for name in names}, 0
        for above in self.heads:
            yield layouts.stacked(above, places, stacks, (reason, doubt), stacking=stacking, axis=axis, first=first)

    def _named_rows(self) -> Iterator[list[ProposedRule]]:
        """Yield the rules for an array of which the other side has each row under a name of its own."""
        sides: tuple[dict[features.Look, list[str]], ...] = ({}, {})  # single arrays by their looks
        for side, children in zip(sides, (self.gone, self.new), strict=True):
            for name in natural(children):
                is_single = self.memo.contents(children[name], name).total() == 1
                for path, seen in features.flatten(children[name]).items() if is_single else ():
                    side.setdefault(seen, []).append(joined((name, *path)))
        for ones, others, stacking in ((sides[1], sides[0], True), (sides[0], sides[1], False)):
            for (shape, kind), (name, *more) in ones.items():
                row = (shape[1:], kind)
                names = others.get(row, [])
                is_row = len(shape) > 1 and shape[0] == len(names) and len(names) in _ROWS and "/" not in name
                # An array that is there as a whole, or rows that both sides have, say otherwise.
                if is_row and not more and (shape, kind) not in others and row not in ones:
                    self._take([one.partition("/")[0] for one in names], [name], turned=not stacking)
                    places = {one: f"{name}_{number}" for number, one in enumerate(names)}
                    why = (
                        f"they are as large as the {len(names)} rows of {name}",
                        f"nothing says which of {', '.join(names)} is the first row of {name}",
                    )
                    for above in self.heads:
                        yield layouts.stacked(above, places, {f"{name}_": name}, why, stacking=stacking)

    def _levels(self) -> Iterator[Change]:
        """Yield an added or removed level, and count its children as paired."""
        for children, others, is_new in ((self.gone, self.new, True), (self.new, self.gone, False)):
            prints = set(map(self.memo.print, children.values()))
            for name, whole in list(others.items()) if len(children) > 1 or self.path else ():
                level, inner, held = list[str](), {name: whole}, list[str]()
                while not held and len(inner) == 1 and isinstance(node := next(iter(inner.values())), Branch):
                    level, inner = [*level, *inner], node.children
                    both = [one for one in inner if one in children]
                    held = [one for one in both if not torn(children[one], inner[one], self.memo, at_root=False)]
                # What holds the same as a child is that child itself, unless it holds the only child by its name.
                same = self.memo.print(whole) in prints
                only = len(children) == 1 and children.keys() == inner.keys()
                own = not self.path and not features.MOMENTS.isdisjoint(level)  # an optimizer's state
                if held and (only or not same) and not own and "/" not in "".join(level):
                    place = show_path(self.path) if self.path else "the whole tree"
                    reason = f"{'/'.join(level)} holds what {place} holds: {', '.join(held[:4])}"
                    olds, news, patterns = [name], list(inner), {literal("/".join(level)): ""}
                    if is_new:
                        # A level that lacks nothing takes no more where another new name may have the rest.
                        is_whole = len(others) > 1 and len(inner) == len(held)
                        olds, news = (held if self.common or is_whole else list(children)), [name]
                        patterns = {f"({all_but(olds, self.ours)})": rf"{plain('/'.join(level))}/\1"}
                    yield Change(self.path, tuple(olds), tuple(news), patterns, reason)
                    self._take(list(children), [name], turned=not is_new)
                    return

    def _aligned(self) -> list[tuple[str, str]]:
        """Return the pairs of old and new names: equal contents first, then the most similar."""
        pairs: list[tuple[str, str]] = []
        for print_of in (self.memo.named, self.memo.print):
            groups: dict[object, tuple[list[str], list[str]]] = {}
            done = {(name, side) for pair in pairs for side, name in enumerate(pair)}
            for side, children in enumerate((self.gone, self.new)):
                for name, node in children.items():
                    if (name, side) not in done:
                        groups.setdefault(print_of(node), ([], []))[side].append(name)
            pairs += [pair for olds, news in groups.values() for pair in features.pair_up(olds, news)]
        pairs = [(old, new) for old, new in pairs if self.memo.has_arrays(self.gone[old]) or akin(old, new)]
        olds = [name for name in self.gone.keys() - dict(pairs).keys() if self.memo.has_arrays(self.gone[name])]
        news = list(self.new.keys() - {new for _, new in pairs})
        shares = {}
        for old, new in itertools.product(sorted(olds), sorted(news)) if len(olds) * len(news) <= _MAX_PAIRS else ():
            ours, theirs = self.gone[old], self.new[new]
            one, other = self.memo.contents(ours), self.memo.contents(theirs)
            shared = (one & other).total()
            # Torch's weight that became a kernel is transposed.
            is_turned = features.is_torch_name(old, new) and features.turned(look(ours)[0], look(theirs)[0])
            if shared or is_turned:
                shares[old, new] = shared / (one | other).total()
        for old, new in sorted(shares, key=lambda one: (-shares[one], one[0] != one[1], not akin(*one))):
            if old in olds and new in news:
                pairs.append((old, new))
                olds.remove(old)
                news.remove(new)
        return [(old, new) for old, new in pairs if old != new and "/" not in old + new]


def in_words(shared: features.Contents) -> str:
    """Return that two nodes have some contents in common."""
    leaves = {name: f"{name} {shape}".strip() for name, (shape, _) in sorted(shared)}
    is_short = 0 < len(leaves) == shared.total() <= 3
    return "both hold " + (" and ".join(leaves.values()) if is_short else f"the same {shared.total()} leaves")


class _Matcher:
    """Unused stored nodes by what they are like, and those of them that have a place in the target."""

    def __init__(self, state: State, free: set[Path], target: Node, memo: SubtreeMemo):
        self.tree, self.target, self.memo = state.tree, target, memo
        self.pairs: dict[Path, Path] = {}  # by stored path
        self.by_print: dict[int, list[Path]] = {}
        self.rows: dict[Path, dict[Path, Path]] = {}  # by names without numbers, and by the numbers
        self.prints: dict[Path, int] = {}
        leaves = [path for path, seen in state.looks.items() if seen != EMPTY]
        held = {path[:end] for path in leaves if path not in free for end in range(len(path) + 1)}
        for path in dict.fromkeys(leaf[:end] for leaf in leaves for end in range(1, len(leaf) + 1)):
            self.rows.setdefault(unnumbered(path), {})[features.numbers(path)] = path
            leaf = node_at(self.tree, path)
            self.prints[path] = memo.named(leaf)
            if path in held:
                continue
            self.by_print.setdefault(self.prints[path], []).append(path)
            # A raw key may become a typed one.
            if is_array(leaf) and leaf.dtype == np.uint32 and leaf.shape[-1:] == (2,):
                self.by_print.setdefault(hash((leaf.shape[:-1], "key")), []).append(path)

    def match(self, wanted: set[Path]) -> None:
        """Pair nodes of the target that consist of wanted leaves: those of unique contents, then rows."""
        units: dict[int, list[Path]] = {}
        for path in topmost(self.target, wanted):
            for unit, number in self._units(path, node_at(self.target, path)):
                units.setdefault(number, []).append(unit)
        groups: dict[Path, list[tuple[Path, int]]] = {}
        for number, news in units.items():
            olds = self.by_print[number]
            if not (len(news) == len(olds) == 1 and self._take([(olds[0], news[0])])):
                for new in news:
                    groups.setdefault(unnumbered(new), []).append((new, number))
        likely = {one: list(dict.fromkeys(map(unnumbered, self.by_print[one])))[:_MAX_LIKELY] for one in units}
        for row in groups.values() if len(groups) <= _MAX_ROWS else ():
            found = [pairs for like in likely[row[0][1]] if (pairs := self._row(self.rows[like], dict(row)))]
            found = [pairs for pairs in found if not any(old in self.pairs for old, _ in pairs)]
            near = [_nearness(*pairs[0]) for pairs in found]
            found = [pairs for pairs, one in zip(found, near, strict=True) if one == max(near)]
            if len(found) == 1:
                self._take(found[0])

    def _units(self, path: Path, node: Node) -> Iterator[tuple[Path, int]]:
        """Yield the largest nodes at or below a path of the target that have their like, with their prints."""
        if (number := self.memo.named(node)) in self.by_print:
            yield path, number
        elif isinstance(node, Branch):
            for name, child in node.children.items():
                yield from self._units((*path, name), child)

    def _row(self, olds: Mapping[Path, Path], news: Mapping[Path, int]) -> list[Pair]:
        """Pair nodes of the target with those of a stored row, by their numbers or else in order, if all are alike."""
        same = [olds.get(features.numbers(new)) for new in news]
        in_order = (natural(side, joined) for side in (olds.values(), news))
        for left, right in ((same, list(news)), in_order):
            pairs = [(old, new) for old, new in zip(left, right, strict=False) if old is not None]
            if len(pairs) == len(left) == len(right) and all(self.prints[old] == news[new] for old, new in pairs):
                return pairs
        return []

    def _take(self, row: list[Pair]) -> bool:
        """Add pairs of nodes of which none lies in another one, if their names do not speak against it."""
        olds = {old for old, _ in row}
        is_inside = any(old[:end] in self.pairs for old in olds for end in range(len(old)))
        if is_inside or any(other[: len(old)] == old for old in olds for other in self.pairs):
            return False
        if not all(self._may_be(old, new) for old, new in row):
            return False
        self.pairs.update(row)
        return True

    def _may_be(self, old: Path, new: Path) -> bool:
        """Return whether a node may have another name: not only another number, not that of a copy."""
        if unnumbered(old) == unnumbered(new):
            return False  # the whole row may have other numbers
        # Alone at the top, ``target`` holds the parameters, as in T5X.
        ours, theirs = (features.copy_words(path if path != ("target",) else ()) for path in (old, new))
        if ours != theirs or isinstance(node_at(self.tree, old), Branch):
            return ours == theirs
        if old[-1] != new[-1]:
            return _nearness(old, new)[1] > 0
        # Layers that both trees have are rather transposed than that their weights change places.
        homes = (node_at(self.tree, new[:-1]), node_at(self.target, old[:-1]))
        return len(old) != len(new) or not all(isinstance(home, Branch) for home in homes)


def leftovers(state: State, target: Node, goal: Looks, has: Roles, memo: SubtreeMemo) -> Iterator[Change]:
    """Yield the changes that take unused stored nodes to places where the target has none; not of optimizers."""
    looks, is_optimizer = state.looks.items(), state.roles.is_optimizer
    free = {path for path, seen in looks if seen not in (EMPTY, KEPT) and not is_optimizer(path)}
    wanted = {path for path in goal if not has.is_optimizer(path)}
    right = wanted & {*state.fitting, *(path for path, seen in looks if seen == KEPT)}
    if free - right and any(goal[path] != EMPTY for path in wanted - right):
        stored = _Matcher(state, free - right, target, memo)
        stored.match(wanted - right)
        yield from _changes(stored.pairs.items(), stored, {path[:end] for path in right for end in range(len(path))})


def _nearness(old: Path, new: Path) -> tuple[int, int]:
    """Return how many names two key paths have in common, and how near the others are: not, alike, by so many words."""
    ours, theirs = map("_".join, features.core(old, new))
    words = akin(ours, theirs, _NO_WORDS) and 1 + len((features.words(ours) & features.words(theirs)) - _NO_WORDS)
    return len({*unnumbered(old)} & {*unnumbered(new)}), words


def _changes(pairs: Iterable[Pair], stored: _Matcher, held: Set[Path]) -> Iterator[Change]:
    """Yield the changes for pairs: those of a whole row are one, and no node of which leaves are in place moves."""
    groups: dict[tuple[Path, Path, Path], list[Pair]] = {}
    for old, new in pairs:
        start = min(features.same_start(old, new), len(old) - 1, len(new) - 1)
        before, after = old[start:], new[start:]
        while min(len(before), len(after)) > 1 and before[-1] == after[-1] and (*old[:start], *before[:-1]) not in held:
            before, after = before[:-1], after[:-1]
        groups.setdefault((old[:start], unnumbered(before), unnumbered(after)), []).append((before, after))
    for (path, like, _), group in groups.items():
        group = natural(dict.fromkeys(group), lambda pair: joined(pair[0]))
        patterns = {literal(joined(old)): plain(joined(new)) for old, new in group}
        ours, theirs = ([*map(features.numbers, side)] for side in zip(*group, strict=True))
        row = stored.rows[unnumbered((*path, *like))] if len(group) > 1 and ours == theirs else {}
        if len(group) == sum(old[: len(path)] == path for old in row.values()):
            parts = [plain(part) for part in re.split(r"\d+", joined(group[0][1]))]
            replacement = parts[0] + "".join(rf"\{number}{part}" for number, part in enumerate(parts[1:], 1))
            patterns = {numbers_of(group[0][0], r"(\d+)"): replacement}
        olds, news = (tuple(dict.fromkeys(one[0] for one in side)) for side in zip(*group, strict=True))
        reason = in_words(stored.memo.contents(node_at(stored.tree, (*path, *group[0][0]))))
        yield Change(path, olds, news, patterns, reason if len(group) == 1 else "no others of them are left over")


def copies(state: State, target: Node, lacking: Collection[Path], memo: SubtreeMemo) -> Iterator[ProposedRule]:
    """Yield a copy for each lacking part that is called a copy, such as ``ema_params``, and is like one stored node."""
    found: dict[int, list[Path]] = {}
    tops = [path for path in topmost(target, set(lacking)) if features.copy_words(path)]
    for path, branch in iter_branches(state.tree) if tops else ():
        if path and memo.has_arrays(branch) and not state.roles.is_optimizer(path):
            found.setdefault(memo.named(branch), []).append(path)
    for top in tops:
        olds = found.get(memo.named(node_at(target, top)), [])
        if len(olds) == 1:
            old, new = joined(olds[0]), joined(top)
            doubt = f"{new} is new, and would begin as a copy of {old}"
            yield ProposedRule(rules.copy(literal(old), plain(new)), "both have the same leaves", doubt)
