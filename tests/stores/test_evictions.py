"""Two programs that evict each other's steps in a store, where nothing can be locked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flax_ckpt_compat import checkpoints, errors, restore, save
from flax_ckpt_compat._core.object_store import removal, replace_directory
from tests.support.saves import tree, use_flag
from tests.support.store_places import BY_TURNS, AnyBucket


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_something_is_left(any_bucket: AnyBucket, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that overwrites an older step removes the newest, whose writer removes that older step meanwhile."""
    root, discard, evicted = f"{any_bucket.url}/run", removal.discard, []

    def with_the_other_writer(url: str, *listing: Any) -> None:
        discard(url, *listing)
        if url.endswith("checkpoint_9") and not evicted:
            evicted.append(url)
            discard(f"{root}/checkpoint_5")

    with use_flag(format == "orbax"):
        checkpoints.save_checkpoint(root, tree(9), 9)
        monkeypatch.setattr(removal, "discard", with_the_other_writer)
        checkpoints.save_checkpoint(root, tree(5), 5, overwrite=True)
    assert evicted and checkpoints.available_steps(root) == [5]
    assert checkpoints.restore_checkpoint(root, None)["n"] == 5


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_a_writer_that_lost_leaves_nothing(any_bucket: AnyBucket, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files arrive after the other's folder check: alone they would hide the msgpack file of the other writer."""
    path, upload_all = f"{any_bucket.url}/run/checkpoint_1", replace_directory.upload_all

    def late(*arguments: Any, **options: Any) -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(save, path, tree(2), format="msgpack", overwrite=True).result()
            if format == "orbax":  # the other writer removes what it saved, too
                pool.submit(removal.discard, path).result()
        upload_all(*arguments, **options)

    monkeypatch.setattr(replace_directory, "upload_all", late)
    with pytest.raises(errors.ConcurrentWriteError):
        save(path, tree(1), format="orbax", overwrite=True)
    assert any_bucket.keys("run/") == (["run/checkpoint_1"] if format == "msgpack" else [])
    if format == "msgpack":
        assert restore(path)["n"] == 2
