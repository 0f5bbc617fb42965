"""Read and write Flax's msgpack checkpoint files: one msgpack document, the tree as nested maps."""

from __future__ import annotations

from .backend import BACKEND, open_part_of_orbax

__all__ = ["BACKEND", "open_part_of_orbax"]
