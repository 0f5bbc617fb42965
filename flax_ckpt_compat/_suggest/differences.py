"""Pair the children of two branches that differ: rows, stacks, added and removed levels, renamed children."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.text_formatting import counted, literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, joined, show_path
from flax_ckpt_compat._suggest import layouts
from flax_ckpt_compat._suggest.layouts import LayerRow, ProposedRule, either, plain
from flax_ckpt_compat._suggest.leaf_features import EMPTY, Look, SubtreeMemo, fits, flatten, is_torch_name, look, turned
from flax_ckpt_compat._suggest.names import akin, natural, pair_up

_MAX_PAIRS, _MAX_STACKS = 900, 12
_ROWS = (2, 3)  # numbers of rows that may be arrays with names of their own: gate and up, key and value


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Children with new names in the target."""

    path: Path  # of their branch, in both trees
    old: tuple[str, ...]
    new: tuple[str, ...]
    patterns: dict[str, str]  # for the old names → replacements
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """An added or removed level between a collection and its children; the optimizer's moments have it, too."""

    top: str
    name: str  # perhaps several, joined
    is_new: bool  # the target has it, not the checkpoint
    held: tuple[str, ...]  # what is below the collection in the checkpoint
    reason: str


def torn(stored: Node, target: Node, memo: SubtreeMemo, *, at_root: bool) -> bool:
    """Return whether the nodes of one name have no leaf in common."""
    if not isinstance(stored, Branch) and not isinstance(target, Branch):
        return not fits(look(stored), look(target))
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return True
    one, other = memo.contents(stored), memo.contents(target)
    if not one or not other:
        return bool(one or other)
    modules = [any(isinstance(child, Branch) for child in node.children.values()) for node in (stored, target)]
    if at_root and all(modules):
        return False  # collections keep their names, whatever becomes of the model
    return not one & other


class Gap:
    """Two paired branches, with their removed and added children."""

    def __init__(self, path: Path, stored: Branch, target: Branch, memo: SubtreeMemo):
        self.path, self.memo = path, memo
        # Before a name: everywhere, or only below the name of this branch, where layers of other branches stay apart.
        self.heads = ("", *(f"{last}/" for last in path[-1:]))
        self.ours, self.theirs = stored.children, target.children
        both = self.ours.keys() & self.theirs.keys()
        same = {name for name in both if not torn(self.ours[name], self.theirs[name], memo, at_root=not path)}
        if path:  # layers that share a bias alone are others where each of the two has another name
            equal = {name for name in both if memo.print(self.ours[name]) == memo.print(self.theirs[name])}
            ours, theirs = (
                {memo.print(node) for name, node in side.items() if name not in equal}
                for side in (self.ours, self.theirs)
            )
            crossed = {name for name in same - equal if memo.print(self.theirs[name]) in ours}
            same -= {name for name in crossed if memo.print(self.ours[name]) in theirs}
        self.common = len(same)
        self.gone = {name: node for name, node in self.ours.items() if name not in same and memo.contents(node)}
        self.new = {name: node for name, node in self.theirs.items() if name not in same and memo.contents(node)}

    def others(self) -> Iterator[list[ProposedRule] | Level | Change]:
        """Yield the changes of the children outside rows: stacks, a level, renames."""
        if self.gone or self.new:
            yield from self._stacks()
            yield from self._interleaved()
            yield from self._named_rows()
            yield from self._levels()
            for old, new in self._aligned():
                yield Change(self.path, (old,), (new,), {literal(old): plain(new)}, self._reason(old, new))

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
            for left, right in pair_up([row.stem for row in olds], [row.stem for row in news]) if olds and news else ():
                one = next(row for row in olds if row.stem == left)
                other = next(row for row in news if row.stem == right)
                renamed_list = one.slash and other.slash and left != right
                if not renamed_list and (len(one.nodes) == len(other.nodes) or one.first == other.first):
                    self._take(one.siblings, other.siblings)
                    reason = f"both are {len(one.nodes)} equal layers"
                    patterns = layouts.renamed(one, other)
                    yield Change(self.path, tuple(one.siblings), tuple(other.siblings), patterns, reason)

    def _stacks(self) -> Iterator[list[ProposedRule]]:
        olds, news = self._open()
        for found, others, stacking in ((olds, self.new, True), (news, self.gone, False)):
            likely: dict[object, list[str]] = {}  # names by the sizes of their leaves
            for name, node in others.items() if found else ():
                for size in layouts.sizes(self.memo.contents(node)):
                    likely.setdefault(size, []).append(name)
            known: dict[object, dict[str, tuple[int, str]]] = {}  # in natural order, by a row's contents and number
            for row in found:
                if len(set(map(self.memo.print, row.nodes))) != 1:
                    continue
                layer, kind = self.memo.contents(row.nodes[0]), (self.memo.print(row.nodes[0]), len(row.nodes))
                if kind not in known:
                    near = {name for size in layouts.sizes(layer, len(row.nodes)) for name in likely.get(size, ())}
                    wholes = {name: self.memo.contents(others[name]) for name in natural(near & others.keys())}
                    found_on = {name: layouts.axis_of(kind[1], layer, whole) for name, whole in wholes.items()}
                    known[kind] = {name: axis for name, axis in found_on.items() if axis}
                axes = {name: axis for name, axis in known[kind].items() if name in others}
                if axes:
                    name = max(axes, key=lambda one: (one == row.stem, akin(one, row.stem)))
                    self._take(row.siblings, [name], turned=not stacking)
                    for above in self.heads:
                        layers = dataclasses.replace(row, stem=above + row.stem)
                        yield (layouts.stacked if stacking else layouts.unstacked)(layers, above + name, *axes[name])

    def _interleaved(self) -> Iterator[list[ProposedRule]]:
        """Yield the rules between a row and stacks that hold every n-th layer each, here or one level below."""
        for found, others, stacking in zip(self._open(), (self.new, self.gone), (True, False), strict=True):
            inner = [(name, child.children) for name, child in others.items() if found and isinstance(child, Branch)]
            below = {f"{name}/{one}": node for name, children in inner for one, node in children.items()}
            shorts = [short for short in layouts.rows({**others, **below}) if len(short.nodes) <= _MAX_STACKS]
            pairs = itertools.product(found, shorts) if len(found) * len(shorts) <= _MAX_PAIRS else ()
            done = set[str]()
            for row, short in sorted(pairs, key=lambda pair: not akin(pair[0].stem, pair[1].stem)):
                count, rest = divmod(len(row.nodes), len(short.nodes))
                if count < 2 or rest or not done.isdisjoint((*row.names, *short.names)):
                    continue
                axis = layouts.axis_of(count, *(self.memo.contents(side.nodes[0]) for side in (row, short)))
                if axis and all(len(set(map(self.memo.print, side.nodes))) == 1 for side in (row, short)):
                    done.update(row.names, short.names)
                    tops = {name.partition("/")[0] for name in short.siblings}
                    self._take(row.siblings, tops, turned=not stacking)
                    yield layouts.interleaved(row, short, axis[0], stacking=stacking)

    def _named_rows(self) -> Iterator[list[ProposedRule]]:
        """Yield the rules for an array of which the other side has each row under a name of its own."""
        sides: tuple[dict[Look, list[str]], ...] = ({}, {})  # single arrays by their looks
        for side, children in zip(sides, (self.gone, self.new), strict=True):
            for name in natural(children):
                found = flatten(children[name]) if self.memo.contents(children[name], name).total() == 1 else {}
                for path, seen in found.items():
                    side.setdefault(seen, []).append(joined((name, *path)))
        for ones, others, stacking in ((sides[1], sides[0], True), (sides[0], sides[1], False)):
            for (shape, kind), (name, *more) in ones.items():
                row = (shape[1:], kind)
                names = others.get(row, [])
                # An array that is there as a whole, or rows that both sides have, say otherwise.
                if more or len(shape) < 2 or len(names) != shape[0] or (shape, kind) in others or row in ones:
                    continue
                if shape[0] in _ROWS and "/" not in name:
                    tops = [one.partition("/")[0] for one in names]
                    self._take(tops, [name], turned=not stacking)
                    for above in self.heads:
                        yield layouts.named_rows(above + name, [above + one for one in names], stacking=stacking)

    def _levels(self) -> Iterator[list[ProposedRule] | Level | Change]:
        """Yield an added or removed level, and count its children as paired."""
        for children, others, is_new in ((self.gone, self.new, True), (self.new, self.gone, False)):
            prints = set(map(self.memo.print, children.values()))
            for name, whole in list(others.items()) if len(children) > 1 or self.path else ():
                if not isinstance(whole, Branch):
                    continue
                names, inner = [name], whole
                held = self._held(children, inner, len(others))
                while not held and len(inner.children) == 1:
                    ((name, child),) = inner.children.items()
                    if not isinstance(child, Branch):
                        break
                    names, inner = [*names, name], child
                    held = self._held(children, inner, len(others))
                # What holds the same as a child is that child itself, unless it holds the only child by its name.
                same = self.memo.print(whole) in prints
                only = len(children) == 1 and children.keys() == inner.children.keys()
                if not held or "/" in "".join(names) or (same and not only):
                    continue
                yield self._level("/".join(names), held, is_new=is_new)
                self._take(list(children), names[:1], turned=not is_new)
                return

    def _level(self, name: str, held: list[str], *, is_new: bool) -> list[ProposedRule] | Level | Change:
        """Return the step for a level: renames if it is below a collection, or holds some of the children only."""
        place = show_path(self.path) if self.path else "the whole tree"
        reason = f"{name} holds what {place} holds: {', '.join(held[:4])}"
        top = name.split("/")[0]
        if is_new and self.common:
            return Change(self.path, tuple(held), (top,), {f"({either(held)})": rf"{plain(name)}/\1"}, reason)
        if not self.path:
            away = rules.unwrap(literal(name)) if self.common else rules.move(literal(name), "")
            return [ProposedRule(rules.wrap(name) if is_new else away, reason)]
        *above, last = self.path
        if not above:
            return Level(last, name, is_new, tuple(held if is_new else [top]), reason)
        less, more = last, f"{last}/{name}"
        pattern = {literal(less): plain(more)} if is_new else {literal(more): plain(less)}
        return Change(tuple(above), (last,), (last,), pattern, reason)

    def _held(self, children: dict[str, Node], inner: Branch, others: int) -> list[str]:
        """Return the children that are in another branch, by names or, if half of them match, by contents."""
        both = [name for name in inner.children if name in children]
        named = [name for name in both if self.memo.contents(children[name]) & self.memo.contents(inner.children[name])]
        if named or self.common or len(children) < 2 or others > 1:
            return named
        prints = {self.memo.print(child) for child in inner.children.values()}
        found = [name for name, child in children.items() if self.memo.print(child) in prints]
        return found if len(found) * 2 >= len(children) else []

    def _reason(self, old: str, new: str) -> str:
        ours, theirs = self.memo.contents(self.ours[old]), self.memo.contents(self.theirs[new])
        if ours != theirs:
            return f"they share {counted((ours & theirs).total(), 'leaf')}"
        return in_words(self.theirs[new])

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
            pairs += [pair for olds, news in groups.values() if olds and news for pair in pair_up(olds, news)]
        pairs = [(old, new) for old, new in pairs if self.memo.has_arrays(self.gone[old]) or akin(old, new)]
        olds = [name for name in self.gone.keys() - dict(pairs).keys() if self.memo.has_arrays(self.gone[name])]
        news = list(self.new.keys() - {new for _, new in pairs})
        shares = {}
        few = len(olds) * len(news) <= _MAX_PAIRS
        for old, new in itertools.product(sorted(olds), sorted(news)) if few else ():
            ours, theirs = self.gone[old], self.new[new]
            contents = self.memo.contents(theirs)
            shared = (self.memo.contents(ours) & contents).total()
            # Torch's weight that became a kernel is transposed.
            is_turned = is_torch_name(old, new) and turned(look(ours)[0], look(theirs)[0])
            if shared or is_turned:
                shares[old, new] = shared / contents.total()
        for old, new in sorted(shares, key=lambda one: (-shares[one], one[0] != one[1], not akin(*one))):
            if old in olds and new in news:
                pairs.append((old, new))
                olds.remove(old)
                news.remove(new)
        return [(old, new) for old, new in pairs if old != new and "/" not in old + new]


def in_words(node: Node) -> str:
    """Return what two nodes hold that are alike."""
    leaves = {path: seen for path, seen in flatten(node).items() if seen != EMPTY}
    if len(leaves) > 3:
        return f"both hold the same {len(leaves)} leaves"
    return "both hold " + " and ".join(f"{joined(path)} {seen[0]}".strip() for path, seen in leaves.items())
