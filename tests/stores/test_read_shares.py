"""What tells two checkpoints with one URL apart, for processes that read one together."""

from __future__ import annotations

from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._restore import read_assignment
from tests.support.gs import GsBucket
from tests.support.s3 import Bucket


def test_a_replaced_object(any_bucket: Bucket | GsBucket) -> None:
    """Its version differs, though its size is the same; two look-ups of one object do not."""
    location = location_of(f"{any_bucket.url}/run/checkpoint_1")
    any_bucket.put("run/checkpoint_1", b"one")
    before = read_assignment._identity(location)
    assert read_assignment._identity(location) == before
    any_bucket.put("run/checkpoint_1", b"two")
    assert read_assignment._identity(location) != before
