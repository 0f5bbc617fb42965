"""Whether two names may be those of one layer: what they say beside its class and its number must be the same."""

from __future__ import annotations

import functools
import re

from flax_ckpt_compat._core.tree import Path
from flax_ckpt_compat._suggest._akin import numbered, words


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


_BY_FLAX = re.compile(r"[A-Z]\w*_\d+")
_CLASSES = {
    "dense": "dense", "linear": "dense", "fc": "dense", "conv": "conv", "mlp": "mlp", "lstm": "lstm", "gru": "gru",
    "rnn": "rnn", "attention": "attention", "attn": "attention", "mha": "attention", "norm": "norm",
    "bn": "batch norm", "batchnorm": "batch norm", "ln": "layer norm", "layernorm": "layer norm",
    "gn": "group norm", "groupnorm": "group norm", "rmsnorm": "rms norm",
}  # fmt: skip
_NORMS = frozenset(("batch", "layer", "group", "rms", "instance"))
# In names that Flax gave, these belong to the class.
_OF_CLASSES = _set("multi head dot product self cell optimized simple transpose general local embed")
_SAY_NOTHING = _set(
    "layer layers block blocks module modules unit units stage stages part parts my net network model scan"
)
# One of them more or less in a name makes it another thing, of which there often are several side by side.
_TELLING = _set(
    "ema avg average averaged target online teacher student shadow slow fast momentum frozen source image text audio "
    "video left right up down forward backward fwd bwd in out input output pre post first last final inner outer old "
    "new local global query key value mean std var log min max pos neg positive negative real fake policy actor critic "
    "reward encoder decoder generator discriminator aux self cross train eval"
)
_COPIES = _set("ema avg average averaged target teacher student shadow slow momentum frozen old")
_LETTERS = {"q": "query", "k": "key", "v": "value", "o": "out", "in": "input"}
_ALIASES = (
    frozenset(("kernel", "weight", "weights", "w")),
    frozenset(("embedding", "table", "weight", "weights", "w")),
    frozenset(("scale", "gamma", "weight", "g")),
    frozenset(("bias", "beta", "b")),
)


@functools.lru_cache(10_000)
def _read(name: str) -> tuple[str, frozenset[str]]:
    """Class of layer that a name tells, if any, and the other words that say something."""
    found = words(name)
    classes = [_CLASSES[word] for word in sorted(found) if word in _CLASSES]
    if "norm" in found and found & _NORMS:
        classes = [f"{min(found & _NORMS)} norm"]
        found -= _NORMS
    found = found - _CLASSES.keys() - _SAY_NOTHING
    if _BY_FLAX.fullmatch(name):
        found -= _OF_CLASSES
    if numbered(name):
        found = frozenset(word for word in found if len(word) > 1 or word in _LETTERS)
    if not found and classes and not _is_counted(name, classes[0]):
        found = frozenset(classes[0].split()[-1:])  # attn and mlp are names as encoder is
    return (classes[0] if classes else ""), found


def _is_counted(name: str, kind: str) -> bool:
    """Return whether a name only numbers the layers of a class: Dense_0, fc1, conv2."""
    return _BY_FLAX.fullmatch(name) is not None or (kind in ("dense", "conv") and numbered(name) is not None)


def may_be_one(old: Path, new: Path, *, leaf: bool = False) -> bool:
    """Return whether the names of a layer allow it to be the same one.

    Args:
        old: the names in which the checkpoint differs from the target.
        new: the target's for them.
        leaf: whether the last names are those of a leaf.
    """
    if leaf and old and new and (old[-1] == new[-1] or any({old[-1], new[-1]} <= alias for alias in _ALIASES)):
        old, new = old[:-1], new[:-1]
    if old[:2] == ("optimizer", "target"):  # where flax.optim had the parameters
        old = old[2:]
    if not _same_words(_said(old), _said(new)):
        return False
    return not old or not new or (_same_class(old[-1], new[-1]) and not _other_number(old, new))


def _said(names: Path) -> frozenset[str]:
    return frozenset().union(*(_read(name)[1] for name in names))


def _same_class(old: str, new: str) -> bool:
    one, other = _read(old)[0], _read(new)[0]
    any_norm = "norm" in (one, other) and one.endswith("norm") and other.endswith("norm")
    return not one or not other or one == other or any_norm


def _same_words(old: frozenset[str], new: frozenset[str]) -> bool:
    """Return whether two names mean the same: no word of one contradicts the other, and neither names a copy."""
    if not old or not new:
        return not (old | new) & _COPIES
    more_old = {word for word in old if not any(_alike(word, other) for other in new)}
    more_new = {word for word in new if not any(_alike(word, other) for other in old)}
    return not (more_old and more_new) and not (more_old | more_new) & _TELLING


def _alike(one: str, other: str) -> bool:
    short, long = sorted((_LETTERS.get(one, one), _LETTERS.get(other, other)), key=len)
    return short == long or (len(short) > 2 and long.startswith(short))


def _other_number(old: Path, new: Path) -> bool:
    """Return whether only the number of a name changes, unless Flax numbers it: ``expert_1``, ``expert_2``."""
    one, other = numbered(old[-1]), numbered(new[-1])
    if one is None or other is None or _BY_FLAX.fullmatch(old[-1]) or _BY_FLAX.fullmatch(new[-1]):
        return False
    return one[1] != other[1] and len(old) == len(new) and (one[0] == other[0] or any(_read(old[-1])))
