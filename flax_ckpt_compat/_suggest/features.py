"""Describe leaves and names for comparison: looks, contents of subtrees, optimizers' leaves; numbers and words."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.dtypes import is_float, is_integer
from flax_ckpt_compat._core.numbered_names import numbered
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, is_key, shape_and_dtype


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


T = TypeVar("T")
Look = tuple[tuple[int, ...], str]  # shape; kind: f(loat), i(nteger), b(ool), c(omplex), key, text
Contents = Counter[tuple[str, Look]]  # number of leaves of a name and look in a subtree, wherever in it
EMPTY: Look = ((), "empty")
KEPT: Look = ((), "kept")
_PYTHON = {bool: "b", int: "i", float: "f", complex: "c"}
_KINDS = {LeafKind.BOOL: "b", LeafKind.INT: "i", LeafKind.FLOAT: "f", LeafKind.COMPLEX: "c"}
# Names that optax, and flax.optim before it, give to the arrays that they keep beside each parameter.
MOMENTS = _set(
    "mu nu trace acc_grads mu_max nu_max v v_row v_col m momentum grad_ema grad_sq_ema ema sum_of_squares mean_grads "
    "prev_updates e_g e_x second_moment diag_accumulator"
)
_MAX_PAIRS = 900
_OPTIMIZER = re.compile(r"opt|optim|optimizer|opt_states?|optim_states?|optimizer_states?|tx_state|opt_\w+|\w+_opt")
_MARKS = MOMENTS | {"count", "hyperparams", "inner_state", "inner_states", "mini_step"}
# Orders of axes between torch's weights and Flax's kernels, by the number of axes.
_TORCH_ORDERS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 0),),
    3: ((2, 1, 0),),
    4: ((2, 3, 1, 0), (3, 2, 0, 1), (2, 3, 0, 1)),
    5: ((2, 3, 4, 1, 0), (4, 3, 0, 1, 2), (3, 4, 0, 1, 2)),
}
_WEIGHTS = _set("weight weights w")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_STEM = re.compile(r"([A-Za-z]*)[^A-Za-z\d]*\d+")  # the word before a number
BY_FLAX = re.compile(r"[A-Z]\w*_\d+")  # names that linen gives
# Words that say nothing about which layer it is; the first ones in no name at all.
_GENERIC = _set("layer layers block blocks module unit")
_SAY_NOTHING = _GENERIC | _set("modules units stage stages part parts my net network model scan params of")
# Words for classes of layers; those of one class begin alike. The first ones are parts that hold several layers.
_COMPOSITES = {
    "attention": "attention", "attn": "attention", "mha": "attention", "mlp": "mlp", "ffn": "mlp", "ff": "mlp",
    "feedforward": "mlp", "lstm": "lstm", "gru": "gru", "rnn": "rnn"
}  # fmt: skip
_CLASSES = _COMPOSITES | {
    "dense": "dense", "linear": "dense", "fc": "dense", "proj": "dense", "projection": "dense", "conv": "conv",
    "norm": "norm", "bn": "batch norm", "batchnorm": "batch norm", "ln": "layer norm", "layernorm": "layer norm",
    "gn": "group norm", "groupnorm": "group norm", "rmsnorm": "rms norm"
}  # fmt: skip
_NORMS = _set("batch layer group rms instance")
# In names that linen gives, these belong to the class.
_OF_CLASSES = _set("multi head dot product self cell optimized simple transpose general embed")
COPIES = _set("ema avg average averaged target teacher student shadow slow momentum frozen old")
# One of them more or less in a name makes it another thing, of which there often are several side by side.
_TELLING = COPIES | _set(
    "online fast source image text audio video left right up down forward backward fwd bwd in out input output pre "
    "post first last final inner outer new local global query key value mean std var log min max pos neg positive "
    "negative real fake policy actor critic reward encoder decoder generator discriminator aux self cross train eval "
    "vision visual speech language start end top bottom adapter lora"
)
_HEADS = _set("head classifier logits")  # what a ``fc``, of which nothing else is said, may be
LETTERS = {"q": "query", "k": "key", "v": "value", "o": "out", "in": "input"}  # words of the field for one thing
# Short forms that are no beginning of the word, or also one of another word: ``pos`` is not short for ``post``.
_SHORT = _set(
    "pos-positi out-output fwd-forward bwd-backward img-image txt-text cls-class tok-token neg-negative up-upsampl "
    "down-downsampl dis-disc dis-discriminator disc-discriminator gen-generator enc-encoder dec-decoder emb-embed "
    "obs-observation act-action val-value temp-temperature dyn-dynamic pred-predict repr-representation hid-hidden "
    "lang-language feat-feature mem-memory seq-sequence ref-reference rel-relative abs-absolute loc-location"
)
_ALIASES = (
    _WEIGHTS | {"kernel"}, _set("embedding table weight weights w"), _set("scale gamma weight g"),
    _set("bias beta b offset")
)  # fmt: skip


@functools.cache
def kind_of(dtype: Any) -> str:
    """Return the kind of an array's dtype; unlike in ``dtype.kind``, those of ml_dtypes are floats or integers."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    dtype = np.dtype(dtype)
    return "f" if is_float(dtype) else "i" if is_integer(dtype) else {"b": "b", "c": "c"}.get(dtype.kind, "text")


def look(leaf: Any) -> Look:
    """Return the look of a leaf, stored, derived, or a target's own."""
    if isinstance(leaf, LeafHandle):
        if leaf.kind is LeafKind.PRNG_KEY:
            return leaf.shape[:-1], "key"
        return leaf.shape, kind_of(leaf.dtype) if leaf.dtype is not None else _KINDS.get(leaf.kind, "text")
    if leaf is None or isinstance(leaf, Branch):
        return EMPTY
    if leaf is Own.KEEP_TARGET:
        return KEPT
    if isinstance(leaf, Derived):
        kind = "key" if is_key(leaf) else "text"
        return leaf.shape or (), kind_of(leaf.dtype) if leaf.dtype is not None else kind
    shape, dtype = shape_and_dtype(leaf)
    if shape is not None and dtype is not None:
        return shape, kind_of(dtype)
    return (), _PYTHON.get(type(leaf), "text")


def fits(stored: Look, target: Look) -> bool:
    """Return whether a stored leaf fits the target's leaf of the same path."""
    # A raw key stands where a typed one is asked for, or the other way round: restoring judges those.
    keys = "key" in (stored[1], target[1])
    return stored == target or stored[1] == "kept" or keys or (stored[0] == target[0] and stored[1] != "empty")


def flatten(tree: Node) -> dict[Path, Look]:
    """Map the key paths below a node to the looks of the leaves; nodes without children are `EMPTY`."""
    return {path: look(leaf) for path, leaf in iter_leaves(tree)}


class Spot(NamedTuple):
    """Role of a leaf."""

    field: str  # the optimizer's name for it (``mu``, ``count``, …); empty for parameters, statistics and the rest
    suffix: Path  # of the parameter that it belongs to, or of the leaf itself


def bare(path: Path) -> Path:
    """Return a key path without NNX's trailing ``value``."""
    return path[:-1] if len(path) > 1 and path[-1] == "value" else path


class Roles:
    """Distinguish the leaves of optimizers from others, by the names in one tree."""

    def __init__(self, tree: Node):
        self.roots = set(_optimizer_roots(tree, ()))

    def root_of(self, path: Path) -> Path:
        """Return the root of the optimizer's state that a key path is in; () if it is in none."""
        return next((root for root in self.roots if path[: len(root)] == root), ())

    def is_optimizer(self, path: Path) -> bool:
        """Return whether a key path is at or below the root of an optimizer's state."""
        return bool(self.root_of(path)) or () in self.roots

    def spot(self, path: Path) -> Spot:
        """Return the role of the leaf at a key path."""
        if not self.is_optimizer(path):
            return Spot("", path)
        for number, name in enumerate(path):
            if name in MOMENTS and number:
                return Spot(name, bare(path[number + 1 :]))
        return Spot(bare(path)[-1], ())


def _optimizer_roots(tree: Node, path: Path, depth: int = 1) -> Iterator[Path]:
    """Yield the key paths of optimizers' states; ``depth`` is that of one without a name of its own."""
    if not isinstance(tree, Branch) or "params" in path or (path and path[-1] in ("batch_stats", "ema_params")):
        return
    is_named = _is_named_optimizer(path[-1:], tree) and not _holds_more(tree)
    if is_named or path[-1:] == ("param_states",):
        yield path
    elif {"mu", "nu"} <= tree.children.keys() or {"trace"} == tree.children.keys():
        yield path[:depth]
    else:
        depth = len(path) + 1 if "params" in tree.children else depth  # what is beside parameters holds none
        for name, child in tree.children.items():
            yield from _optimizer_roots(child, (*path, name), depth)


def _is_named_optimizer(name: Path, tree: Branch) -> bool:
    if not name or _OPTIMIZER.fullmatch(name[0]) is None:
        return False
    pre_optax = {"target", "state"} <= tree.children.keys()
    has_marks = pre_optax or any(_MARKS & branch.children.keys() for _, branch in iter_branches(tree))
    return has_marks or all(look(leaf) == EMPTY for _, leaf in iter_leaves(tree))


def _holds_more(tree: Branch) -> bool:
    """Return whether a node named like an optimizer holds parameters, too, beside the optimizer's state."""
    branches = {name: child for name, child in tree.children.items() if isinstance(child, Branch) and child.children}
    states = [name for name, child in branches.items() if _is_named_optimizer((name,), child)]
    return bool(states) and len(branches) > len(states)


class SubtreeMemo:
    """Cache of the contents of subtrees, of which many are equal layers."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[Node, int]] = {}  # with the node, so that its id stays its own
        self._contents: dict[tuple[int, str], Contents] = {}

    def named(self, node: Node) -> int:
        """Return a number that is equal for equal names, shapes and kinds of all leaves."""
        if not isinstance(node, Branch):
            return hash(look(node))
        known = self._named.get(id(node))
        if known is None:
            number = hash(frozenset([(name, self.named(child)) for name, child in node.children.items()]))
            known = self._named[id(node)] = (node, number)
        return known[1]

    def contents(self, node: Node, name: str = "") -> Contents:
        """Return how many leaves of each name and look a subtree has, regardless of its modules' names."""
        key = (self.named(node), name)
        if key not in self._contents:
            found = self._contents[key] = Counter()
            for own, child in node.children.items() if isinstance(node, Branch) else ((name, node),):
                if isinstance(child, Branch):
                    found.update(self.contents(child))
                elif (seen := look(child)) != EMPTY:
                    found[own, seen] += 1
        return self._contents[key]

    def print(self, node: Node) -> int:
        """Return a number that is equal for equal contents."""
        return hash(frozenset(self.contents(node).items())) if isinstance(node, Branch) else self.named(node)

    def has_arrays(self, node: Node) -> bool:
        """Return whether a subtree holds arrays: numbers and texts alone are too easily confused."""
        return any(shape for _, (shape, _) in self.contents(node))


def turned(stored: tuple[int, ...], wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the orders of axes, between torch's layout and Flax's, in which an array has a wanted shape."""
    orders = _TORCH_ORDERS.get(len(stored), ()) if len(stored) == len(wanted) else ()
    return [order for order in orders if tuple(stored[axis] for axis in order) == wanted]


def is_torch_name(one: str, other: str) -> bool:
    """Return whether one name is that of torch's weights, and the other Flax's of kernels."""
    return "kernel" in (one, other) and not _WEIGHTS.isdisjoint((one, other))


def unnumbered(path: Path) -> Path:
    """Return a key path with ``#`` for the numbers in it."""
    return tuple(map(_unnumbered, path))


@functools.lru_cache(100_000)
def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


@functools.lru_cache(40_000)
def numbers(path: Path) -> tuple[str, ...]:
    """Return the numbers in a key path."""
    return tuple(re.findall(r"\d+", "/".join(path)))


def natural(things: Iterable[T], name_of: Callable[[T], str] = str) -> list[T]:
    """Return things in the order of the whole numbers in their names: ``x1.2`` before ``x1.10``."""
    return sorted(things, key=lambda thing: _in_numbers(name_of(thing)))


@functools.lru_cache(40_000)
def _in_numbers(name: str) -> tuple[list[tuple[float, str]], str]:
    parts = filter(None, re.split(r"(\d+)", name))
    return [(float(part), "") if part.isdecimal() else (-1, part) for part in parts], name


@functools.lru_cache(100_000)
def words(name: str) -> frozenset[str]:
    """Return the lower-case words of a name in snake or camel case."""
    return frozenset(word.lower() for word in _WORDS.findall(name))


def copy_words(path: Path) -> frozenset[str]:
    """Return the words by which the names of a key path call it a copy, such as ``ema``."""
    return frozenset().union(*map(words, path)) & COPIES


def akin(one: str, other: str, common: frozenset[str] = frozenset()) -> bool:
    """Return whether a word of one name starts with a word of the other, except ``common`` words."""
    common = common | _GENERIC
    if any(_alike(left, right) for left in words(one) - common for right in words(other) - common):
        return True
    return _initials(one) in words(other) or _initials(other) in words(one)


def pair_up(olds: Sequence[str], news: Sequence[str]) -> list[tuple[str, str]]:
    """Pair old names with new ones: those akin to each other alone, by words that not all have; then in order."""
    pairs, left, right = list[tuple[str, str]](), natural(olds), natural(news)
    common = frozenset().union(*(frozenset.intersection(*map(words, side)) for side in (left, right) if len(side) > 1))
    for old in list(left) if 1 < len(left) * len(right) <= _MAX_PAIRS else ():
        near = [new for new in right if akin(old, new, common)]
        if len(near) == 1 and sum(akin(other, near[0], common) for other in left) == 1:
            pairs.append((old, near[0]))
            left.remove(old)
            right.remove(near[0])
    return pairs + list(zip(left, right, strict=False))


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
    found = frozenset(word for word in found if _CLASSES.get(word) != kind)  # ``linear_attn`` is more than ``attn``
    if kind == "norm" and found & _NORMS:
        kind = f"{min(found & _NORMS)} norm"
        found -= _NORMS
    found = frozenset(_CLASSES.get(word, LETTERS.get(word, word)).split()[-1] for word in found - _SAY_NOTHING)
    longer = frozenset(word for word in found if len(word) > 1)
    found = longer if longer or numbered(name) else found
    return kind, found - _OF_CLASSES if BY_FLAX.fullmatch(name) else found


def may_be_one(old: Path, new: Path, known: Set[str], *, leaf: bool = False) -> bool:
    """Return whether two different names, of all ``known``, may belong to one layer (or leaf): alike, or no words."""
    if leaf and old and new and any({old[-1], new[-1]} <= alias for alias in _ALIASES):
        old, new = old[:-1], new[:-1]
    if not old or not new:
        return not copy_words((*old, *new))
    ours, theirs = (frozenset().union(*(_read(name)[1] for name in names)) for names in (old, new))
    one, other = _read(old[-1])[0], _read(new[-1])[0]
    if ours and theirs:
        sides = ((ours, theirs), (theirs, ours))
        may_be = all(any(_alike(word, like, strict=True) for like in likes) for own, likes in sides for word in own)
    else:  # ``Dense_0`` may be any layer that got a name; ``layers`` or ``1`` is no encoder, ``norm`` no ``pre_norm``
        unnamed = next(path[-1] for path in (old, new) if not any(_read(name)[1] for name in path))
        is_part = one != other and not {one, other}.isdisjoint(_COMPOSITES.values())
        telling = COPIES if BY_FLAX.fullmatch(unnamed) and _read(unnamed)[0] else _TELLING
        is_class = _read(unnamed)[0] and len(old + new) == 2 and "#" not in _unnumbered(unnamed)  # of no row
        may_be = not is_part and (ours | theirs <= _HEADS if is_class else telling.isdisjoint(ours | theirs))
    any_norm = "norm" in (one, other) and one.endswith("norm") and other.endswith("norm")
    return may_be and (not one or not other or one == other or any_norm) and not _other_number(old, new, known)


def core(old: Path, new: Path) -> tuple[Path, Path]:
    """Return the parts of two key paths between their common beginning and end."""
    start = same_start(old, new)
    old, new = old[start:], new[start:]
    end = same_start(old[::-1], new[::-1])
    return old[: len(old) - end], new[: len(new) - end]


def same_start(one: Path, other: Path) -> int:
    """Return how many names two key paths have in common before the first that differs."""
    unlike = (number for number, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(unlike, min(len(one), len(other)))


def told_apart(one: tuple[Path, Path], other: tuple[Path, Path]) -> bool:
    """Return whether names pair two old paths with two new ones: by the order of their numbers, or by words."""
    if one[0] == other[0] or one[1] == other[1]:
        return True
    olds, news = (core(left, right) for left, right in zip(one, other, strict=True))
    numbers = [[float(number) for number in re.findall(r"\d+", "/".join(path))] for path in (*olds, *news)]
    before, after = ([(a, b) for a, b in zip(*side, strict=False) if a != b] for side in (numbers[:2], numbers[2:]))
    rows = [len(set(map(unnumbered, side))) for side in (olds, news)]
    # Numbers tell in one row or, unless linen gives them anew, where they stay; several may have changed places.
    stay = numbers[:2] == numbers[2:] and (rows[0] == 1 or (rows[1] == 1 and not BY_FLAX.fullmatch(one[1][-1])))
    if before and after and (rows == [1, 1] or stay or len(before) > 1):
        stems = (_STEM.findall("/".join(side[0]).lower()) for side in (olds, news))
        unlike = [pair for pair in zip(*stems, strict=False) if not _alike(*pair)]
        if len(before) > 1 and len(unlike) > 1:  # a number may have gone with the word before it
            crossed = any(old and _alike(old, new) for (old, _), (_, new) in itertools.permutations(unlike, 2))
            if crossed or not _SAY_NOTHING.issuperset(filter(None, itertools.chain(*unlike))):
                return False
        changes = [(old < old2, new < new2) for (old, old2), (new, new2) in zip(before, after, strict=False)]
        return len(before) == len(after) and all(one == other for one, other in changes)
    (old, old2), (new, new2) = (["_".join(path) for path in side] for side in (olds, news))
    common = (words(old) & words(old2)) | (words(new) & words(new2))
    is_crossed = akin(old, new2, common) or akin(old2, new, common)
    return akin(old, new, common) and akin(old2, new2, common) and not is_crossed


def _alike(one: str, other: str, *, strict: bool = False) -> bool:
    """Return whether two words are one: a letter or short form that the field knows; not ``strict``, any beginning."""
    short, long = sorted((LETTERS.get(one, one), LETTERS.get(other, other)), key=len)
    if long in (short, short + "s") or any(f"{short}-{long[:end]}" in _SHORT for end in range(4, len(long) + 1)):
        return True
    may_be = len(short) > 2 and short not in _TELLING and long.startswith(short)
    return may_be and (not strict or (len(short) > 4 and bool(re.fullmatch("d?ing|d?er|ion|or|r", long[len(short) :]))))


def _other_number(old: Path, new: Path, known: Set[str]) -> bool:
    """Return whether only a number, or the last letter, changes: ``expert_1``, ``expert_2``; linen's may, from 0 on."""
    ours, theirs = ([part.lstrip("0") for part in re.findall(r"\d+|(?<=_)[a-z]$", path[-1])] for path in (old, new))
    stems = {(len(path), _unnumbered(path[-1]).rstrip("_#")) for path in (old, new)}
    if not ours or not theirs or ours == theirs:  # ``wi`` may be ``wi_0``, but no ``wi_1``
        return ours != theirs and any((*ours, *theirs)) and len(stems) == 1
    same = _unnumbered(old[-1]) == _unnumbered(new[-1])
    if BY_FLAX.fullmatch(old[-1]) or BY_FLAX.fullmatch(new[-1]):
        return same and re.sub(r"\d+$", "0", old[-1]) not in known
    return (any(_read(old[-1])) and (same or ours[-1] != theirs[-1])) or (same and ours[:-1] == theirs[:-1])
