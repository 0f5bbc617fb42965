"""Two programs that evict each other's steps in a store, where nothing can be locked."""

from __future__ import annotations

from typing import Any

import pytest

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.object_store import commit
from tests.support.saves import tree, use_flag
from tests.support.store_places import BY_TURNS, AnyBucket


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_something_is_left(any_bucket: AnyBucket, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that overwrites an older step removes the newest, whose writer removes that older step meanwhile."""
    root, discard, evicted = f"{any_bucket.url}/run", commit.remove, []

    def with_the_other_writer(url: str, *listing: Any) -> None:
        discard(url, *listing)
        if url.endswith("checkpoint_9") and not evicted:
            evicted.append(url)
            discard(f"{root}/checkpoint_5")

    with use_flag(format == "orbax"):
        checkpoints.save_checkpoint(root, tree(9), 9)
        monkeypatch.setattr(commit, "remove", with_the_other_writer)
        checkpoints.save_checkpoint(root, tree(5), 5, overwrite=True)
    assert evicted and checkpoints.available_steps(root) == [5]
    assert checkpoints.restore_checkpoint(root, None)["n"] == 5
