"""Tell the names of other programs from those of Flax's checkpoints, under which their files are none."""

from __future__ import annotations

from flax_ckpt_compat._core import steps


def is_step(name: str) -> bool:
    """Return whether a name is that of a step of Flax's checkpoints, by its default prefix, or of a manager."""
    return name.isdecimal() or steps.step_of(name, "checkpoint_") is not None
