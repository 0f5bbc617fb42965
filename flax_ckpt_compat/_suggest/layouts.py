"""Tell how arrays lie otherwise, and the rules for it: rows, stacks, groups of layers, axes, heads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.numbered_names import numbered
from flax_ckpt_compat._core.text_formatting import literal, one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, joined, show_path
from flax_ckpt_compat._suggest.features import Contents, Look, bare, is_torch_name, turned, unnumbered

_AXES = (0, 1, 2, 3, -1)
# Names in a pattern, and shapes that need a rule each: more are no evidence.
_MAX_NAMES, _MAX_SHAPES = 12, 16
_MAX_LISTED = 3
ANY = "[^/]+"  # in a pattern, a name of any kind
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ProposedRule:
    """One proposed rule.

    Attributes:
        rule: see `flax_ckpt_compat.rules`.
        reason: evidence for it, in a few words.
        doubt: evidence against it, if any.
        keeps: key paths below which the target's own values stay, so that it prints as a comment.
    """

    rule: rules.Rule
    reason: str
    doubt: str = ""
    keeps: tuple[Path, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerRow:
    """Siblings numbered without a gap."""

    stem: str  # before the numbers; the name of a list
    slash: str  # ``/`` in a list: one branch holds its layers, by numbers alone
    first: int
    nodes: list[Node]  # in the order of the numbers

    @property
    def names(self) -> list[str]:
        """Return the names of all layers, in order."""
        return [f"{self.stem}{self.slash}{number}" for number in range(self.first, self.first + len(self.nodes))]

    @property
    def siblings(self) -> list[str]:
        """Return the names that the row takes among its siblings."""
        return [self.stem] if self.slash else self.names


def rows(children: dict[str, Node]) -> list[LayerRow]:
    """Return the rows of two or more layers among the children of a branch."""
    found: dict[tuple[str, str], dict[int, Node]] = {}
    for name, node in children.items():
        if not isinstance(node, Branch):
            continue
        if counted := numbered(name):
            found.setdefault((counted[0], ""), {})[counted[1]] = node
        inner = node.children.items()
        if "/" not in name and all(one.isdecimal() and isinstance(child, Branch) for one, child in inner):
            found[name, "/"] = {int(number): child for number, child in inner}
    return [
        LayerRow(*stem, min(layers), [layers[number] for number in sorted(layers)])
        for stem, layers in found.items()
        if len(layers) > 1 and max(layers) - min(layers) == len(layers) - 1
    ]


def rename(patterns: dict[str, str], reason: str) -> ProposedRule:
    """Return the step for one or several renames at once."""
    rule = rules.rename(*next(iter(patterns.items()))) if len(patterns) == 1 else rules.rename(patterns)
    return ProposedRule(rule, reason)


def stacked(
    top: str, names: Mapping[str, str], stacks: Mapping[str, str], why: tuple[str, str], *, stacking: bool, **given: int
) -> list[ProposedRule]:
    """Return the rules that rename layers below ``top`` and stack them, or, not ``stacking``, those that undo it.

    ``stacks`` are names of layers without their numbers, and the stack of each; ``why`` is the reason and a doubt."""
    given = {name: value for name, value in given.items() if value}
    if stacking:
        found = [rules.stack(rf"{literal(top + stem)}(\d+)", top + into, **given) for stem, into in stacks.items()]
    else:
        found = [rules.unstack(literal(top + into), f"{top}{stem}{{}}", **given) for stem, into in stacks.items()]
        names = {new: old for old, new in names.items()}
    patterns = {literal(top + old): plain(top + new) for old, new in names.items()}
    renames = [rename(patterns, why[0])] if patterns else []
    steps = [ProposedRule(rule, *why) for rule in found]
    return [*renames, *steps] if stacking else [*steps, *renames]


def axis_of(count: int, layer: Contents, whole: Contents) -> tuple[int, str] | None:
    """Return on which axis a subtree holds layers of the same contents, and a doubt; None if it does not."""
    shared = {axis: (_with_axis(layer, count, axis) & whole).total() for axis in _AXES}
    best = max(shared.values())
    if layer.total() != whole.total() or best * 2 <= whole.total():
        return None
    axes = [axis for axis in _AXES if shared[axis] == best]
    # Axes on which the stacks are the same are one, as the last one where all arrays have as many.
    ranks = {len(shape) for _, (shape, _) in layer}
    is_clear = len(axes) == 1 or (axes[1:] == [-1] and ranks == {axes[0]})
    return axes[0], "" if is_clear else "the shapes do not tell on which axis the layers lie"


def sizes(contents: Contents, count: int = 1) -> set[tuple[str, int, str]]:
    """Return the name, number of values and kind of each leaf, once ``count`` are stacked on any axes."""
    return {(name, count * math.prod(shape), kind) for name, (shape, kind) in contents}


def _with_axis(layer: Contents, count: int, axis: int) -> Contents:
    """Return the contents of a layer once stacked; an array without that axis matches nothing."""
    result: Contents = Counter()
    for (name, (shape, kind)), many in layer.items():
        at = len(shape) + 1 + axis if axis < 0 else axis
        result[name, ((*shape[:at], count, *shape[at:]), kind if at <= len(shape) else "none")] += many
    return result


def plain(text: str) -> str:
    """Return text escaped for a replacement."""
    return text.replace("\\", r"\\")


def listed(paths: Sequence[Path]) -> str:
    """Return the first few of several key paths, and the number of the others."""
    more = f" and {len(paths) - _MAX_LISTED} more" if len(paths) > _MAX_LISTED else ""
    return one_line(map(show_path, paths[:_MAX_LISTED])) + more


def numbers_of(path: Path, number: str = r"\d+") -> str:
    """Return a pattern for a key path, and for those that have other numbers in their names."""
    return number.join(map(literal, re.split(r"\d+", joined(path))))


def either(names: Iterable[str]) -> str:
    """Return a pattern for one of several names, without a group."""
    return "|".join(sorted(map(literal, names)))


def all_but(names: Collection[str], all_: Iterable[str]) -> str:
    """Return a pattern for some of all names in a branch: their rows or, of many names, those that are not meant."""
    others = sorted({*all_}.difference(names))
    rest = f"(?!(?:{either(others)})(?![^/]))" if others else ""
    few = pattern_of([(name,) for name in names], [(name,) for name in others])
    return few or min(either(names), f"{rest}{ANY}", key=len)


def steps(arrays: Mapping[Path, LeafHandle], goal: Mapping[Path, Look]) -> Iterator[ProposedRule]:
    """Yield the steps for arrays at their places in the target that have its values, in another layout."""
    pairs = {path: (leaf.shape, goal[path][0]) for path, leaf in arrays.items()}
    groups: dict[tuple[bool, Shape], list[Path]] = {}
    unlike = ((path, *both) for path, both in pairs.items() if both[0] != both[1])
    for path, shape, wanted in unlike:
        sides, others = ([size for size in one if size != 1] for one in (shape, wanted))
        if sides == others:
            # The length of a vector is that of each array.
            given = tuple(-1 if len(others) == 1 and size != 1 else size for size in wanted)
            groups.setdefault((True, given), []).append(path)
        elif orders := turned(shape, wanted):
            groups.setdefault((False, orders[0]), []).append(path)
    names = {path: (bare(leaf.path)[-1], bare(path)[-1]) for path, leaf in arrays.items() if groups}  # before, after
    for (is_reshaped, argument), group in groups.items() if len(groups) <= _MAX_SHAPES else ():
        first, own = group[0], {names[path] for path in group}
        if not is_reshaped and all(is_torch_name(*pair) for pair in own):  # square ones go with the others
            square = [path for path, (shape, wanted) in pairs.items() if shape == wanted]
            group += [path for path in square if names[path] in own and argument in turned(*pairs[path])]
        pattern = pattern_of({*group}, pairs.keys() - {*group})
        if pattern and is_reshaped:
            yield ProposedRule(rules.reshape(pattern, argument), "axes of length 1 come or go, and all values stay")
        elif pattern:
            doubt = f"{show_path(first)} has the stored shape transposed, and may be another layer or size"
            reason = f"transposed: stored {pairs[first][0]}, target {pairs[first][1]}"
            yield ProposedRule(rules.transpose(pattern, argument), reason, doubt)


def pattern_of(wanted: Collection[Path], others: Iterable[Path], longest: int = 99) -> str:
    """Return a pattern for the ends of some key paths, in parameters and moments, and of no others; empty if long."""
    others = list(others)
    counts = range(1, min(longest, max(map(len, wanted), default=0)) + 1)
    for count, is_row in itertools.product(counts, (True, False)):
        exact = {path[-count:] for path in wanted}
        ends = set(map(unnumbered, exact)) if is_row else exact
        if ends.isdisjoint(unnumbered(path[-count:]) if is_row else path[-count:] for path in others):
            text_of = numbers_of if len(ends) < len(exact) else lambda end: literal(joined(end))
            texts = set(map(text_of, exact))
            return "|".join(sorted(texts)) if len(texts) <= _MAX_NAMES else ""
    return ""
