"""Candidates that give stored leaves other names."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches
from flax_ckpt_compat._suggest._akin import numbered
from flax_ckpt_compat._suggest._gaps import Gap, Prints, aligned
from flax_ckpt_compat._suggest._looks import MOMENTS, Roles, items
from flax_ckpt_compat.rules import Rule

_MAX_RENAMES = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One proposed rule.

    Attributes:
        rule: see `flax_ckpt_compat.rules`.
        reason: what speaks for it, in a few words.
    """

    rule: Rule
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """Steps that are tried together.

    Attributes:
        steps: in their order.
        expected: how many leaves of the target they are thought to find.
    """

    steps: tuple[Step, ...]
    expected: int


def holds(node: Node) -> str:
    """What a subtree holds, in a few words."""
    leaves = items(node)
    if len(leaves) > 3 or not leaves:
        return f"the same {len(leaves)} leaves"
    shown = [f"{'/'.join(path)} {shape}".strip() for path, (shape, _) in leaves.items()]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def renames(found: list[Gap], prints: Prints, matched_names: frozenset[str], stored: Node) -> list[Candidate]:
    """Children that may have got another name at the same place."""
    pairs = [(gap, old, new) for gap in found for old, new in aligned(gap.gone, gap.new, prints)]
    plain = [(gap, old, new) for gap, old, new in pairs if "/" not in old + new]
    looks, where = _looks(stored, prints, plain), dict[str, set[str]]()
    for _, old, new in plain:
        where.setdefault(old, set()).add(new)
    steps: dict[str, Candidate] = {}
    rows = [
        (len(items(gap.new[new]).items() & items(gap.gone[old]).items()) * count, gap, old, new, count)
        for gap, old, new, count in _rows(plain)
    ]
    for wanted, gap, old, new, count in sorted(rows, key=lambda row: -row[0])[:_MAX_RENAMES]:
        members = _members(gap, old, count)
        elsewhere = any(looks[name] - {prints.of(gap.gone[name])} for name in members)
        ambiguous = len(where[old]) > 1 or elsewhere or bool(matched_names & set(members))
        pattern, replacement = _pattern(old, new, count)
        if ambiguous:
            pattern, replacement = _qualified(gap, old, pattern, replacement, prints, stored)
        same = prints.of(gap.gone[old]) == prints.of(gap.new[new])
        reason = f"{'each' if count > 1 else 'both'} hold{'s' if count > 1 else ''} {holds(gap.new[new])}"
        if not same:
            reason = f"they share {len(items(gap.gone[old]).items() & items(gap.new[new]).items())} leaves"
        step = Step(rules.rename(pattern, replacement), reason)
        before = steps[step.rule.source].expected if step.rule.source in steps else 0
        steps[step.rule.source] = Candidate((step,), before + wanted)
    return list(steps.values())


def _looks(stored: Node, prints: Prints, pairs: list[tuple[Gap, str, str]]) -> dict[str, set[int]]:
    """Stored name that a child has which may have got another → fingerprints of all that has it, wherever it is."""
    gaps_ = {id(gap): gap for gap, _, _ in pairs}.values()
    found: dict[str, set[int]] = {name: set() for gap in gaps_ for name in gap.gone}
    for _, branch in iter_branches(stored):
        for name in branch.children.keys() & found.keys():
            found[name].add(prints.of(branch.children[name]))
    return found


def _members(gap: Gap, old: str, count: int) -> list[str]:
    stem = numbered(old)
    return [name for name in gap.gone if stem and (numbered(name) or ("", 0))[0] == stem[0]] if count > 1 else [old]


def _rows(pairs: list[tuple[Gap, str, str]]) -> Iterator[tuple[Gap, str, str, int]]:
    """Pairs whose numbers agree and whose other text is the same, as one; with how many they are."""
    rows: dict[tuple[int, str, str], list[tuple[Gap, str, str]]] = {}
    sizes: Counter[tuple[int, str]] = Counter()
    for gap in {id(gap): gap for gap, _, _ in pairs}.values():
        sizes.update((id(gap), found[0]) for name in gap.gone if (found := numbered(name)))
    for gap, old, new in pairs:
        left, right = numbered(old), numbered(new)
        agree = left is not None and right is not None and left[1] == right[1]
        key = (id(gap), left[0], right[0]) if left and right and agree else (id(gap), old, new)
        rows.setdefault(key, []).append((gap, old, new))
    for (gap_id, stem, _), members in rows.items():
        # Not where names beside the row would match its pattern, too.
        if len(members) > 1 and sizes[gap_id, stem] == len(members):
            yield *members[0], len(members)
        else:
            yield from ((*member, 1) for member in members)


def _pattern(old: str, new: str, count: int) -> tuple[str, str]:
    left, right = numbered(old), numbered(new)
    if count > 1 and left and right:
        return rf"{re.escape(left[0])}(\d+)", rf"{plain(right[0])}\1"
    return re.escape(old), plain(new)


def plain(text: str) -> str:
    """Text for a replacement, where a backslash would mean something."""
    return text.replace("\\", r"\\")


def _qualified(gap: Gap, old: str, pattern: str, replacement: str, prints: Prints, stored: Node) -> tuple[str, str]:
    """The same with the names before it, for names that occur elsewhere, too."""
    if not gap.path:
        return f"^{pattern}", replacement
    wanted = prints.of(gap.gone[old])
    parents = {
        path[-1]
        for path, branch in iter_branches(stored)
        if path and old in branch.children and prints.of(branch.children[old]) == wanted
    }
    if len(gap.path) > 1:
        return f"{re.escape(gap.path[-1])}/{pattern}", f"{plain(gap.path[-1])}/{replacement}"
    holders = {gap.path[-1]} | {name for name in parents if name in MOMENTS}
    if len(holders) == 1:
        return f"{re.escape(gap.path[-1])}/{pattern}", f"{plain(gap.path[-1])}/{replacement}"
    among = "|".join(sorted(map(re.escape, holders)))
    shifted = re.sub(r"\\1", r"\\2", replacement)
    return f"({among})/{pattern}", rf"\1/{shifted}"


def wrappers(found: list[Gap], prints: Prints, roles: Roles, stored: Node) -> Iterator[Candidate]:
    """Levels that were added above, or taken away from, what a branch holds."""
    for gap in found:
        for level, inner in _levels(gap.new):
            same = _same(gap.gone, inner, prints)
            if not same or "/" in "".join(level):
                continue
            name = "/".join(level)
            reason = f"{'/'.join((*gap.path, name))} holds what {_shown(gap.path)} held: {', '.join(sorted(same)[:4])}"
            wanted = sum(len(items(inner.children[child])) for child in same)
            if not gap.common and same >= gap.gone.keys() - set(level):
                moments = _moments(gap, same, roles, stored)
                more = [Step(rules.rename(_either(moments), rf"\1/{plain(name)}"), "the optimizer's state of it")]
                first = Step(_at(rules.wrap, name, gap.path), reason)
                yield Candidate((first, *(more if moments else ())), wanted)
            if len(same) <= 4 or gap.common:
                yield Candidate((Step(rules.rename(_either(same), rf"{plain(name)}/\1"), reason),), wanted)
        for level, inner in _levels(gap.gone):
            same = _same(gap.new, inner, prints)
            if not same or "/" in "".join(level):
                continue
            name = "/".join(level)
            reason = f"{_shown(gap.path)} holds what {'/'.join((*gap.path, name))} held: {', '.join(sorted(same)[:4])}"
            wanted = sum(len(items(inner.children[child])) for child in same)
            yield from _unwrapped(gap, name, same, roles, stored, reason, wanted)


def _unwrapped(
    gap: Gap, name: str, same: set[str], roles: Roles, stored: Node, reason: str, wanted: int
) -> Iterator[Candidate]:
    if not gap.path and not gap.common and len(same) >= len(gap.new):
        # Nothing beside it is asked for.
        yield Candidate((Step(rules.move(name, ""), reason),), wanted + 1)
    moments = _moments(gap, {name.split("/")[0]}, roles, stored)
    more = [Step(rules.rename(f"{_either(moments)}/{re.escape(name)}", r"\1"), "the optimizer's state of it")]
    yield Candidate((Step(_at(rules.unwrap, name, gap.path), reason), *(more if moments else ())), wanted)


def _at(make: Callable[..., Rule], name: str, path: Path) -> Rule:
    return make(name, at="/".join(path)) if path else make(name)


def _shown(path: Path) -> str:
    return "/".join(path) or "the whole tree"


def _either(names: set[str]) -> str:
    return f"({'|'.join(sorted(map(re.escape, names)))})"


def _levels(children: dict[str, Node]) -> Iterator[tuple[Path, Branch]]:
    for name, child in children.items():
        for path, branch in iter_branches(child):
            if len(path) < 3:
                yield (name, *path), branch


def _same(children: dict[str, Node], inner: Branch, prints: Prints) -> set[str]:
    """Names in both with equal, or at least partly equal, subtrees."""
    names = children.keys() & inner.children.keys()
    return {
        name
        for name in names
        if prints.of(children[name]) == prints.of(inner.children[name])
        or items(children[name]).items() & items(inner.children[name]).items()
    }


def _moments(gap: Gap, names: set[str], roles: Roles, stored: Node) -> set[str]:
    """What the optimizers call the nodes that hold the same names as a branch of parameters."""
    if not gap.path:
        return set()
    return {
        path[-1]
        for path, branch in iter_branches(stored)
        if path and path[-1] in MOMENTS and roles.is_optimizer(path) and names & branch.children.keys()
    }


def endings(stored: Node, target: Node) -> Iterator[Candidate]:
    """One more name, ``value``, at the end of every key path: the states of NNX have it and pure dicts do not."""
    ends = [Counter(path[-1] == "value" for path in items(tree) if path) for tree in (stored, target)]
    had, has = (count[True] / max(count.total(), 1) for count in ends)
    if has > 0.9 and had < 0.5:
        yield Candidate((Step(rules.rename("([^/]+)$", r"\1/value"), "every leaf of the target is called value"),), 0)
    elif had > 0.9 and has < 0.5:
        yield Candidate((Step(rules.rename("([^/]+)/value$", r"\1"), "every stored leaf is called value"),), 0)
