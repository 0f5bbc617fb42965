"""Restores in a process whose address space is limited, as batch systems do."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import flax_ckpt_compat
from tests.support.interpreters import run_python

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS counts elsewhere otherwise")
RESTORE = """
import resource, sys
import flax_ckpt_compat
from flax_ckpt_compat import errors
if sys.argv[2] == "loaded":
    flax_ckpt_compat.restore(sys.argv[1] + "/small")
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[3]) << 20),) * 2)
try:
    flax_ckpt_compat.restore(sys.argv[1] + "/large")
except errors.OutOfMemoryError as error:
    assert isinstance(error, MemoryError)
    print(error)
"""


@pytest.mark.parametrize(
    ("format", "loaded", "left"), [("msgpack", "no", 30), ("orbax", "no", 60), ("orbax", "loaded", 60)]
)
def test_too_little_memory_has_a_name(format: str, loaded: str, left: int, tmp_path: Path) -> None:
    """Nothing aborts, and a sound checkpoint is not called corrupt: 96 MB fit into no such limit."""
    for name, count in (("small", 2), ("large", 12_000_000)):
        flax_ckpt_compat.save(tmp_path / name, {"a": np.zeros(count)}, format=format)
    told, _ = run_python(RESTORE, tmp_path, loaded, left)
    assert "there is no memory for " in told
    assert "raise the limit of this process (ulimit -v)" in told
