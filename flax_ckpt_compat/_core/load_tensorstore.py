"""Load TensorStore, where only a part of the library needs it: ``_gda`` folders, and codecs that we do not decode."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import ForkedProcessError, OutOfMemoryError
from flax_ckpt_compat._core.text_formatting import format_size
from flax_ckpt_compat._core.thread_pools import run_apart

# Address space of TensorStore's library and of each of its threads: it aborts at 60 MiB on two cores (measured).
_TENSORSTORE_BYTES, _THREAD_BYTES = 80 << 20, 16 << 20
_state = {"used": False, "forked": False}


def load_tensorstore() -> Any:
    """Import TensorStore and return it; raise OutOfMemoryError if a limit leaves too little, so that it would abort."""
    if "tensorstore" not in sys.modules:
        _check_address_space()
        # In another thread: after Ctrl-C interrupted it, a second import aborts the process (0.1.86, measured).
        run_apart(functools.partial(importlib.import_module, "tensorstore"))
    return importlib.import_module("tensorstore")


def _check_address_space() -> None:
    with suppress(ImportError, OSError, ValueError):  # other systems than Linux
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return
        with open("/proc/self/statm", "rb") as file:
            left = limit - int(file.read().split()[0]) * resource.getpagesize()
        needed = _TENSORSTORE_BYTES + (os.cpu_count() or 1) * _THREAD_BYTES
        if left < needed:
            raise OutOfMemoryError(
                f"{format_size(max(0, left))} of address space are left to this process, but TensorStore, which reads "
                f"and writes Orbax's format, needs {format_size(needed)}; free memory, or raise "
                "the limit of this process (ulimit -v)"
            )


def use_tensorstore(path: str = "") -> None:
    """Note that TensorStore is used from now on; raise ForkedProcessError if it was before this process was forked."""
    _state["used"] = True
    if _state["forked"]:
        raise ForkedProcessError(
            f"{path}{': ' if path else ''}this process was forked from one that had used TensorStore, which reads and "
            "writes Orbax's format and object stores, and would abort it. Restore and save in the parent, or start "
            "processes by 'spawn' or 'forkserver' (multiprocessing.set_start_method; multiprocessing_context= of data "
            "loaders)",
            path=path or None,
        )


os.register_at_fork(after_in_child=lambda: _state.update(forked=_state["used"]))
