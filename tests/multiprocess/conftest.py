"""What tests with teams of processes have in common."""

from __future__ import annotations

import jax

# As in the processes of a team, whose random keys are compared with this one's; jax's default since 0.5.
jax.config.update("jax_threefry_partitionable", True)
