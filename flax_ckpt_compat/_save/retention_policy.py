"""Decide by numbers which checkpoints ``keep`` and ``keep_every_n_steps`` retain; remove nothing."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import StepError


def check_keep(keep: Any) -> int:
    """Validate ``keep`` and return it as an int; 0 keeps all, as legacy Flax does for 0 and ``np.inf``."""
    try:
        value = float(keep)
    except (TypeError, ValueError):
        raise StepError(f"keep must be a number, found {keep!r}") from None
    if math.isnan(value) or value < 0:
        raise StepError(f"keep must be 0 (keep all) or more, found {keep!r}")
    if math.isinf(value):
        return 0
    if value != int(value):
        raise StepError(f"keep must be a whole number, found {keep!r}")
    return operator.index(keep) if hasattr(keep, "__index__") else int(value)


def check_every(every: Any) -> float | None:
    """Validate ``keep_every_n_steps`` and return it as a number; None and 0 keep nothing extra."""
    try:
        value = 0.0 if every is None else float(every)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value):
        raise StepError(f"keep_every_n_steps must be a number or None, found {every!r:.100}")
    return value or None


def expired(names: Sequence[str], prefix: str, keep: int, keep_every_n_steps: float | None) -> list[str]:
    """Return the checkpoints that retention removes, of a prefix's numeric ones, oldest first (`in_order`)."""
    if keep == 0:
        return []
    removed = []
    last_kept = -math.inf
    for name in names[:-keep]:
        step = steps.step_of(name, prefix)
        # Step 0 counts as "no step" here, as in legacy Flax: keep_every_n_steps never keeps it.
        if keep_every_n_steps and step and step - last_kept >= keep_every_n_steps:
            last_kept = step
        else:
            removed.append(name)
    return removed
