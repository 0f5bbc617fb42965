"""Ready-made steps from an old checkpoint to today's state; a list of them is what ``orbax_transforms`` takes, too."""

from __future__ import annotations

from flax_ckpt_compat.rules._rule import Rule
from flax_ckpt_compat.rules.names import drop, move, rename, unwrap, wrap

__all__ = ["Rule", "drop", "move", "rename", "unwrap", "wrap"]
