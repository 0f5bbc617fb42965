"""Load TensorStore, where only a part of the library needs it, such as codecs that we do not decode."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from flax_ckpt_compat._core.errors import ForkedProcessError
from flax_ckpt_compat._core.thread_pools import run_apart

_users = set[int]()  # processes that used it: this one, and those that it was forked from


def load_tensorstore() -> Any:
    """Import TensorStore and return it; raise ForkedProcessError if it was used before this process was forked."""
    _users.add(os.getpid())
    if len(_users) > 1:
        raise ForkedProcessError(
            "this process was forked from one that had used TensorStore, which reads unusual codecs, and would abort "
            "it. Restore and save in the parent, or start processes by 'spawn' or 'forkserver' "
            "(multiprocessing.set_start_method; multiprocessing_context= of data loaders)"
        )
    if "tensorstore" not in sys.modules:
        # In another thread: after Ctrl-C interrupted it, a second import aborts the process (0.1.86, measured).
        run_apart(functools.partial(importlib.import_module, "tensorstore"))
    return importlib.import_module("tensorstore")
