"""Candidates that make one layer of several or several of one, and lists of numbered names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches
from flax_ckpt_compat._suggest._akin import numbered, words
from flax_ckpt_compat._suggest._gaps import Gap, Prints
from flax_ckpt_compat._suggest._looks import Look, items
from flax_ckpt_compat._suggest._names import Candidate, Step


def families(children: dict[str, Node], prints: Prints) -> Iterator[tuple[str, int, Node]]:
    """(text before the number, how many, the first) of subtrees of equal leaves that are numbered 0, 1, …, n-1."""
    rows: dict[str, dict[int, Node]] = {}
    for name, node in children.items():
        if found := numbered(name):
            rows.setdefault(found[0], {})[found[1]] = node
    for stem, row in rows.items():
        if len(row) > 1 and row.keys() == set(range(len(row))) and len({prints.of(node) for node in row.values()}) == 1:
            yield stem, len(row), row[0]


def stacks(found: list[Gap], prints: Prints) -> Iterator[Candidate]:
    """Numbered layers that became one with a leading axis (``nn.scan``), and the other way round."""
    for gap in found:
        for stem, count, layer in families(gap.gone, prints):
            for level, inner in _inside(gap.new):
                shared = stacked_items(layer, count).items() & items(inner).items()
                if shared:
                    rule = rules.stack(rf"{re.escape(stem)}(\d+)", "/".join(level))
                    reason = f"{'/'.join((*gap.path, *level))} has a leading axis of {count}, there are {count} {stem}…"
                    yield Candidate((Step(rule, reason),), len(shared))
        for stem, count, layer in families(gap.new, prints):
            for level, inner in _inside(gap.gone):
                shared = stacked_items(layer, count).items() & items(inner).items()
                if shared and "{" not in stem:
                    rule = rules.unstack("/".join(level), f"{stem}{{}}")
                    reason = f"{'/'.join((*gap.path, *level))} has a leading axis of {count}, the target has {count}"
                    yield Candidate((Step(rule, f"{reason} {stem}…"),), len(shared) * count)
        yield from _unstacked_lists(gap, prints)


def _unstacked_lists(gap: Gap, prints: Prints) -> Iterator[Candidate]:
    """A subtree that became a list of the same or another name."""
    for name, node in gap.new.items():
        for _, count, layer in families(node.children, prints) if isinstance(node, Branch) else ():
            for level, inner in _inside(gap.gone):
                shared = stacked_items(layer, count).items() & items(inner).items()
                if shared and numbered(next(iter(node.children))) == ("", 0) and "{" not in name:
                    reason = (
                        f"{'/'.join((*gap.path, *level))} has a leading axis of {count}, {name} is a list of {count}"
                    )
                    yield Candidate(
                        (Step(rules.unstack("/".join(level), f"{name}/{{}}"), reason),), len(shared) * count
                    )


def stacked_items(layer: Node, count: int) -> dict[Path, Look]:
    """The leaves of a layer as they look stacked."""
    return {path: ((count, *shape), kind) for path, (shape, kind) in items(layer).items()}


def _inside(children: dict[str, Node]) -> Iterator[tuple[Path, Node]]:
    """Each child, and what lies below it as long as there is only one."""
    for name, child in children.items():
        level: Path = (name,)
        while True:
            yield level, child
            if not isinstance(child, Branch) or len(child.children) != 1 or len(level) > 2:
                break
            inner, child = next(iter(child.children.items()))
            level = (*level, inner)


def lists(found: list[Gap]) -> Iterator[Candidate]:
    """``layers_3`` that became ``layers/3``, and the other way round."""
    for gap in found:
        yield from _regrouped(gap.gone, gap.new, lambda stem, name: (rf"{re.escape(stem)}(\d+)", rf"{name}/\1"))
        yield from _regrouped(gap.new, gap.gone, lambda stem, name: (rf"{re.escape(name)}/(\d+)", rf"{stem}\1"))


def _regrouped(
    flat: dict[str, Node], nested: dict[str, Node], rule_of: Callable[[str, str], tuple[str, str]]
) -> Iterator[Candidate]:
    """Candidates for numbered names on one side and a list on the other."""
    rows: dict[str, dict[str, Node]] = {}
    for name, node in flat.items():
        if (found := numbered(name)) and found[0]:
            rows.setdefault(found[0], {})[str(found[1])] = node
    for stem, row in rows.items():
        for name, node in nested.items():
            if not isinstance(node, Branch) or not all(child.isdigit() for child in node.children):
                continue
            shared = {
                number: items(row[number]).items() & items(child).items()
                for number, child in node.children.items()
                if number in row
            }
            count = sum(map(len, shared.values()))
            if count:
                pattern, replacement = rule_of(stem, name)
                step = Step(
                    rules.rename(pattern, replacement), f"{name} is a list of {len(node.children)}, as {stem}… are"
                )
                yield Candidate((step,), count)


_ORDERS = (("query", "key", "value"), ("q", "k", "v"), ("key", "value"), ("k", "v"), ("gate", "up"))


def fused(found: list[Gap], prints: Prints) -> Iterator[Candidate]:
    """Layers side by side that became one, such as query, key and value; the order is a guess from the names."""
    for gap in found:
        for whole, parts in ((gap.new, gap.gone), (gap.gone, gap.new)):
            alike: dict[int, list[str]] = {}
            for name, node in parts.items():
                alike.setdefault(prints.of(node), []).append(name)
            for names in alike.values():
                for name, node in whole.items():
                    axis = _axis(parts[names[0]], node, len(names)) if len(names) > 1 else None
                    if axis is not None:
                        yield _fuse(_in_order(names), name, axis, split=whole is gap.gone)


def _fuse(names: list[str], whole: str, axis: int, *, split: bool) -> Candidate:
    reason = f"{whole} is as long as {len(names)} of them together; mind the order"
    given = () if axis == -1 else (axis,)
    rule = rules.split(whole, names, *given) if split else rules.fuse(names, whole, *given)
    return Candidate((Step(rule, reason),), 1)


def _in_order(names: list[str]) -> list[str]:
    for order in _ORDERS:
        placed = [name for word in order for name in names if any(part == word for part in words(name))]
        if sorted(placed) == sorted(names):
            return placed
    return names


def _axis(part: Node, whole: Node, count: int) -> int | None:
    """The axis, counted from the end, on which all leaves of the whole are that many times longer."""
    small, large = items(part), items(whole)
    if not small or small.keys() != large.keys():
        return None
    longest = max(len(shape) for shape, _ in small.values())
    for axis in range(-1, -longest - 1, -1):
        if all(_longer(small[path][0], axis, count) == large[path][0] for path in small):
            return axis
    return None


def _longer(shape: tuple[int, ...], axis: int, count: int) -> tuple[int, ...] | None:
    if len(shape) < -axis:
        return None
    at = len(shape) + axis
    return (*shape[:at], shape[at] * count, *shape[at + 1 :])


def modules(tree: Node) -> dict[Path, dict[str, Look]]:
    """Key path → own leaves of every branch that has some."""
    found = {}
    for path, branch in iter_branches(tree):
        own = {path[0]: seen for path, seen in items(branch).items() if len(path) == 1}
        if own:
            found[path] = own
    return found
