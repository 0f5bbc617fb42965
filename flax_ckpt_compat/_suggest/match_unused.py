"""Match what is left over: nodes of the target without stored values with stored ones that it does not use.

Nodes match by the names inside of them and by shapes; of several, those of a row match by the numbers in their
names, and then the only one below the same names, or with a word in common."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, joined, node_at, topmost
from flax_ckpt_compat._suggest.differences import Change, in_words
from flax_ckpt_compat._suggest.layouts import ProposedRule, numbers_of, plain
from flax_ckpt_compat._suggest.leaf_features import EMPTY, KEPT, Look, Roles, SubtreeMemo, fits
from flax_ckpt_compat._suggest.names import COPIES, LETTERS, akin, core, natural, unnumbered, words
from flax_ckpt_compat._trees.leaf_sources import is_array

# Rows of stored nodes that are compared with one of the target's: more are no evidence for any.
_MAX_LIKELY = 16
_NUMBER = re.compile(r"\d+")
_NO_WORDS = frozenset(string.ascii_lowercase) - LETTERS.keys() - {"w", "b"}  # as in ``c_fc`` and ``c_proj``
Looks = Mapping[Path, Look]
Pair = tuple[Path, Path]  # stored, of the target


class _Matcher:
    """Unused stored nodes by what they are like, and those of them that have a place in the target."""

    def __init__(self, tree: Node, have: Looks, free: set[Path], target: Node, memo: SubtreeMemo):
        self.tree, self.target, self.memo = tree, target, memo
        self.pairs: dict[Path, Path] = {}  # by stored path
        self.by_print: dict[int, list[Path]] = {}
        self.rows: dict[Path, list[Path]] = {}
        total, mine = Counter[Path](), Counter[Path]()
        for path in (path for path, seen in have.items() if seen != EMPTY):
            above = [path[:end] for end in range(1, len(path) + 1)]
            total.update(above)
            mine.update(above if path in free else ())
        for path, count in total.items():
            self.rows.setdefault(unnumbered(path), []).append(path)
            if count != mine[path]:
                continue
            leaf = node_at(tree, path)
            self.by_print.setdefault(memo.named(leaf), []).append(path)
            # A raw key may become a typed one.
            if is_array(leaf) and leaf.dtype == np.uint32 and leaf.shape[-1:] == (2,):
                self.by_print.setdefault(hash((leaf.shape[:-1], "key")), []).append(path)

    def match(self, wanted: set[Path]) -> None:
        """Pair nodes of the target that consist of wanted leaves: those of unique contents, then rows."""
        units: dict[int, list[Path]] = {}
        for path in topmost(self.target, wanted):
            for unit, number in self._units(path):
                units.setdefault(number, []).append(unit)
        groups: dict[Path, list[tuple[Path, int]]] = {}
        for number, news in units.items():
            olds = self.by_print[number]
            if not (len(news) == len(olds) == 1 and self._take([(olds[0], news[0])])):
                for new in news:
                    groups.setdefault(unnumbered(new), []).append((new, number))
        for row in groups.values():
            likely = list(dict.fromkeys(map(unnumbered, self.by_print[row[0][1]])))[:_MAX_LIKELY]
            found = [pairs for like in likely if (pairs := self._row(self.rows[like], dict(row)))]
            found = [pairs for pairs in found if not any(old in self.pairs for old, _ in pairs)]
            near = [_nearness(*pairs[0]) for pairs in found]
            found = [pairs for pairs, one in zip(found, near, strict=True) if one == max(near)]
            if len(found) == 1:
                self._take(found[0])

    def _units(self, path: Path) -> Iterator[tuple[Path, int]]:
        """Yield the largest nodes at or below a path of the target that have their like, with their prints."""
        node = node_at(self.target, path)
        if (number := self.memo.named(node)) in self.by_print:
            yield path, number
        elif isinstance(node, Branch):
            for name in node.children:
                yield from self._units((*path, name))

    def _row(self, olds: list[Path], news: Mapping[Path, int]) -> list[Pair]:
        """Pair nodes of the target with those of a stored row, by their numbers or else in order, if all are alike."""
        by_number = {tuple(_NUMBER.findall(joined(old))): old for old in olds}
        same = [by_number.get(tuple(_NUMBER.findall(joined(new)))) for new in news]
        keys = {joined(path): path for path in (*olds, *news)}
        in_order = [[keys[name] for name in natural(map(joined, side))] for side in (olds, news)]
        for left, right in ((same, list(news)), in_order):
            pairs = [(old, new) for old, new in zip(left, right, strict=False) if old is not None]
            prints = [self.memo.named(node_at(self.tree, old)) for old, _ in pairs]
            if len(pairs) == len(left) == len(right) and prints == [news[new] for _, new in pairs]:
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
        ours, theirs = ({word for name in path for word in words(name)} & COPIES for path in (old, new))
        if ours != theirs or isinstance(node_at(self.tree, old), Branch):
            return ours == theirs
        if old[-1] != new[-1]:
            return _nearness(old, new)[1]
        # Layers that both trees have are rather transposed than that their weights change places.
        homes = (node_at(self.tree, new[:-1]), node_at(self.target, old[:-1]))
        return len(old) != len(new) or not all(isinstance(home, Branch) for home in homes)


def changes(tree: Node, have: Looks, target: Node, goal: Looks, memo: SubtreeMemo) -> Iterator[Change]:
    """Yield the changes that take unused stored nodes to places where the target has none; not of optimizers."""
    had, has = Roles(tree), Roles(target)
    free = {path for path, seen in have.items() if seen not in (EMPTY, KEPT) and not had.is_optimizer(path)}
    wanted = {path for path in goal if not has.is_optimizer(path)}
    right = {path for path in wanted & have.keys() if goal[path] != EMPTY and fits(have[path], goal[path])}
    if free - right and any(goal[path] != EMPTY for path in wanted - right):
        stored = _Matcher(tree, have, free - right, target, memo)
        stored.match(wanted - right)
        yield from _changes(stored.pairs.items(), stored)


def _nearness(old: Path, new: Path) -> tuple[int, bool]:
    """Return how many names two key paths have in common, and whether the others have a word in common."""
    ours, theirs = core(old, new)
    return len({*unnumbered(old)} & {*unnumbered(new)}), akin("_".join(ours), "_".join(theirs), _NO_WORDS)


def _changes(pairs: Iterable[Pair], stored: _Matcher) -> Iterator[Change]:
    """Yield the changes for pairs: those of a whole row are one."""
    groups: dict[tuple[Path, Path, Path], list[Pair]] = {}
    for old, new in pairs:
        start = next((n for n, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), None)
        start = min(len(old), len(new)) - 1 if start is None else min(start, len(old) - 1, len(new) - 1)
        before, after = old[start:], new[start:]
        while len(before) > 1 and len(after) > 1 and before[-1] == after[-1]:
            before, after = before[:-1], after[:-1]
        groups.setdefault((old[:start], unnumbered(before), unnumbered(after)), []).append((before, after))
    for (path, like, _), group in groups.items():
        by_name = {joined(pair[0]): pair for pair in group}
        group = [by_name[name] for name in natural(by_name)]
        patterns = {literal(joined(old)): plain(joined(new)) for old, new in group}
        numbers = [[_NUMBER.findall(joined(one)) for one in pair] for pair in group]
        row = [old for old in stored.rows[unnumbered((*path, *like))] if old[: len(path)] == path]
        if len(group) > 1 and len(row) == len(group) and all(one == other for one, other in numbers):
            parts = [plain(part) for part in _NUMBER.split(joined(group[0][1]))]
            replacement = parts[0] + "".join(rf"\{number}{part}" for number, part in enumerate(parts[1:], 1))
            patterns = {numbers_of(group[0][0], r"(\d+)"): replacement}
        olds, news = (tuple(dict.fromkeys(one[0] for one in side)) for side in zip(*group, strict=True))
        reason = in_words(node_at(stored.tree, (*path, *group[0][0])))
        yield Change(path, olds, news, patterns, reason if len(group) == 1 else "no others of them are left over")


def copies(stored: Node, target: Node, lacking: Collection[Path], memo: SubtreeMemo) -> Iterator[ProposedRule]:
    """Yield a copy for each lacking part that is called a copy, such as ``ema_params``, and is like one stored node."""
    had, found = Roles(stored), dict[int, list[Path]]()
    tops = [path for path in topmost(target, set(lacking)) if any(words(name) & COPIES for name in path)]
    for path, branch in iter_branches(stored) if tops else ():
        if path and memo.has_arrays(branch) and not had.is_optimizer(path):
            found.setdefault(memo.named(branch), []).append(path)
    for top in tops:
        olds = found.get(memo.named(node_at(target, top)), [])
        if len(olds) == 1:
            old, new = joined(olds[0]), joined(top)
            doubt = f"{new} is new, and would begin as a copy of {old}"
            yield ProposedRule(rules.copy(literal(old), plain(new)), "both have the same leaves", doubt)
