"""Programs whose stderr is closed, as that of some daemons is: what is logged gets into no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interpreters import run_python

# Native libraries log so: to the descriptor 2, whatever it is.
LOGS = """
import os, sys, threading
import flax
import numpy as np
from flax_ckpt_compat import checkpoints, convert

os.close(2)
done = threading.Event()

def log():
    while not done.wait(0):
        try:
            os.write(2, b"W0000 a native library\\n")
        except OSError:
            pass

thread = threading.Thread(target=log)
thread.start()
try:
    flax.config.update("flax_use_orbax_checkpointing", sys.argv[1] == "orbax")
    tree = {"w": np.arange(300_000.0), "b": 1}
    for step in range(8):
        checkpoints.save_checkpoint("run", tree, step, keep=9)
        found = checkpoints.restore_checkpoint("run", None, step)
        assert found["b"] == 1 and np.array_equal(found["w"], tree["w"])
    for result in convert("run", "converted", to="msgpack" if sys.argv[1] == "orbax" else "orbax"):
        assert result.status == "converted", result.error
finally:
    done.set()
    thread.join()
print("all", len(checkpoints.available_steps("converted")))
"""


@pytest.mark.parametrize("format", [pytest.param("msgpack", marks=pytest.mark.slow), "orbax"])
def test_logs_get_into_no_checkpoint(format: str, tmp_path: Path) -> None:
    """The files of a save would get the descriptor of the closed stderr, and the save would succeed."""
    out, _ = run_python(LOGS, format, cwd=tmp_path, fresh=True)
    assert out.split() == ["all", "8"]
