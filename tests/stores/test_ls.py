"""``flax-ckpt ls`` and ``show`` on an object store."""

import json

import numpy as np
from click.testing import CliRunner

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.cli import main
from tests.support.s3 import Bucket
from tests.support.store_places import AnyBucket


def test_list_of_a_store(flag: bool, bucket: Bucket) -> None:
    """The checkpoints of a URL with the bytes of their objects; a URL below which there is nothing is refused."""
    url = f"{bucket.url}/run"
    checkpoints.save_checkpoint(url, {"w": np.ones(1000, np.float32)}, 1)
    result = CliRunner().invoke(main, ["ls", url, "--json"])
    (record,) = json.loads(result.stdout)
    assert (record["step"], record["format"], record["complete"]) == (1, "orbax" if flag else "msgpack", True)
    assert record["nbytes"] == sum(len(bucket.get(key)) for key in bucket.keys("run/"))
    assert record["saved"] is None
    absent = CliRunner().invoke(main, ["ls", f"{bucket.url}/rum"])
    assert absent.exit_code == 2
    assert "does not exist" in absent.stderr


def test_show(flag: bool, any_bucket: AnyBucket) -> None:
    """The tree of a store's checkpoint, with statistics of what is read from there."""
    url = f"{any_bucket.url}/run"
    checkpoints.save_checkpoint(url, {"w": np.arange(101, dtype=np.float32), "step": 7}, 1)
    result = CliRunner().invoke(main, ["show", url, "--stats", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["path"], found["nbytes"]) == (f"{url}/checkpoint_1", 412)
    stats = {leaf["path"]: leaf["stats"] for leaf in found["leaves"]}
    assert stats["w"] == {"min": 0, "max": 100, "mean": 50, "nan": 0, "inf": 0}
    assert stats["step"]["mean"] == 7
    assert CliRunner().invoke(main, ["show", f"{any_bucket.url}/rum"]).exit_code == 2
