"""Decide by numbers which checkpoints ``keep`` and ``keep_every_n_steps`` retain; remove nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flax_ckpt_compat._core import arguments, steps
from flax_ckpt_compat._core.errors import ArgumentError


def check_keep(keep: Any) -> int:
    """Validate ``keep`` and return it as an int; 0 keeps all, as legacy Flax does for 0 and ``np.inf``."""
    value = _number(keep, "keep")
    if not value >= 0:
        raise ArgumentError(f"keep must be 0 (keep all) or more, found {value}")
    if math.isinf(value):
        return 0
    if value != int(value):
        raise ArgumentError(f"keep must be a whole number, found {value}")
    return int(value)


def check_every(every: Any) -> float | None:
    """Validate ``keep_every_n_steps`` and return it as a number; None and 0 keep nothing extra."""
    value = 0.0 if every is None else _number(every, "keep_every_n_steps")
    if math.isnan(value):
        raise ArgumentError("keep_every_n_steps must be a number or None, found nan")
    return value or None


def _number(value: Any, name: str) -> float:
    """Return a number, or the one value of an array; infinity for an int beyond every float."""
    one = arguments.number(value, name, of_any_rank=True)
    if one is True or isinstance(one, str) or (one is False and name == "keep"):
        raise ArgumentError(f"{name} must be a number, {arguments.found(value)}")
    try:
        return float(one)
    except OverflowError:
        return math.inf if one > 0 else -math.inf
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} must be a number, {arguments.found(value)}") from None


def deciding(names: Sequence[str], prefix: str, keep: int, keep_every_n_steps: float | None) -> set[str]:
    """Return the names of which each decides what `expired` returns: without any of the others it returns the same.

    Those are what it returns, the newest ``keep``, and those to which ``keep_every_n_steps`` finds others too close.
    Without another one, what follows it is as far from what is before both as it was, or farther."""
    removed = set(expired(names, prefix, keep, keep_every_n_steps))
    found, last_kept = {*removed, *names[-keep:]} if removed else set[str](), None
    for name in names[:-keep] if removed else ():
        if name not in removed:
            last_kept = name
        elif last_kept is not None:
            found.add(last_kept)
    return found


def expired(names: Sequence[str], prefix: str, keep: int, keep_every_n_steps: float | None) -> list[str]:
    """Return the checkpoints that retention removes, of a prefix's numeric ones, oldest first (`in_order`)."""
    if keep == 0:
        return []
    if not keep_every_n_steps:
        return list(names[:-keep])
    removed = []
    last_kept = -math.inf
    for name in names[:-keep]:
        step = steps.step_of(name, prefix)
        # Step 0 counts as "no step" here, as in legacy Flax: keep_every_n_steps never keeps it.
        if step and step - last_kept >= keep_every_n_steps:
            last_kept = step
        else:
            removed.append(name)
    return removed
