"""What holds for a local folder holds in a store, also for `convert`, ``flax-ckpt ls`` and ``show``."""

import filecmp
import json
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from etils import epath
from flax.training import checkpoints as flax_checkpoints
from hypothesis import HealthCheck, given, settings

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat.cli import main
from tests.random_cases.saves import PREFIXES, calls, number, one_spelling, run
from tests.support.interpreters import run_python
from tests.support.profiles import examples
from tests.support.s3 import Bucket
from tests.support.saves import names, new_folder, tree
from tests.support.trees import fingerprint


@pytest.mark.slow
def test_paths_in_every_form(flag: bool, bucket: Bucket) -> None:
    """Trailing slashes, prefixes with slashes and PathLike objects mean the same place."""
    root = f"{bucket.url}/run"
    ours.save_checkpoint(root + "/", tree(1), 1)
    ours.save_checkpoint(epath.Path(root), tree(2), 2, keep=2)
    ours.save_checkpoint(root, tree(3), 3, prefix="sub/model_")
    assert ours.latest_checkpoint(epath.Path(root)) == f"{root}/checkpoint_2"
    assert ours.available_steps(root + "//") == [1, 2]
    assert ours.latest_checkpoint(root, "sub/model_") == f"{root}/sub/model_3"
    found = ours.restore_checkpoint(epath.Path(f"{root}/sub"), None, prefix="model_")
    assert fingerprint(found) == fingerprint(tree(3))
    assert [record.step for record in flax_ckpt_compat.iter_checkpoints(epath.Path(root))] == [1, 2]


@pytest.mark.slow
@given(sequence=calls(PREFIXES, number).map(one_spelling))
@settings(max_examples=examples(24, quick=4), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_is_left_as_by_flax(bucket: Bucket, sequence: list[dict[str, Any]]) -> None:
    """Every call has the same outcome and leaves the same names; the latest and the steps are the same."""
    prefix = uuid.uuid4().hex
    root = f"{bucket.url}/{prefix}"
    with new_folder() as folder:
        for index, one in enumerate(sequence):
            assert run(ours, root, one, index) == run(flax_checkpoints, folder, one, index), (index, one)
            assert sorted({key.split("/")[1] for key in bucket.keys(f"{prefix}/")}) == names(folder), (index, one)
        for start in {one["prefix"] for one in sequence}:
            latest = flax_checkpoints.latest_checkpoint(folder, start)
            assert ours.latest_checkpoint(root, start) == (latest and f"{root}/{Path(latest).name}")
            assert ours.available_steps(root, start, float) == flax_checkpoints.available_steps(folder, start, float)


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "migration_guide/object_stores.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_program_runs(bucket: Bucket) -> None:
    """The first program of the page runs in a fresh interpreter, with a bucket of the tests in the place of its own."""
    program, _ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    program = program.replace("s3://bucket/", f"{bucket.url}/")
    flag = "import flax; flax.config.update('flax_use_orbax_checkpointing', True)\n"
    assert "7 " in run_python(flag + program)[0]


def contents(bucket: Bucket) -> dict[str, bytes]:
    """Every object of a bucket."""
    names = bucket.keys()
    return {name: bucket.get(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["orbax", "manager"])
def test_there_and_back(bucket: Bucket, tmp_path: Path, to: str) -> None:
    """A tree of runs goes to a store, and from there back to files with the same bytes; both are resumed."""
    for one in ("a", "b"):
        tree = {"big": np.arange(2**18, dtype=np.float32), "deep": {"n": 1, "list": {"0": one, "1": None}}}
        flax_ckpt_compat.save(tmp_path / "src" / one, tree, step=3, format="msgpack")
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
    ours.save_checkpoint(url, {"w": np.arange(101, dtype=np.float32)}, 1)
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
