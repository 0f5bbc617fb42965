"""Steps of a store whose removal is refused, or that are replaced while they are read."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.object_store import client, commit
from tests.support import s3
from tests.support.saves import tree
from tests.support.store_places import BY_TURNS, AnyBucket


@pytest.mark.slow
@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_a_deletion_that_is_refused(format: Any, any_bucket: AnyBucket) -> None:
    """The step was saved, which the error says; the next save removes what this one could not."""
    root = f"{any_bucket.url}/run"
    for step in (1, 2):
        flax_ckpt_compat.save(root, tree(step), step=step, format=format)
    old = ("checkpoint_1", "checkpoint_1%2F")

    def rule(method: str, path: str) -> str:
        return "403" if method == "DELETE" and any(name in path for name in old) else ""

    with any_bucket.proxy.failing(rule), pytest.raises(errors.CleanupError) as caught:
        flax_ckpt_compat.save(root, tree(3), step=3, format=format, keep=2)
    assert f"{root}/checkpoint_3 was saved, but old checkpoints could not be removed" in str(caught.value)
    assert "checkpoint_1" in str(caught.value)
    assert "could not be deleted" in str(caught.value)
    assert ours.restore_checkpoint(root, None)["n"] == 3
    assert 1 in ours.available_steps(root)
    flax_ckpt_compat.save(root, tree(4), step=4, format=format, keep=2)
    assert ours.available_steps(root) == [3, 4]
    assert not [key for key in any_bucket.keys("run/") if "checkpoint_1" in key]


@pytest.mark.parametrize("any_bucket", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_a_list_of_several_pages(any_bucket: AnyBucket) -> None:
    """All of it counts."""
    names = [f"{number:03}" for number in range(s3.PAGE + 1)]
    for name in names:
        any_bucket.put(f"run/{name}", b"")
    assert list(commit.client_for(any_bucket.url).list(f"{any_bucket.url}/run")) == names


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


@pytest.mark.slow
@pytest.mark.parametrize("checksums", ["verify", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_it_is_overwritten_between_two_requests(format: Any, checksums: str, any_bucket: AnyBucket) -> None:
    """The old or the new one restores, as the latest or by its step: the old text came with the new arrays."""

    def save(number: int) -> None:
        flax_ckpt_compat.save(root, _tree(number), step=2, overwrite=True, format=format)

    def restore(at: int) -> tuple[int, int]:
        save(1)
        with pytest.MonkeyPatch.context() as patch, flax_ckpt_compat.config.override(checksums=checksums):
            requests = _Between(at, lambda: save(2), patch)
            restored = ours.restore_checkpoint(root, None, step=(None, 2)[at % 2])
        held = {int(restored["n"]), int(restored["small"][0]), int(restored["array"][0]), len(restored["text"]) - 10}
        assert len(held) == 1, (at, restored)
        return requests.count, held.pop()

    root = f"{any_bucket.url}/run"
    flax_ckpt_compat.save(root, _tree(0), step=1, format=format)
    count, found = restore(0)
    assert found == 1
    found_at = [restore(at)[1] for at in range(1, count + 1)]
    assert found_at[0] == 2 and set(found_at) <= {1, 2}
