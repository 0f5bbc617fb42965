"""Candidates from what is left over anywhere: layers of the same shapes at other places in the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.tree import Node, Path
from flax_ckpt_compat._suggest._akin import natural, numbered
from flax_ckpt_compat._suggest._layers import modules
from flax_ckpt_compat._suggest._looks import Look, Roles, bare, fits, flatten
from flax_ckpt_compat._suggest._names import Candidate, Step, plain

_MAX_LEFT = 400


def scattered(stored: Node, target: Node, had: Roles, has: Roles) -> Iterator[Candidate]:
    """Layers, then single leaves, that neither tree finds at their own place in the other."""
    one, other = flatten(stored), flatten(target)
    left = {path for path, seen in one.items() if path not in other or not fits(seen, other[path])}
    wanted = {path for path, seen in other.items() if path not in one or not fits(one[path], seen)}
    left = {path for path in left if not had.is_optimizer(path)}
    wanted = {path for path in wanted if not has.is_optimizer(path)}
    if len(left) > _MAX_LEFT * 10 or len(wanted) > _MAX_LEFT * 10:
        return
    found = list(_candidates(_pairs(_grouped(modules(stored), left), _grouped(modules(target), wanted)), "both hold"))
    if found:
        yield from found
    elif max(len(left), len(wanted)) < _MAX_LEFT:
        pairs = _pairs(_single(left, one, name=True), _single(wanted, other, name=True))
        yield from _candidates(pairs or _only(_single(left, one), _single(wanted, other)), "both are")


def _single(paths: set[Path], looks: dict[Path, Look], *, name: bool = False) -> dict[object, list[Path]]:
    """Leaves by what they look like, and by their own name; without plain numbers, which look too much alike."""
    groups: dict[object, list[Path]] = {}
    for path in sorted(paths):
        if looks[path][0]:
            groups.setdefault((looks[path], bare(path)[-1] if name else ""), []).append(path)
    return groups


def _only(olds: dict[object, list[Path]], news: dict[object, list[Path]]) -> list[tuple[Path, Path, object]]:
    return [(paths[0], news[key][0], key) for key, paths in olds.items() if len(paths) == len(news.get(key, ())) == 1]


def _grouped(found: dict[Path, dict[str, Look]], of: set[Path]) -> dict[object, list[Path]]:
    groups: dict[object, list[Path]] = {}
    for path, own in found.items():
        if any((*path, name) in of and shape for name, (shape, _) in own.items()):
            groups.setdefault(frozenset(own.items()), []).append(path)
    return groups


def _pairs(olds: dict[object, list[Path]], news: dict[object, list[Path]]) -> list[tuple[Path, Path, object]]:
    pairs: list[tuple[Path, Path, object]] = []
    for print_, paths in olds.items():
        one = [tuple(path.split("\0")) for path in natural("\0".join(path) for path in paths)]
        other = [tuple(path.split("\0")) for path in natural("\0".join(path) for path in news.get(print_, ()))]
        pairs.extend((old, new, print_) for old, new in zip(one, other, strict=False))
    return pairs


def _candidates(pairs: list[tuple[Path, Path, object]], what: str) -> Iterator[Candidate]:
    """One rename for each different change of names; changes that differ only in a number are one."""
    changes: dict[tuple[str, str], tuple[str, int]] = {}
    for old, new, print_ in pairs:
        if any("/" in name for name in (*old, *new)):
            continue
        change = _generalized(*_core(old, new))
        if change[0]:
            changes[change] = (_shown(print_), changes.get(change, ("", 0))[1] + 1)
    for (pattern, replacement), (shown, count) in changes.items():
        yield Candidate((Step(rules.rename(pattern, replacement), f"{what} {shown}"),), count)


def _core(old: Path, new: Path) -> tuple[Path, Path]:
    """What differs between two key paths, with one name more where nothing would be left of the old one."""
    while old and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    after: Path = ()
    while old and new and old[-1] == new[-1]:
        after = (old[-1], *after)
        old, new = old[:-1], new[:-1]
    if not old and after:
        return after[:1], (*new, after[0])
    return old, new


def _generalized(old: Path, new: Path) -> tuple[str, str]:
    counted = [numbered(name) for name in old]
    numbers = [found[1] for found in counted if found]
    if len(numbers) == 1:
        stem = next(found[0] for found in counted if found)
        same = [name for name in new if (found := numbered(name)) and found[1] == numbers[0]]
        if len(same) == 1:
            pattern = "/".join(rf"{re.escape(stem)}(\d+)" if numbered(name) else re.escape(name) for name in old)
            shown = [rf"{plain((numbered(name) or ('', 0))[0])}\1" if name == same[0] else plain(name) for name in new]
            return pattern, "/".join(shown)
    return "/".join(map(re.escape, old)), "/".join(map(plain, new))


def _shown(print_: object) -> str:
    if isinstance(print_, frozenset):
        shown = [f"{name} {shape}" for name, (shape, _) in sorted(print_)]
        return " and ".join(shown) if len(shown) < 4 else f"the same {len(shown)} leaves"
    return str(print_[0][0]) if isinstance(print_, tuple) else ""
