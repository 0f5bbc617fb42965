"""``flax-ckpt ls`` on an object store."""

import json

import numpy as np
from click.testing import CliRunner

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.cli import main
from tests.support.s3 import Bucket


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
