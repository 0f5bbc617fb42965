"""Compare names: numbers in a row, words with the same beginning, words of different meaning."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from flax_ckpt_compat._core.numbered_names import numbered
from flax_ckpt_compat._core.tree import Path


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
BY_FLAX = re.compile(r"[A-Z]\w*_\d+")  # names that linen gives
# Words that say nothing about which layer it is; the first ones in no name at all.
_GENERIC = _set("layer layers block blocks module unit")
_SAY_NOTHING = _GENERIC | _set("modules units stage stages part parts my net network model scan proj projection params")
# Words for classes of layers; those of one class begin alike. The first ones are parts that hold several layers.
_COMPOSITES = {
    "attention": "attention", "attn": "attention", "mha": "attention", "mlp": "mlp", "ffn": "mlp", "ff": "mlp",
    "feedforward": "mlp", "lstm": "lstm", "gru": "gru", "rnn": "rnn",
}  # fmt: skip
_CLASSES = _COMPOSITES | {
    "dense": "dense", "linear": "dense", "fc": "dense", "conv": "conv", "norm": "norm", "bn": "batch norm",
    "batchnorm": "batch norm", "ln": "layer norm", "layernorm": "layer norm", "gn": "group norm",
    "groupnorm": "group norm", "rmsnorm": "rms norm",
}  # fmt: skip
_NORMS = _set("batch layer group rms instance")
# In names that linen gives, these belong to the class.
_OF_CLASSES = _set("multi head dot product self cell optimized simple transpose general local embed")
COPIES = _set("ema avg average averaged target teacher student shadow slow momentum frozen old")
# One of them more or less in a name makes it another thing, of which there often are several side by side.
_TELLING = COPIES | _set(
    "online fast source image text audio video left right up down forward backward fwd bwd in out input output pre "
    "post first last final inner outer new local global query key value mean std var log min max pos neg positive "
    "negative real fake policy actor critic reward encoder decoder generator discriminator aux self cross train eval "
    "vision visual speech language start end top bottom adapter lora"
)
# Words of the field for one thing.
_SYNONYMS = {"classifier": "head", "logits": "head", "gate": "router"}
LETTERS = {"q": "query", "k": "key", "v": "value", "o": "out", "in": "input"}
# Short forms that are no beginning of the word, or also one of another word: ``pos`` is not short for ``post``.
_SHORT = {
    "pos": "positi", "out": "output", "in": "input", "fwd": "forward", "bwd": "backward", "img": "image", "txt": "text",
    "cls": "class", "tok": "token", "neg": "negative", "disc": "discriminator", "up": "upsampl", "down": "downsampl",
}  # fmt: skip
_ALIASES = (
    _set("kernel weight weights w"), _set("embedding table weight weights w"), _set("scale gamma weight g"),
    _set("bias beta b offset"),
)  # fmt: skip


def unnumbered(path: Path) -> Path:
    """Return a key path with ``#`` for the numbers in it."""
    return tuple(map(_unnumbered, path))


@functools.lru_cache(100_000)
def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def natural(names: Iterable[str]) -> list[str]:
    """Return names in the order of the whole numbers in them: ``x1.2`` before ``x1.10``."""

    def key(name: str) -> tuple[list[tuple[float, str]], str]:
        parts = filter(None, re.split(r"(\d+)", name))
        return [(float(part), "") if part.isdecimal() else (-1, part) for part in parts], name

    return sorted(names, key=key)


@functools.lru_cache(100_000)
def words(name: str) -> frozenset[str]:
    """Return the lower-case words of a name in snake or camel case."""
    return frozenset(word.lower() for word in _WORDS.findall(name))


def akin(one: str, other: str, common: frozenset[str] = frozenset()) -> bool:
    """Return whether a word of one name starts with a word of the other, except ``common`` words."""
    common = common | _GENERIC
    if any(_alike(left, right) for left in words(one) - common for right in words(other) - common):
        return True
    return _initials(one) in words(other) or _initials(other) in words(one)


@functools.lru_cache(100_000)
def _initials(name: str) -> str:
    """Return ``bn`` for ``BatchNorm_0``; nothing for single words."""
    found = _WORDS.findall(name)
    return "".join(word[0].lower() for word in found) if len(found) > 1 else "-"


@functools.lru_cache(100_000)
def _read(name: str) -> tuple[str, frozenset[str]]:
    """Return the class of layer in a name, if any, and its other meaningful words."""
    found = words(name)
    kind = next((_CLASSES[word] for word in sorted(found) if word in _CLASSES), "")
    if kind == "norm" and found & _NORMS:
        kind = f"{min(found & _NORMS)} norm"
        found -= _NORMS
    found = frozenset(_SYNONYMS.get(word, word) for word in found - _CLASSES.keys() - _SAY_NOTHING)
    longer = frozenset(word for word in found if len(word) > 1 or word in LETTERS)
    found = longer if longer or numbered(name) else found
    return kind, found - _OF_CLASSES if BY_FLAX.fullmatch(name) else found


def may_be_one(old: Path, new: Path, *, leaf: bool = False) -> bool:
    """Return whether two different names may belong to one layer (or leaf): words that are alike, or no words."""
    if leaf and old and new and any({old[-1], new[-1]} <= alias for alias in _ALIASES):
        old, new = old[:-1], new[:-1]
    if not old or not new:
        return COPIES.isdisjoint(word for name in (*old, *new) for word in words(name))
    ours, theirs = (frozenset().union(*(_read(name)[1] for name in names)) for names in (old, new))
    if not (_same_words(ours, theirs) if ours and theirs else _may_be_unnamed(old, new, ours | theirs)):
        return False
    one, other = _read(old[-1])[0], _read(new[-1])[0]
    any_norm = "norm" in (one, other) and one.endswith("norm") and other.endswith("norm")
    return (not one or not other or one == other or any_norm) and not _other_number(old, new)


def _same_words(ours: frozenset[str], theirs: frozenset[str]) -> bool:
    """Return whether each word of one name has its like in the other."""
    return all(any(_alike(word, other) for other in theirs) for word in ours) and all(
        any(_alike(word, other) for other in ours) for word in theirs
    )


def _may_be_unnamed(old: Path, new: Path, found: frozenset[str]) -> bool:
    """Return whether a name without words of its own may be that of a layer with words in the other.

    ``Dense_0`` may be any layer that got a name, but ``layers`` or ``1`` is no encoder, ``norm`` no ``pre_norm``."""
    unnamed = next(path[-1] for path in (old, new) if not any(_read(name)[1] for name in path))
    kinds = {_read(old[-1])[0], _read(new[-1])[0]}
    if found and len(kinds) > 1 and not kinds.isdisjoint(_COMPOSITES.values()):
        return False
    return found.isdisjoint(COPIES if numbered(unnamed) and _read(unnamed)[0] else _TELLING)


def core(old: Path, new: Path) -> tuple[Path, Path]:
    """Return the parts of two key paths between their common beginning and end."""
    start = _same_start(old, new)
    old, new = old[start:], new[start:]
    end = _same_start(old[::-1], new[::-1])
    return old[: len(old) - end], new[: len(new) - end]


def _same_start(one: Path, other: Path) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def told_apart(one: tuple[Path, Path], other: tuple[Path, Path]) -> bool:
    """Return whether names pair two old paths with two new ones: by the order of their numbers, or by words."""
    if one[0] == other[0] or one[1] == other[1]:
        return True
    olds, news = (core(left, right) for left, right in zip(one, other, strict=True))
    numbers = [[int(number) for number in re.findall(r"\d+", "/".join(path))] for path in (*olds, *news)]
    before, after = ([(a, b) for a, b in zip(*side, strict=False) if a != b] for side in (numbers[:2], numbers[2:]))
    if before and after:  # several numbers may have changed places
        changes = [(old < old2, new < new2) for (old, old2), (new, new2) in zip(before, after, strict=False)]
        return len(before) == len(after) and all(one == other for one, other in changes)
    (old, old2), (new, new2) = (["_".join(path) for path in side] for side in (olds, news))
    common = (words(old) & words(old2)) | (words(new) & words(new2))
    is_crossed = akin(old, new2, common) or akin(old2, new, common)
    return akin(old, new, common) and akin(old2, new2, common) and not is_crossed


def _alike(one: str, other: str) -> bool:
    """Return whether two words are one: a letter that the field knows, a short form, the beginning of the other."""
    short, long = sorted((LETTERS.get(one, one), LETTERS.get(other, other)), key=len)
    if short == long or short + "s" == long or (short in _SHORT and long.startswith(_SHORT[short])):
        return True
    return len(short) > 2 and short not in _TELLING and long.startswith(short)


def _other_number(old: Path, new: Path) -> bool:
    """Return whether only the number of a name changes, unless linen numbers it: ``expert_1``, ``expert_2``."""
    one, other = numbered(old[-1]), numbered(new[-1])
    if one is None or other is None or BY_FLAX.fullmatch(old[-1]) or BY_FLAX.fullmatch(new[-1]):
        return False
    return one[1] != other[1] and (one[0] == other[0] or any(_read(old[-1])))
