"""Checkpoints of both formats, as a project has them that is in the middle of its move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import flax_ckpt_compat


def save_mixed(directory: Path, nbytes: int, count: int, *, only_arrays: bool = False) -> None:
    """Saves checkpoints of so many bytes each in three runs, of many leaves of all sizes and dtypes."""
    for n in range(count):
        rng = np.random.default_rng(n)
        last: Any = rng.normal(size=nbytes // 32)
        tree = {
            "small": {str(i): rng.normal(size=(3, i)).astype(np.float32) for i in range(20)},
            "big": rng.integers(0, 255, nbytes // 2, np.uint8),
            "bf16": rng.normal(size=nbytes // 8).astype(ml_dtypes.bfloat16),
            "f64": last if only_arrays else [last, (n, None, "text")],
        }
        format: Any = "orbax" if n % 2 else "msgpack"
        flax_ckpt_compat.save(directory / f"run_{n % 3}", tree, step=n, format=format, overwrite=True)
