"""When two names are likely to mean one thing: equal numbers in a row of names, or words that begin alike."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

from flax_ckpt_compat._core.tree import Branch

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Words that say nothing about which layer it is.
_GENERIC = frozenset(("layer", "layers", "block", "blocks", "module", "unit"))
_MAX_PAIRS = 2500
_NUMBERED = re.compile(r"(.*?)(\d+)")


@functools.lru_cache(10_000)
def numbered(name: str) -> tuple[str, int] | None:
    """(text before the number, number) of a name that ends in one; None for other names."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def natural(names: Iterable[str]) -> list[str]:
    """Names in the order of the numbers in them."""
    return sorted(names, key=_natural_key)


def _natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in split(name)], name


def in_order(node: Branch) -> Branch:
    """Return the tree with all names in natural order."""
    children = node.children
    return dataclasses.replace(
        node,
        children={
            name: in_order(child) if isinstance(child := children[name], Branch) else child
            for name in natural(children)
        },
    )


def split(name: str) -> list[str]:
    """Split a name before and after its numbers."""
    return [part for part in re.split(r"(\d+)", name) if part]


@functools.lru_cache(10_000)
def words(name: str) -> frozenset[str]:
    """Return the lower-case words of a name in snake or camel case."""
    return frozenset(word.lower() for word in _WORDS.findall(name))


def akin(one: str, other: str, common: frozenset[str] = frozenset()) -> bool:
    """Return whether a word of one name begins with a word of the other; ``common`` words do not count."""
    common = common | _GENERIC
    if any(_begin_alike(left, right) for left in words(one) - common for right in words(other) - common):
        return True
    return _initials(one) in words(other) or _initials(other) in words(one)


@functools.lru_cache(10_000)
def _initials(name: str) -> str:
    """``bn`` of ``BatchNorm_0``; nothing for single words."""
    found = _WORDS.findall(name)
    return "".join(word[0].lower() for word in found) if len(found) > 1 else "-"


def contains(one: str, other: str) -> bool:
    """Return whether one name is a whole part of the other, as ``h1`` is of ``h1_layer`` and ``my_h1``."""
    short, long = sorted((one, other), key=len)
    return short in long and re.search(rf"(?<![A-Za-z0-9]){re.escape(short)}(?![a-z0-9])", long) is not None


def _begin_alike(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    # A single letter says something only where the field knows it: query, key, value, out.
    return long.startswith(short) and (len(short) > 1 or short == long or short in "qkvo")


def tells_apart(olds: tuple[str, str], news: tuple[str, str]) -> bool | None:
    """Whether names say that the first old one became the first new one and the second the second.

    Args:
        olds: two different stored names.
        news: two different names of the target.

    Returns:
        True; False where they say the opposite, or two things at once; None where they say nothing.
    """
    if olds == news:
        return True
    if olds == news[::-1]:
        return False
    counted = [numbered(name) for name in (*olds, *news)]
    by_number = _by_number(*counted)
    if by_number is not None and _row(olds) and _row(news):
        return by_number
    by_word = _by_word(olds, news)
    if by_number is None or by_word is None:
        return by_word if by_number is None else by_number
    return by_number and by_word


def _row(names: tuple[str, str]) -> bool:
    """Return whether names differ in their number alone."""
    one, other = (numbered(name) or (name, 0) for name in names)
    return one[0] == other[0]


def _by_number(*counted: tuple[str, int] | None) -> bool | None:
    """Whether the numbers run alike; None where they say nothing."""
    first, second, third, fourth = counted
    if first is None or second is None or third is None or fourth is None:
        return None
    if first[1] == second[1] and third[1] == fourth[1]:
        return None
    if first[0] != second[0] or third[0] != fourth[0]:
        # Numbers of different rows: they must at least not contradict.
        crossed = (first[1], second[1]) == (fourth[1], third[1]) and first[1] != second[1]
        return False if crossed else None
    return (first[1] - second[1]) * (third[1] - fourth[1]) > 0


def _by_word(olds: tuple[str, str], news: tuple[str, str]) -> bool | None:
    """Whether the words that differ go together; None where they say nothing."""
    within = [contains(old, new) for old, new in zip(olds, news, strict=True)]
    if all(within) and not any(contains(old, new) for old, new in zip(olds, news[::-1], strict=True)):
        return True
    common_old = words(olds[0]) & words(olds[1])
    common_new = words(news[0]) & words(news[1])
    common = common_old | common_new
    straight = [akin(old, new, common) for old, new in zip(olds, news, strict=True)]
    crossed = [akin(old, new, common) for old, new in zip(olds, news[::-1], strict=True)]
    if any(crossed):
        return False
    if not any(straight):
        return None
    # One of the two is enough only where it is the very same name.
    exact = any(old == new and numbered(old) is None for old, new in zip(olds, news, strict=True))
    return True if all(straight) or exact else None


def pair_up(olds: Sequence[str], news: Sequence[str]) -> list[tuple[str, str]]:
    """Old names with new ones: those akin only to each other first, the others in their natural order."""
    pairs = []
    left, right = natural(olds), natural(news)
    common = frozenset.intersection(*map(words, left)) if len(left) > 1 else frozenset()
    common |= frozenset.intersection(*map(words, right)) if len(right) > 1 else frozenset()
    for old in list(left) if len(left) * len(right) <= _MAX_PAIRS else ():
        near = [new for new in right if akin(old, new, common)]
        if len(near) == 1 and sum(akin(other, near[0], common) for other in left) == 1:
            pairs.append((old, near[0]))
            left.remove(old)
            right.remove(near[0])
    numbers = {numbered(new): new for new in right if numbered(new)}
    stems = {found[0] for found in numbers if found}
    for old in list(left):
        # Equal numbers before equal places, so that a row with a gap keeps its numbers.
        found = numbered(old)
        new = numbers.get((next(iter(stems)), found[1])) if found and len(stems) == 1 else None
        if new is not None and new in right and len(left) != len(right):
            pairs.append((old, new))
            left.remove(old)
            right.remove(new)
    return pairs + list(zip(left, right, strict=False))
