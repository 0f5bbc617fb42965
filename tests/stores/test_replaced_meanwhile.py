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
from flax_ckpt_compat._core.object_store.visible_objects import is_replaced
from tests.support.store_places import BY_TURNS, AnyBucket


def _tree(number: int) -> dict[str, Any]:
    """A value with text of another size in each version, and arrays in a file of data and in the index."""
    return {"array": np.full(5_000, number), "small": np.full(3, number), "n": number, "text": "t" * (10 + number)}


class _Between:
    """Calls ``action`` on another thread after the n-th request, while those that were sent with it wait."""

    def __init__(self, at: int, action: Callable[[], Any], patch: pytest.MonkeyPatch):
        self.count, self._at, self._action = 0, at, action
        self._one_by_one, self._acts = threading.Lock(), False
        for name in ("request_object", "fresh_keys"):
            patch.setattr(client, name, self._wrapped(getattr(client, name)))

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


_OLD = ["_METADATA", "commit_success.txt", "d/" + "0" * 32, "manifest.ocdbt"]
_NEW = [*_OLD[:2], "d/" + "1" * 32, "manifest.ocdbt"]
_MARK, _NEXT = "_begun.1." + "a" * 32, "_next.1." + "a" * 32
# What a folder holds during a save that overwrites the old checkpoint, in the order of the guide's page on stores.
_UPLOADED = sorted([*_OLD, _MARK, "d/" + "1" * 32, *(f"{_NEXT}/{name}" for name in ("_METADATA", "manifest.ocdbt"))])
_COMMITTED = sorted([*_UPLOADED, f"{_NEXT}/commit_success.txt"])
_COMMITTED.remove("commit_success.txt")
_BEFORE, _AFTER = [_OLD, sorted([*_OLD, _MARK]), _UPLOADED], [_COMMITTED, sorted([*_NEW, _MARK]), _NEW]


@pytest.mark.parametrize("before", _BEFORE)
@pytest.mark.parametrize("now", _AFTER)
def test_each_moment_of_a_replacement(before: list[str], now: list[str]) -> None:
    """Whenever a restore has listed the folder, it sees that the checkpoint was replaced since, but no running save."""
    assert is_replaced(before, now)
    assert not any(is_replaced(before, later) for later in _BEFORE[_BEFORE.index(before) :])
    assert is_replaced(_COMMITTED, _NEW)  # what it reads below ``_next…`` is removed
    # Its writer had committed before the restore listed the folder, but not yet removed the old commit file.
    both = sorted([*_UPLOADED, f"{_NEXT}/commit_success.txt"])
    assert is_replaced(both, [name for name in both if name != "d/" + "0" * 32])
