"""Saves and restores, as lines of its standard input say, with whatever release of the library comes first.

It is run by path, with an older release before this checkout on ``PYTHONPATH``; so it imports nothing of the tests.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import flax
import jax
import numpy as np

from flax_ckpt_compat import checkpoints

ROWS = 300_000  # more than the block of a checksum


def tree(number: int) -> dict[str, Any]:
    """A tree that tells in each value which save it is from."""
    return {"n": number, "w": np.full(ROWS, number, np.float32), "b": {str(i): np.full(9, number) for i in range(3)}}


def save(root: str, number: int, orbax: bool, **options: Any) -> None:
    """Save a tree; the options are those of Flax."""
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    checkpoints.save_checkpoint(root, tree(number), **options)


def restore(root: str, step: int | None = None) -> int:
    """Restore, and return the one save that all values are from."""
    found = checkpoints.restore_checkpoint(root, tree(0), step)
    numbers = {int(one) for leaf in jax.tree.leaves(found) for one in np.unique(leaf)}
    assert len(numbers) == 1, f"a mixture of {numbers}"
    return numbers.pop()


def steps(root: str) -> list[int]:
    """Return the steps that are there."""
    return list(checkpoints.available_steps(root))


if __name__ == "__main__":
    print(json.dumps(checkpoints.__file__), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": globals()[name](**arguments)}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
