"""Match what is left over: nodes of the target without stored values with stored ones that it does not use.

Nodes match by the names inside of them and by shapes; of several, those of a row match by the numbers in their names,
and then the only one with a word in common."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, joined, node_at, topmost
from flax_ckpt_compat._suggest.differences import Change, in_words
from flax_ckpt_compat._suggest.layouts import ProposedRule, plain
from flax_ckpt_compat._suggest.leaf_features import EMPTY, KEPT, Look, Roles, SubtreeMemo, fits
from flax_ckpt_compat._suggest.names import COPIES, akin, core, natural, unnumbered, words
from flax_ckpt_compat._trees.leaf_sources import is_array

# Rows of stored nodes that are compared with one of the target's: more are no evidence for any.
_MAX_LIKELY = 16
_NUMBER = re.compile(r"\d+")
Looks = Mapping[Path, Look]
Pair = tuple[Path, Path]  # stored, of the target


class _Nodes:
    """The nodes of a tree, and which of them consist of chosen leaves alone."""

    def __init__(self, tree: Node, looks: Looks, chosen: set[Path], memo: SubtreeMemo):
        self.tree, self.memo = tree, memo
        total, mine = Counter[Path](), Counter[Path]()
        for path, seen in looks.items():
            if seen != EMPTY:
                above = [path[:end] for end in range(1, len(path) + 1)]
                total.update(above)
                if path in chosen:
                    mine.update(above)
        self.whole = [path for path, count in mine.items() if count == total[path]]
        self.rows: dict[Path, list[Path]] = {}
        for path in total:
            self.rows.setdefault(unnumbered(path), []).append(path)

    def print(self, path: Path) -> int:
        """Return a number that is equal for nodes with the same names inside, shapes and kinds."""
        return self.memo.named(node_at(self.tree, path))

    def topmost(self) -> Iterator[Path]:
        """Yield the whole nodes that lie in no other one."""
        whole = set(self.whole)
        yield from (path for path in self.whole if not any(path[:end] in whole for end in range(1, len(path))))


def changes(tree: Node, have: Looks, target: Node, goal: Looks, memo: SubtreeMemo) -> Iterator[Change]:
    """Yield the changes that take unused stored nodes to places where the target has none; not of optimizers."""
    had, has = Roles(tree), Roles(target)
    free = {path for path, seen in have.items() if seen not in (EMPTY, KEPT) and not had.is_optimizer(path)}
    wanted = {path for path, seen in goal.items() if seen != EMPTY and not has.is_optimizer(path)}
    right = {path for path in wanted & have.keys() if fits(have[path], goal[path])}
    if free - right and wanted - right:
        stored, lacking = _Nodes(tree, have, free - right, memo), _Nodes(target, goal, wanted - right, memo)
        yield from _changes(_matched(stored, lacking), stored)


def _matched(stored: _Nodes, lacking: _Nodes) -> list[Pair]:
    by_print: dict[int, list[Path]] = {}
    for path in stored.whole:
        by_print.setdefault(stored.print(path), []).append(path)
        leaf = node_at(stored.tree, path)
        if is_array(leaf) and leaf.dtype == np.uint32 and leaf.shape[-1:] == (2,):  # a raw key may become a typed one
            by_print.setdefault(hash((leaf.shape[:-1], "key")), []).append(path)
    units: dict[int, list[Path]] = {}
    for path in lacking.topmost():
        for unit in _units(lacking, path, by_print):
            units.setdefault(lacking.print(unit), []).append(unit)
    pairs: dict[Path, Path] = {}  # by stored path
    done = set[Path]()
    for number, news in units.items():
        if len(news) == len(by_print[number]) == 1:
            _take(pairs, [(by_print[number][0], news[0])], done, stored)
    groups: dict[Path, list[Path]] = {}
    for new in (new for news in units.values() for new in news if new not in done):
        groups.setdefault(unnumbered(new), []).append(new)
    for news in groups.values():
        likely = dict.fromkeys(unnumbered(old) for old in by_print[lacking.print(news[0])])
        found = [_row(stored, lacking, old, news) for old in list(likely)[:_MAX_LIKELY]]
        found = [row for row in found if row and not any(old in pairs for old, _ in row)]
        if len(found) > 1:
            found = [row for row in found if _akin(*row[0])]
        if len(found) == 1:
            _take(pairs, found[0], done, stored)
    return list(pairs.items())


def _units(lacking: _Nodes, path: Path, by_print: Mapping[int, list[Path]]) -> Iterator[Path]:
    """Yield the largest nodes at or below a path to which stored ones are alike."""
    node = node_at(lacking.tree, path)
    if lacking.print(path) in by_print:
        yield path
    elif isinstance(node, Branch):
        for name in node.children:
            yield from _units(lacking, (*path, name), by_print)


def _take(pairs: dict[Path, Path], row: list[Pair], done: set[Path], stored: _Nodes) -> None:
    """Add pairs of nodes of which none lies in another one, if their names do not speak against it."""
    olds = {old for old, _ in row}
    if any(old[:end] in pairs for old in olds for end in range(len(old))):
        return
    if any(other[: len(old)] == old for old in olds for other in pairs):
        return
    if all(_may_be(old, new, is_leaf=not isinstance(node_at(stored.tree, old), Branch)) for old, new in row):
        pairs.update(row)
        done.update(new for _, new in row)


def _may_be(old: Path, new: Path, *, is_leaf: bool) -> bool:
    """Return whether a node may have another name: not only another number, not that of a copy."""
    if unnumbered(old) == unnumbered(new):
        return False  # the whole row may have other numbers
    ours, theirs = ({word for name in path for word in words(name)} & COPIES for path in (old, new))
    return ours == theirs and (not is_leaf or old[-1] == new[-1] or _akin(old, new))


def _row(stored: _Nodes, lacking: _Nodes, like: Path, news: list[Path]) -> list[Pair]:
    """Pair nodes of the target with those of a stored row, by their numbers or else in order, if all are alike."""
    olds = stored.rows[like]
    by_number = {tuple(_NUMBER.findall(joined(old))): old for old in olds}
    same = [by_number.get(tuple(_NUMBER.findall(joined(new)))) for new in news]
    keys = {joined(path): path for path in (*olds, *news)}
    in_order = [[keys[name] for name in natural(map(joined, side))] for side in (olds, news)]
    for left, right in ((same, news), in_order):
        pairs = [(old, new) for old, new in zip(left, right, strict=False) if old is not None]
        if len(pairs) == len(left) == len(right) and all(stored.print(old) == lacking.print(new) for old, new in pairs):
            return pairs
    return []


def _akin(old: Path, new: Path) -> bool:
    ours, theirs = core(old, new)
    return akin("_".join(ours), "_".join(theirs))


def _changes(pairs: list[Pair], stored: _Nodes) -> Iterator[Change]:
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
            patterns = {_pattern(group[0][0]): _replacement(group[0][1])}
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


def _pattern(path: Path) -> str:
    return r"(\d+)".join(map(literal, _NUMBER.split(joined(path))))


def _replacement(path: Path) -> str:
    parts = [plain(part) for part in _NUMBER.split(joined(path))]
    return parts[0] + "".join(rf"\{number}{part}" for number, part in enumerate(parts[1:], 1))
