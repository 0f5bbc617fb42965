"""Parse, order and check names of checkpoints: a prefix and one finite number, without the accidents of globs."""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Iterable
from typing import Any

from flax_ckpt_compat._core import arguments, orbax_layout
from flax_ckpt_compat._core.errors import ArgumentError
from flax_ckpt_compat._core.numbered_names import ARRAYS_POSTFIX as ARRAYS_POSTFIX
from flax_ckpt_compat._core.numbered_names import NUMBER, SIGNED_FLOAT_RE
from flax_ckpt_compat._core.numbered_names import natural_sort as natural_sort

_SPLIT = re.compile(r"(.*?)(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", re.DOTALL)
_SEPARATED = re.compile(rf"(?:.*[^0-9A-Za-z.])?{NUMBER}", re.DOTALL)
FLAX_TEMPORARY = "tmp"  # Flax writes its unfinished main file to prefix + "tmp"


@functools.lru_cache(maxsize=1 << 14)  # a save looks at all names of a directory several times, and the next one again
def parse_step(text: str) -> float | None:
    """Parse the text after a prefix as a step, exact for whole numbers; None if it is not one finite number."""
    if not SIGNED_FLOAT_RE.fullmatch(text) or not math.isfinite(step := float(text)):
        return None
    return int(text) if text.lstrip("+-").isdecimal() else step


def step_of(name: str, prefix: str) -> float | None:
    """Return the step of a checkpoint's name under a prefix, or None if it is not a numeric checkpoint of it."""
    return parse_step(name[len(prefix) :]) if name.startswith(prefix) else None


def is_text(name: str, prefix: str, *, of_longer_prefix: bool = False) -> bool:
    """Return whether a name is a ``prefix + text`` checkpoint, such as ``epoch10`` and ``v1.5`` without a prefix.

    Or a step of a longer prefix, such as ``ckpt_best_1``, of ``ckpt_best_``, for ``ckpt_``."""
    text = name.removeprefix(prefix)
    if not name.startswith(prefix) or text in ("", FLAX_TEMPORARY) or is_foreign(name) or parse_step(text) is not None:
        return False
    return (_SEPARATED.fullmatch(text) is not None) == of_longer_prefix


def split_step(name: str) -> tuple[str, str] | None:
    """Split a name that ends in a step into its prefix, with the dash of ``ckpt-3``, and unsigned step; or None."""
    match = _SPLIT.fullmatch(name)
    return (match[1], match[2]) if match else None


def is_foreign(name: str) -> bool:
    """Return whether a name is never a checkpoint: temporaries and array folders."""
    return orbax_layout.TEMPORARY in name or orbax_layout.PARTIAL_SAVE in name or name.endswith(ARRAYS_POSTFIX)


def in_order(names: Iterable[str], prefix: str) -> list[str]:
    """Return the numeric checkpoints of a prefix, oldest step first."""
    steps = ((step, name) for name in names if (step := step_of(name, prefix)) is not None and not is_foreign(name))
    return [name for _, name in sorted(steps)]


def of_replicated(step: Any) -> Any:
    """Return the step of a state that is replicated over devices: one element of an array of which all are equal."""
    if not getattr(step, "shape", ()) or not hasattr(step, "dtype"):
        return step
    import numpy as np  # here, because listings of checkpoints do without it

    try:
        values = np.asarray(step).reshape(-1)
    except (RuntimeError, TypeError, ValueError):  # deleted, traced, not all here, or no array: refused later
        return step
    return values[0] if values.size and (values == values[0]).all() else step


def step_text(step: Any) -> str:
    """Validate a step, a number or 0-d array or text such as ``best``, and format it for a checkpoint's name."""
    if isinstance(step, str):
        if not step.strip(".") or "/" in step or "\0" in step or step == FLAX_TEMPORARY:
            raise ArgumentError(f"step {step!r} cannot be part of a checkpoint's name")
        if parse_step(step) is None and step.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            raise ArgumentError(f"step {step!r} is not finite")
        return step
    number = arguments.number(step, "step")
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ArgumentError(f"step must be an int, a float or a 0-d array of them, {arguments.found(number)}")
    try:
        text = f"{step}"
    except ValueError as error:  # an int of thousands of digits
        raise ArgumentError(f"step must be a number that a name can hold: {error}") from error
    if parse_step(text) is None:  # also a Fraction, or an int beyond every float
        raise ArgumentError(f"step must be finite and print as one number, found {step!r:.100}")
    return text
