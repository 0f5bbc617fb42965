"""Pairs the subtrees of a checkpoint with those of a target by what they hold, from the top down."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves
from flax_ckpt_compat._suggest import _rows
from flax_ckpt_compat._suggest._akin import akin, numbered, pair_up
from flax_ckpt_compat._suggest._looks import EMPTY, MOMENTS, Contents, Memo, Roles, fits, flatten, look
from flax_ckpt_compat._suggest._rows import Step

_ROUNDS = 12
_MAX_PAIRS = 900


@dataclasses.dataclass(slots=True)
class State:
    """A checkpoint's tree after some steps.

    Attributes:
        tree: of handles and what the rules made of them.
        steps: so far.
        matched: how many leaves of the target are found with their shape.
    """

    tree: Node
    steps: tuple[Step, ...]
    matched: int


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A child, or a row of them, that has another name in the target.

    Attributes:
        path: of the branch, in both trees.
        old: names of the children.
        pattern: for them, and their replacement.
        reason: what speaks for it.
    """

    path: Path
    old: tuple[str, ...]
    pattern: tuple[str, str]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Wrap:
    """A level that the target has more.

    Attributes:
        path: of the branch that is one level deeper.
        name: of the level; perhaps several.
        held: names of the children that are below it.
        few: whether only those go there, and not all that the branch holds.
        moments: names of the optimizers' branches that hold the same children.
        reason: what speaks for it.
    """

    path: Path
    name: str
    held: tuple[str, ...]
    few: bool
    moments: set[str]
    reason: str


class Pairing:
    """The steps from a checkpoint to a target."""

    def __init__(self, target: Node):
        self.target, self.goal = target, flatten(target)
        self.roles, self.memo = Roles(target), Memo()

    def start(self, stored: Node) -> State:
        """Return the state before any step."""
        return State(stored, (), self._matched(stored))

    def tried(self, state: State, steps: Iterable[Step]) -> State | None:
        """Return the state after more steps, or None where a rule does not fit."""
        tree, steps = state.tree, tuple(steps)
        for step in steps:
            try:
                tree = step.rule.apply(tree, self.target)
            except CheckpointError:
                return None
        return State(tree, (*state.steps, *steps), self._matched(tree))

    def _matched(self, tree: Node) -> int:
        have = flatten(tree)
        return sum(
            path in have and fits(have[path], seen) and have[path][1] != "kept"
            for path, seen in self.goal.items()
            if seen != EMPTY
        )

    def paired(self, state: State) -> State:
        """Return the state after the steps that the contents of both trees ask for."""
        best, done = state, set[str]()
        for _ in range(_ROUNDS):
            before = state
            for group in self._groups(state):
                steps = [step for step in group if step.rule.source not in done]
                done.update(step.rule.source for step in steps)
                after = self.tried(state, steps) if steps else None
                if after is not None and after.matched >= state.matched:
                    state = after
            if state is before:
                break
            if state.matched > best.matched:
                best = state
        return best

    def _groups(self, state: State) -> Iterator[list[Step]]:
        """Yield the steps of one round; those of one list make sense together alone."""
        own = Roles(state.tree)
        changes: list[Change] = []
        wraps: dict[str, list[Wrap]] = {}
        layouts: dict[str, list[Step]] = {}
        for path, stored, target in self._branches(state.tree, self.target, own, ()):
            gap = Gap(path, stored, target, self.memo)
            for steps in gap.layouts():
                layouts.setdefault(steps[0].rule.source, steps)
            for one in gap.wrappers(state.tree, own):
                if isinstance(one, Wrap):
                    wraps.setdefault(one.name, []).append(one)
                else:
                    layouts.setdefault(one.rule.source, [one])
            changes += gap.renames()
        yield from layouts.values()
        yield from map(_wrapped, wraps.values())
        yield from ([step] for step in _rules(changes, state.tree, own))

    def _branches(
        self, stored: Branch, target: Branch, own: Roles, path: Path
    ) -> Iterator[tuple[Path, Branch, Branch]]:
        """Yield the branches of both trees that are paired and differ, the outer ones first."""
        yield path, stored, target
        for name, child in stored.children.items():
            other = target.children.get(name)
            if not isinstance(child, Branch) or not isinstance(other, Branch) or own.is_optimizer((*path, name)):
                continue
            if not torn(child, other, self.memo) and self.memo.named(child) != self.memo.named(other):
                yield from self._branches(child, other, own, (*path, name))


def torn(stored: Node, target: Node, memo: Memo) -> bool:
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
    if any(not fits(look(stored.children[name]), look(target.children[name])) for name in own):
        return True
    return not one & other or (_rows.is_list(stored) != _rows.is_list(target))


class Gap:
    """Two paired branches, with the children that are gone and those that are new."""

    def __init__(self, path: Path, stored: Branch, target: Branch, memo: Memo):
        self.path, self.memo = path, memo
        self.ours, self.theirs = stored.children, target.children
        same = {
            name
            for name in stored.children.keys() & target.children.keys()
            if not torn(stored.children[name], target.children[name], memo)
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
            found = {
                new: axes
                for new, child in self.new.items()
                if (axes := _rows.moved_axis(self.memo.contents(self.gone[old]), self.memo.contents(child)))
            }
            if found:
                new = _rows.nearest(old, list(found))
                self._take([old], [new])
                yield _rows.restacked(old, new, found[new])

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
                    at = {"at": "/".join(self.path)} if self.path else {}
                    alone = not self.path and not self.common
                    yield Step(rules.move(text, "") if alone else rules.unwrap(text, **at), reason)
                    if moments:
                        pattern = rf"{_either(moments)}/{re.escape(text)}"
                        yield Step(rules.rename(pattern, r"\1"), "the optimizer's state of it")
                    self._take([name], list(children))
                return

    def _level(self, name: str, whole: Branch, children: dict[str, Node], others: int) -> tuple[Path, Branch]:
        level, inner = (name,), whole
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
            agree = left and right and left[1] == right[1] and left[0]
            grouped.setdefault((left[0], right[0]) if agree else (old, new), []).append((old, new))
        for (stem, to), members in grouped.items():
            if len(members) > 1 and sizes[stem] == len(members):
                reason = f"each holds {_holds(self.theirs[members[0][1]])}"
                yield Change(self.path, tuple(old for old, _ in members), _row_pattern(stem, to), reason)
            else:
                for old, new in members:
                    same = self.memo.print(self.ours[old]) == self.memo.print(self.theirs[new])
                    shared = (self.memo.contents(self.ours[old]) & self.memo.contents(self.theirs[new])).total()
                    reason = f"both hold {_holds(self.theirs[new])}" if same else f"they share {shared} leaves"
                    yield Change(self.path, (old,), (re.escape(old), _plain(new)), reason)

    def _aligned(self) -> list[tuple[str, str]]:
        groups: dict[object, tuple[list[str], list[str]]] = {}
        for side, children in enumerate((self.gone, self.new)):
            for name, node in children.items():
                groups.setdefault(self.memo.print(node), ([], []))[side].append(name)
        pairs = [pair for olds, news in groups.values() if olds and news for pair in pair_up(olds, news)]
        pairs = [(old, new) for old, new in pairs if self.memo.has_arrays(self.gone[old]) or akin(old, new)]
        taken = {old for old, _ in pairs}, {new for _, new in pairs}
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


def _free_first(changes: list[Change]) -> list[Change]:
    """Return the changes in an order in which no name is taken before it is free; circles come last."""
    done: list[Change] = []
    while changes:
        taken = {(change.path, name) for change in changes for name in change.old}
        free = [one for one in changes if (one.path, one.pattern[1]) not in taken or one.pattern[1] in one.old]
        if not free:
            break
        done += free
        chosen = set(map(id, free))
        changes = [one for one in changes if id(one) not in chosen]
    return done + changes


def _row_pattern(stem: str, to: str) -> tuple[str, str]:
    return rf"{re.escape(stem)}(\d+)", rf"{_plain(to)}\1"


def _plain(text: str) -> str:
    return text.replace("\\", r"\\")


def _wrapped(wraps: list[Wrap]) -> list[Step]:
    """Return the steps for one level that was added in several branches."""
    to = _plain(wraps[0].name)
    if all(one.few for one in wraps):
        held = {name for one in wraps for name in one.held}
        return [Step(rules.rename(_either(held), rf"{to}/\1"), wraps[0].reason)]
    steps = []
    for one in wraps:
        at = {"at": "/".join(one.path)} if one.path else {}
        steps.append(Step(rules.wrap(one.name, **at), one.reason))
    if moments := set().union(*(one.moments for one in wraps)):
        steps.append(Step(rules.rename(_either(moments), rf"\1/{to}"), "the optimizer's state of it"))
    return steps


def _either(names: Iterable[str]) -> str:
    return f"({'|'.join(sorted(map(re.escape, names)))})"


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


def _rules(changes: list[Change], stored: Node, own: Roles) -> list[Step]:
    """Return one rename for all changes of one kind, with the names before it where others have that name, too."""
    concerned = {name for change in changes for name in change.old}
    places: dict[str, set[Path]] = {}
    for path, branch in iter_branches(stored):
        for name in branch.children.keys() & concerned:
            places.setdefault(name, set()).add(path)
    homes: dict[tuple[str, str], set[Path]] = {}
    for change in changes:
        homes.setdefault(change.pattern, set()).add(change.path)
    steps: dict[str, tuple[Step, int]] = {}
    for change in _free_first(changes):
        everywhere = {path for name in change.old for path in places[name]}
        moments = {path for path in everywhere if own.is_optimizer(path) and not own.is_optimizer(change.path)}
        pattern = _qualified(change, homes[change.pattern], everywhere - moments, moments)
        step = Step(rules.rename(*pattern), change.reason)
        steps.setdefault(step.rule.source, (step, len(change.path)))
    return [step for step, _ in sorted(steps.values(), key=lambda one: one[1])]


def _qualified(change: Change, homes: set[Path], places: set[Path], moments: set[Path]) -> tuple[str, str]:
    """Return a pattern and its replacement, with as many names before it as tell it from names that stay."""
    pattern, replacement = change.pattern
    path, strangers = change.path, places - homes
    if not strangers:
        return pattern, replacement
    if not path:
        return f"^{pattern}", replacement
    alike = [home for home in homes if _unnumbered(home) == _unnumbered(path)]
    shown = [_counted(name) if len(alike) > 1 else re.escape(name) for name in path]
    for count in range(1, len(path)):
        if not any(_unnumbered(other)[-count:] == _unnumbered(path)[-count:] for other in strangers):
            before = "/".join(shown[-count:])
            break
    else:
        size = len(path)
        above = {one[-size] for one in moments if one[len(one) - size + 1 :] == path[1:] and len(one) >= size}
        above = {path[0]} | (above & MOMENTS)
        before = "/".join([_either(above) if len(above) > 1 else re.escape(path[0]), *shown[1:]])
        if "\\d+" not in before and len(above) > 1:
            shifted = replacement.replace(r"\1", r"\2")
            return f"{before}/{pattern}", "/".join([r"\1", *map(_plain, path[1:]), shifted])
        before = before.replace("(", "(?:", 1) if len(above) > 1 else before
    if "\\d+" in before or "(" in before:
        return f"({before})/{pattern}", rf"\1/{replacement.replace(chr(92) + '1', chr(92) + '2')}"
    return f"{before}/{pattern}", f"{before_plain(path, before)}/{replacement}"


def before_plain(path: Path, before: str) -> str:
    """Return as many names of a path as a pattern has, for a replacement."""
    return _plain("/".join(path[len(path) - 1 - before.count("/") :]))


def _unnumbered(path: Path) -> Path:
    return tuple(found[0] + "#" if (found := numbered(name)) else name for name in path)


def _counted(name: str) -> str:
    found = numbered(name)
    return rf"{re.escape(found[0])}\d+" if found else re.escape(name)
