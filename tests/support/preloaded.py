"""What the processes of a team have imported when they start: their server imports this module before it is forked."""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

from tests.support import zygote

# In a process that begins with the first job, these would take as long as the job.
for _name in (*zygote.PRELOAD, "flax.training.train_state", "jaxlib.mlir.dialects.mhlo", "pytest"):
    with suppress(ImportError):  # a part of jaxlib that another release may not have
        importlib.import_module(_name)
# Else the first collection of each fork copies nearly all memory of the server.
gc.collect()
gc.freeze()
