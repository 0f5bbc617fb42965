"""Something that comes in the middle of a call: before its n-th look at the file system or read, or Ctrl-C."""

import dis
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from types import CodeType, FrameType
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_MODULES = ("posix", "_io", "io")
# Within them Python may have taken a lock of its own that it then never releases, which nobody can mend.
_LOCKS = (threading.__file__, os.path.dirname(futures.__file__))


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


def ctrl_c(call: Callable[[], Any], at: int, file: str | None = None) -> bool:
    """Interrupt a call at the ``at``-th place where Python may, in a file or anywhere; return whether there is one.

    These are after calls, and at the beginning of functions, but for those of Python's locks and pools. AssertionError
    if the interrupt does not come out."""
    seen, before, unraisable = 0, sys.gettrace(), list[Any]()
    place, outcome = "", "it returned"

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen, place
        if frame.f_code.co_filename.startswith(_LOCKS) or file not in (None, frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _interruptible(frame.f_code):
            seen += 1
            if seen == at:
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return trace

    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append  # Python drops it in callbacks of weak references
    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for it before
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        outcome = ""
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook
    assert seen < at or not outcome or unraisable, f"Ctrl-C at {place}: {outcome}"
    return seen >= at


@functools.cache
def _interruptible(code: CodeType) -> frozenset[int]:
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        if before.startswith(("CALL", "RESUME")):
            found.add(instruction.offset)
        before = instruction.opname
    return frozenset(found)
