"""Something done by others in the middle of a call: just before its n-th look at the file system or read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_MODULES = ("posix", "_io", "io")


def _touches_files(function: Any) -> bool:
    owner = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
    return owner in _MODULES or str(owner).startswith("tensorstore")


def count_calls(call: Callable[[], Any]) -> int:
    """Return how many calls of this thread into the system or TensorStore it takes."""
    counted = [0]
    _watched(call, lambda n: counted.__setitem__(0, n))
    return counted[0]


def interrupted(call: Callable[[], _Result], at: int, act: Callable[[], Any]) -> _Result:
    """Return what a call gives that is interrupted by an action before its ``at``-th call into the system."""

    def on_call(n: int) -> None:
        if n == at:
            act()

    return _watched(call, on_call)


def _watched(call: Callable[[], _Result], on_call: Callable[[int], None]) -> _Result:
    seen = 0

    def profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal seen
        if event == "c_call" and _touches_files(function):
            seen += 1
            sys.setprofile(None)
            try:
                on_call(seen)
            finally:
                sys.setprofile(profile)

    sys.setprofile(profile)
    try:
        return call()
    finally:
        sys.setprofile(None)
