"""A request that fails says nothing of what is there: no target, no older step, no word of damage."""

from collections.abc import Callable

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, verify
from flax_ckpt_compat.errors import StorageError
from tests.support.s3 import Fault
from tests.support.saves import use_flag
from tests.support.store_places import AnyBucket

_TARGET = {"a": np.zeros(40_000), "n": 0}
_REFUSED = "403"  # which is not tried again


def _restore(url: str) -> int:
    restored = checkpoints.restore_checkpoint(url, _TARGET)
    assert np.all(restored["a"] == restored["n"])
    return int(restored["n"])


def _latest(url: str) -> int:
    return int(str(checkpoints.latest_checkpoint(url)).rpartition("_")[2])


def _list_steps(url: str) -> int:
    assert checkpoints.available_steps(url) == [1, 2, 3]
    return 3


def _verify(url: str) -> int:
    found = verify(f"{url}/checkpoint_3").checkpoints
    assert not any(one.state == "damaged" for one in found), found
    return 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "look"),
    [
        *[(fault, _restore) for fault in ("cut", _REFUSED, "refuse", "500")],
        *[("cut", look) for look in (_latest, _list_steps)],
        (_REFUSED, _verify),
    ],
)
def test_each_request_fails_once(any_bucket: AnyBucket, flag: bool, fault: Fault, look: Callable[[str], int]) -> None:
    """It is tried again, or done without; what the store refuses is a StorageError."""
    url = f"{any_bucket.url}/run"
    with use_flag(flag):
        for step in (1, 2, 3):
            checkpoints.save_checkpoint(url, {"a": np.full(40_000, float(step)), "n": step}, step, keep=3)
        any_bucket.proxy.log.clear()
        assert look(url) == 3
        for at in range(len(any_bucket.proxy.log)):
            asked = iter(range(1000))
            with any_bucket.proxy.failing(lambda *_, at=at, asked=asked: fault if next(asked) == at else ""):
                try:
                    assert look(url) == 3, at
                except StorageError:
                    assert fault == _REFUSED, at
