"""A step of a store is overwritten between any two requests of a restore: old or new, and never a mixture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.object_store import client
from tests.support.store_places import BY_TURNS, AnyBucket


def _tree(number: int) -> dict[str, Any]:
    """A value with text of another size in each version, and arrays in a file of data and in the index."""
    return {"array": np.full(5_000, number), "small": np.full(3, number), "n": number, "text": "t" * (10 + number)}


class _Between:
    """Calls ``action`` on another thread after the n-th request, while those that were sent with it wait."""

    def __init__(self, at: int, action: Callable[[], Any], patch: pytest.MonkeyPatch):
        self.count, self._at, self._action = 0, at, action
        self._one_by_one, self._acts = threading.Lock(), False
        patch.setattr(client.Client, "_run", self._wrapped(client.Client._run))

    def _wrapped(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self._acts:
                return request(*args, **options)
            with self._one_by_one:
                found = request(*args, **options)
                self.count += 1
                if self.count == self._at:
                    self._acts = True
                    thread = threading.Thread(target=self._action)
                    thread.start()
                    thread.join()
                    self._acts = False
            return found

        return call


@pytest.mark.parametrize("checksums", ["verify", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_it_is_overwritten_between_two_requests(format: Any, checksums: str, any_bucket: AnyBucket) -> None:
    """Text lay in one file, and the rest in others: a restore gave the old text with the new arrays."""

    def save(number: int) -> None:
        flax_ckpt_compat.save(root, _tree(number), step=2, overwrite=True, format=format)

    def restore(at: int) -> tuple[int, int]:
        save(1)
        with pytest.MonkeyPatch.context() as patch, flax_ckpt_compat.config.override(checksums=checksums):
            requests = _Between(at, lambda: save(2), patch)
            restored = checkpoints.restore_checkpoint(root, None)
        held = {int(restored["n"]), int(restored["small"][0]), int(restored["array"][0]), len(restored["text"]) - 10}
        assert len(held) == 1, (at, restored)
        return requests.count, held.pop()

    root = f"{any_bucket.url}/run"
    flax_ckpt_compat.save(root, _tree(0), step=1, format=format)
    count, found = restore(0)
    assert found == 1
    found_at = [restore(at)[1] for at in range(1, count + 1)]
    assert found_at[0] == 2 and set(found_at) <= {1, 2}
