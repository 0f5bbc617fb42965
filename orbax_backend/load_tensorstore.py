"""Load TensorStore, where only a part of the library needs it, such as codecs that we do not decode."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from flax_ckpt_compat._core.errors import ForkedProcessError
from flax_ckpt_compat._core.thread_pools import run_apart

_used = {"here": False, "before a fork": False}  # by this process, or one that it was forked from
os.register_at_fork(after_in_child=lambda: _used.update({"before a fork": any(_used.values())}))


def load_tensorstore() -> Any:
    """Import TensorStore and return it; raise ForkedProcessError if it was used before this process was forked."""
    if _used["before a fork"]:
        raise ForkedProcessError(
            "this process was forked from one that had used TensorStore, which reads unusual codecs, and would abort "
            "it. Restore and save in the parent, or start processes by 'spawn' or 'forkserver' "
            "(multiprocessing.set_start_method; multiprocessing_context= of data loaders)"
        )
    _used["here"] = True
    if "tensorstore" not in sys.modules:
        # In another thread: after Ctrl-C interrupted it, a second import aborts the process (0.1.86, measured).
        run_apart(lambda: importlib.import_module("tensorstore"))
    return importlib.import_module("tensorstore")
