"""`convert`, ``flax-ckpt ls`` and ``show`` on stores: the same bytes come back, and a source there stays as it was."""

import filecmp
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.cli import main
from tests.support.s3 import Bucket


def contents(bucket: Bucket) -> dict[str, bytes]:
    """Every object of a bucket."""
    names = bucket.keys()
    return {name: bucket.get(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["orbax", "manager"])
def test_there_and_back(bucket: Bucket, tmp_path: Path, to: str) -> None:
    """A tree of runs goes to a store, and from there back to files with the same bytes; both are resumed."""
    for run in ("a", "b"):
        tree = {"big": np.arange(2**18, dtype=np.float32), "deep": {"n": 1, "list": {"0": run, "1": None}}}
        flax_ckpt_compat.save(tmp_path / "src" / run, tree, step=3, format="msgpack")
    url = f"{bucket.url}/runs"
    for status in ("converted", "kept"):
        done = flax_ckpt_compat.convert(tmp_path / "src", url, to, resume=True)  # type: ignore[arg-type]
        assert [result.status for result in done] == [status, status]
        name = "checkpoint_3" if to == "orbax" else "3"
        assert [result.destination for result in done] == [f"{url}/a/{name}", f"{url}/b/{name}"]
        objects = contents(bucket)
        flax_ckpt_compat.convert(url, tmp_path / "back", "msgpack", resume=True)
        assert contents(bucket) == objects
    names = ["a/checkpoint_3", "b/checkpoint_3"]
    assert filecmp.cmpfiles(tmp_path / "src", tmp_path / "back", names, shallow=False) == (names, [], [])


def test_list_of_a_store(flag: bool, bucket: Bucket) -> None:
    """The checkpoints of a URL with the bytes of their objects, and numbers of what is read from there.

    A URL below which there is nothing is refused.
    """
    url = f"{bucket.url}/run"
    checkpoints.save_checkpoint(url, {"w": np.arange(101, dtype=np.float32)}, 1)
    result = CliRunner().invoke(main, ["ls", url, "--json"])
    (record,) = json.loads(result.stdout)
    assert (record["step"], record["format"], record["complete"]) == (1, "orbax" if flag else "msgpack", True)
    assert record["nbytes"] == sum(len(bucket.get(key)) for key in bucket.keys("run/"))
    assert record["saved"] is None
    result = CliRunner().invoke(main, ["show", url, "--stats", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["path"], found["nbytes"]) == (f"{url}/checkpoint_1", 404)
    (leaf,) = found["leaves"]
    assert leaf["stats"] == {"finite": 101, "nan": 0, "inf": 0, "min": 0, "max": 100, "total": 5050, "mean": 50}
    for command in ("ls", "show"):
        absent = CliRunner().invoke(main, [command, f"{bucket.url}/rum"])
        assert absent.exit_code == 2
        assert "does not exist" in absent.stderr
