"""The children of two paired branches that part ways, and which of them belong together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.template import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves
from flax_ckpt_compat._suggest import _rows
from flax_ckpt_compat._suggest._akin import akin, numbered, pair_up
from flax_ckpt_compat._suggest._looks import EMPTY, MOMENTS, Memo, Roles, fits, look
from flax_ckpt_compat._suggest._patterns import Change, Wrap, either, plain
from flax_ckpt_compat._suggest._rows import Step

_MAX_PAIRS = 900


def torn(stored: Node, target: Node, memo: Memo, *, at_root: bool) -> bool:
    """Return whether what has one name in both trees holds nothing that is alike."""
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return not fits(look(stored), look(target)) if type(stored) is type(target) else memo.contents(target) != {}
    one, other = memo.contents(stored), memo.contents(target)
    if not one or not other:
        return bool(one or other)
    own = [
        name
        for name in stored.children.keys() & target.children.keys()
        if not isinstance(stored.children[name], Branch) and not isinstance(target.children[name], Branch)
    ]
    if at_root and all(_has_modules(node) for node in (stored, target)):
        return False  # collections keep their names, whatever becomes of the model
    inner = _has_modules(stored) or _has_modules(target)
    if not inner and any(not fits(look(stored.children[name]), look(target.children[name])) for name in own):
        return True
    return not one & other or (_rows.is_list(stored) != _rows.is_list(target))


def _has_modules(node: Branch) -> bool:
    return any(isinstance(child, Branch) for child in node.children.values())


class Gap:
    """Two paired branches, with the children that are gone and those that are new."""

    def __init__(self, path: Path, stored: Branch, target: Branch, memo: Memo):
        self.path, self.memo = path, memo
        self.ours, self.theirs = stored.children, target.children
        same = {
            name
            for name in stored.children.keys() & target.children.keys()
            if not torn(stored.children[name], target.children[name], memo, at_root=not path)
        }
        self.common = len(same)
        self.gone = {n: c for n, c in stored.children.items() if n not in same and memo.contents(c)}
        self.new = {n: c for n, c in target.children.items() if n not in same and memo.contents(c)}

    def _take(self, old: Iterable[str], new: Iterable[str]) -> None:
        for name in old:
            self.gone.pop(name, None)
        for name in new:
            self.new.pop(name, None)

    def layouts(self) -> Iterator[list[Step]]:
        """Yield the steps for rows and stacks, and count their children as paired."""
        if not self.gone and not self.new:
            return
        olds = [row for row in _rows.rows(self.ours) if set(row.siblings) & self.gone.keys()]
        news = [row for row in _rows.rows(self.theirs) if set(row.siblings) & self.new.keys()]
        by_print: dict[object, tuple[list[_rows.Row], list[_rows.Row]]] = {}
        for side, found in enumerate((olds, news)):
            for row in found:
                key = tuple(map(self.memo.print, row.nodes))
                by_print.setdefault(key, ([], []))[side].append(row)
        for ours, theirs in by_print.values():
            for left, right in pair_up([r.stem for r in ours], [r.stem for r in theirs]) if ours and theirs else ():
                one = next(row for row in ours if row.stem == left)
                other = next(row for row in theirs if row.stem == right)
                if one.is_list and other.is_list and left != right:
                    continue
                self._take(one.siblings, other.siblings)
                yield _rows.renumbered(one, other)
        yield from self._longer(olds, news)
        yield from self._stacks(
            [row for row in olds if set(row.siblings) & self.gone.keys()],
            [row for row in news if set(row.siblings) & self.new.keys()],
        )

    def _longer(self, olds: list[_rows.Row], news: list[_rows.Row]) -> Iterator[list[Step]]:
        """Yield the steps for rows of the same layers that got more or fewer of them."""
        for one in olds:
            for other in news:
                prints = {self.memo.print(node) for row in (one, other) for node in row.nodes}
                left = set(one.siblings) & self.gone.keys() and set(other.siblings) & self.new.keys()
                if left and len(prints) == 1 and one.first == other.first and (one.stem, one.is_list) != (
                    other.stem, other.is_list
                ):  # fmt: skip
                    self._take(one.siblings, other.siblings)
                    yield _rows.renumbered(one, other)

    def _stacks(self, olds: list[_rows.Row], news: list[_rows.Row]) -> Iterator[list[Step]]:
        for rows_, others, stacking in ((olds, self.new, True), (news, self.gone, False)):
            for row in rows_:
                if len({self.memo.print(node) for node in row.nodes}) > 1:
                    continue
                layer = self.memo.contents(row.nodes[0])
                found = {}
                for name, child in others.items():
                    axis = _rows.stack_axis(layer, len(row.nodes), self.memo.contents(child))
                    if axis is not None:
                        found[name] = axis
                if not found:
                    continue
                name = _rows.nearest(row.stem, list(found))
                level = "/".join((name, *self._inner(others[name], row.nodes[0])))
                if stacking:
                    self._take(row.siblings, [name])
                    yield _rows.stacked(row, level, *found[name])
                else:
                    self._take([name], row.siblings)
                    yield _rows.unstacked(level, row, *found[name])
        for old in list(self.gone):
            moved = {
                new: axes
                for new, child in self.new.items()
                if (axes := _rows.moved_axis(self.memo.contents(self.gone[old]), self.memo.contents(child)))
            }
            if moved:
                new = _rows.nearest(old, list(moved))
                self._take([old], [new])
                yield _rows.restacked(old, new, moved[new])

    def _inner(self, whole: Node, layer: Node) -> Path:
        """Return the names between a stack and what a layer holds."""
        level: Path = ()
        while isinstance(whole, Branch) and len(whole.children) == 1 and isinstance(layer, Branch):
            name, child = next(iter(whole.children.items()))
            if name in layer.children or not isinstance(child, Branch) or len(layer.children) == 1:
                break
            level, whole = (*level, name), child
        return level

    def wrappers(self, stored: Node, roles: Roles) -> Iterator[Step | Wrap]:
        """Yield the steps for levels that were added or taken away, and count their children as paired."""
        for children, others, adding in ((self.gone, self.new, True), (self.new, self.gone, False)):
            for name, whole in list(others.items()) if len(children) > 1 or self.path else ():
                single = {self.memo.print(child) for child in children.values()}
                if not isinstance(whole, Branch) or self.memo.print(whole) in single:
                    continue
                level, inner = self._level(name, whole, children, len(others))
                same = self._same(children, inner, len(others))
                if not level or not same:
                    continue
                text = "/".join(level)
                reason = f"{text} holds what {'/'.join(self.path) or 'the whole tree'} held: {', '.join(same[:4])}"
                moments = _moments(self, same if adding else [name], roles, stored)
                if adding:
                    few = self.common or (len(same) <= 4 and len(same) == len(self.gone))
                    yield Wrap(self.path, text, tuple(same), bool(few), moments, reason)
                    self._take(list(children), [name])
                else:
                    at = {"at": literal("/".join(self.path))} if self.path else {}
                    alone = not self.path and not self.common
                    yield Step(rules.move(literal(text), "") if alone else rules.unwrap(literal(text), **at), reason)
                    if moments:
                        pattern = rf"{either(moments)}/{re.escape(text)}"
                        yield Step(rules.rename(pattern, r"\1"), "the optimizer's state of it")
                    self._take([name], list(children))
                return

    def _level(self, name: str, whole: Branch, children: dict[str, Node], others: int) -> tuple[Path, Branch]:
        level: Path = (name,)
        inner = whole
        while len(inner.children) == 1 and not self._same(children, inner, others):
            one, child = next(iter(inner.children.items()))
            if not isinstance(child, Branch):
                break
            level, inner = (*level, one), child
        return (() if "/" in "".join(level) else level), inner

    def _same(self, children: dict[str, Node], inner: Branch, others: int) -> list[str]:
        """Return the children that are in another branch, by their names or, where half of them are, by contents."""
        held = {name: self.memo.contents(child) for name, child in inner.children.items()}
        named = [name for name, child in children.items() if self.memo.contents(child) & held.get(name, Counter())]
        if named or self.common or len(children) < 2 or others > 1:
            return named
        prints = {self.memo.print(child) for child in inner.children.values()}
        found = [name for name, child in children.items() if self.memo.print(child) in prints]
        return found if len(found) * 2 >= len(children) else []

    def renames(self) -> Iterator[Change]:
        """Yield the children that have other names."""
        pairs = [(o, n) for o, n in self._aligned() if o != n and "/" not in o + n]
        sizes = Counter(found[0] for name in self.ours if (found := numbered(name)))
        grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for old, new in pairs:
            left, right = numbered(old), numbered(new)
            agree = left is not None and right is not None and left[1] == right[1] and bool(left[0])
            key = (left[0], right[0]) if left and right and agree else (old, new)
            grouped.setdefault(key, []).append((old, new))
        for (stem, to), members in grouped.items():
            if len(members) > 1 and sizes[stem] == len(members):
                reason = f"each holds {_holds(self.theirs[members[0][1]])}"
                yield Change(self.path, tuple(old for old, _ in members), _row_pattern(stem, to), reason)
            else:
                for old, new in members:
                    same = self.memo.print(self.ours[old]) == self.memo.print(self.theirs[new])
                    shared = (self.memo.contents(self.ours[old]) & self.memo.contents(self.theirs[new])).total()
                    reason = f"both hold {_holds(self.theirs[new])}" if same else f"they share {shared} leaves"
                    yield Change(self.path, (old,), (re.escape(old), plain(new)), reason)

    def _aligned(self) -> list[tuple[str, str]]:
        groups: dict[object, tuple[list[str], list[str]]] = {}
        for side, children in enumerate((self.gone, self.new)):
            for name, node in children.items():
                groups.setdefault(self.memo.print(node), ([], []))[side].append(name)
        pairs = [pair for olds, news in groups.values() if olds and news for pair in pair_up(olds, news)]
        pairs = [(old, new) for old, new in pairs if self.memo.has_arrays(self.gone[old]) or akin(old, new)]
        taken: tuple[set[str], set[str]] = ({old for old, _ in pairs}, {new for _, new in pairs})
        olds, news = [n for n in self.gone if n not in taken[0]], [n for n in self.new if n not in taken[1]]
        if len(olds) * len(news) > _MAX_PAIRS:
            return pairs
        shared = {
            (old, new): (self.memo.contents(self.gone[old]) & self.memo.contents(self.new[new])).total()
            / self.memo.contents(self.new[new]).total()
            for old in olds
            for new in news
        }
        for (old, new), share in sorted(
            shared.items(), key=lambda one: (-one[1], one[0][0] != one[0][1], not akin(*one[0]))
        ):
            if share and old not in taken[0] and new not in taken[1] and self.memo.has_arrays(self.gone[old]):
                pairs.append((old, new))
                taken[0].add(old)
                taken[1].add(new)
        return pairs


def _row_pattern(stem: str, to: str) -> tuple[str, str]:
    return rf"{re.escape(stem)}(\d+)", rf"{plain(to)}\1"


def _holds(node: Node) -> str:
    leaves = [(path, look(leaf)) for path, leaf in iter_leaves(node) if look(leaf) != EMPTY]
    if len(leaves) > 3 or not leaves:
        return f"the same {len(leaves)} leaves"
    shown = [f"{'/'.join(path)} {shape}".strip() for path, (shape, _) in leaves]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _moments(gap: Gap, names: Iterable[str], roles: Roles, stored: Node) -> set[str]:
    """Return what the optimizers call the nodes that hold the same names as a branch of parameters."""
    wanted = set(names)
    return {
        path[-1]
        for path, branch in iter_branches(stored)
        if gap.path and path and path[-1] in MOMENTS and roles.is_optimizer(path) and wanted & branch.children.keys()
    }
