"""Choose which of several trees of a checkpoint a target means: the structure decides, names only between equals."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.errors import CheckpointError, CorruptCheckpointError, KindMismatchError
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves
from flax_ckpt_compat._discovery import opening
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._restore.plan import suggested

ALL = ""  # in place of an item's name: the target has items by their names
_MAX_SHOWN = 8


class Fit(NamedTuple):
    """A comparison of one item with a target."""

    name: str
    found: int  # leaves of the target that it has
    wanted: int  # leaves of the target
    unused: int  # leaves that it has besides
    error: CheckpointError | None = None  # it does not open, or the rules do not fit it

    @property
    def is_exact(self) -> bool:
        """Return whether it has the target's leaves and no others."""
        return self.error is None and self.found == self.wanted and not self.unused

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name} (does not open)"
        if self.name == ALL:
            return f"all of them, by their names ({self.found} of {self.wanted} leaves)"
        besides = f", {self.unused} besides" if self.unused else ""
        return f"{self.name} ({self.found} of {self.wanted} leaves{besides})"


def choose_item(
    opened: opening.Opened, target: Node, options: RestoreOptions, *, prefers_all: bool = False
) -> tuple[str, str]:
    """Return the item that a target means, or `ALL`, and, if several were looked at, how each fits.

    An exact match comes first, then what has most of the target's leaves; between equals, all items if the target names
    them (``prefers_all``), else a usual name decides. Rules may give the items the target's names, so that all of them
    are a choice there too. Raise KindMismatchError if there is no tree, or nothing decides.
    """
    if (only := only_tree(opened)) is not None:
        return (ALL if prefers_all else only), ""
    wanted = _paths(target)
    fits = [_fit(opened, name, target, wanted, options) for name in opened.trees]
    if prefers_all or options.transforms.rules:
        fits.append(_fit_of_all(fits, opened, target, wanted, options))
    best = max((fit.is_exact, fit.found) for fit in fits)
    equals = [fit for fit in fits if (fit.is_exact, fit.found) == best]
    more = f" and {len(fits) - _MAX_SHOWN} more" if len(fits) > _MAX_SHOWN else ""
    shown = ", ".join(map(str, fits[:_MAX_SHOWN])) + more
    names = [fit.name for fit in equals if fit.error is None] or [fit.name for fit in equals]
    if ALL in names and (prefers_all or len(names) == 1):
        return ALL, f"Its items fit the target so: {shown}."
    names = [name for name in names if name != ALL]
    chosen = names[0] if len(names) == 1 else next((name for name in layout.TREE_ITEMS if name in names), None)
    if chosen is None:
        raise KindMismatchError(
            f"{opened.path} holds several trees ({shown}), equally like the target; pass a dict of them, or restore "
            f"one: item={names[0]!r} of restore, or its path, {os.path.join(opened.path, names[0])}."
            f"{_renaming(opened, fits, target)}",
            path=opened.path,
        )
    for fit in fits:
        if fit.name == chosen and fit.error is not None:
            raise fit.error
    return chosen, f"Its items fit the target so: {shown}."


def _fit_of_all(
    fits: list[Fit], opened: opening.Opened, target: Node, wanted: set[Path], options: RestoreOptions
) -> Fit:
    """Return how well all items as one tree, with their names at the top, fit a target that names some of them."""
    renamed = opened.items.keys() if options.transforms.rules else set[str]()
    named = renamed | ({path[0] for path in wanted if path} & opened.items.keys())
    tree: Node = Branch({fit.name: opened.reader(fit.name).tree for fit in fits if fit.name in named and not fit.error})
    if options.transforms.rules:
        with suppress(CheckpointError):
            tree = options.transforms.apply_rules(tree, target, opened.path)
    there = _paths(tree)
    json = {path for path in wanted if path and path[0] in named and path[0] not in opened.trees}
    found = len(there & wanted) + len(json)
    return Fit(ALL, found, len(wanted), len(there - wanted))


def _renaming(opened: opening.Opened, fits: list[Fit], target: Node) -> str:
    """Return rules that give the items the target's names, if that is certain; or empty."""
    readable = [fit.name for fit in fits if fit.name != ALL and not fit.error]
    found = suggested(Branch({name: opened.reader(name).tree for name in readable}), target, opened.path)
    return f" These rules would map them to the target:\n{found}" if found is not None and not found.doubts else ""


def only_tree(opened: opening.Opened) -> str | None:
    """Return the only tree of a checkpoint; None if it has several. Raise KindMismatchError if it has none."""
    if not opened.trees:
        raise KindMismatchError(
            f"{opened.path} holds no tree of arrays, only JSON ({', '.join(opened.items)}); restore it without a "
            "target, or with a dict of these names",
            path=opened.path,
        )
    return next(iter(opened.trees)) if len(opened.trees) == 1 else None


def _fit(opened: opening.Opened, name: str, target: Node, wanted: set[Path], options: RestoreOptions) -> Fit:
    try:
        tree = opened.reader(name).tree
        if options.transforms.rules:
            tree = options.transforms.apply_rules(tree, target, opened.items[name].location.path)
    except CheckpointError as error:
        is_damage = isinstance(error, CorruptCheckpointError)
        return Fit(name, 0, len(wanted), 0, error if is_damage or not options.transforms.rules else None)
    there = _paths(tree)
    return Fit(name, len(there & wanted), len(wanted), len(there - wanted))


def _paths(tree: Node) -> set[Path]:
    """Return the key paths of leaves; None and ``...`` ask for nothing."""
    return {
        path
        for path, leaf in iter_leaves(tree)
        if leaf is not None and leaf is not ... and not isinstance(leaf, Branch)
    }
