"""What holds for a local folder holds in a store, also where one request of ten fails."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from flax.training import checkpoints as flax_checkpoints
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from tests.save.test_retention import call, one_spelling, run
from tests.support import s3
from tests.support.interpreters import run_python
from tests.support.profiles import examples
from tests.support.s3 import Bucket
from tests.support.saves import names, new_folder, use_flag
from tests.support.store_places import Place
from tests.support.trees import fingerprint


@pytest.fixture(params=["s3", pytest.param("s3 with faults", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, bucket: Bucket) -> Iterator[Place]:
    """A place that holds nothing yet."""
    rate = 0.1 if "faults" in request.param else 0.0
    with bucket.proxy.failing(s3.sometimes(rate, seed=len(request.node.name))):
        yield Place(f"{bucket.url}/run", bucket=bucket)


def state(step: int) -> dict[str, Any]:
    """A tree with all kinds of leaves, large and small, that tells which save it is from."""
    return {
        "w": np.random.default_rng(step).random((60, 500)),
        "half": np.full((7,), step, ml_dtypes.bfloat16),
        "on_device": jnp.arange(40_000, dtype=jnp.float32).reshape(200, 200) + step,
        "layers": {str(n): {"bias": np.full(n, step, np.int16)} for n in range(6)},
        "step": step,
        "name": f"save {step}",
        "none": None,
    }


def expect(found: Any, step: int) -> None:
    """Fails unless the values, types and bits are those of this save."""
    wanted = state(step)
    wanted["on_device"] = np.asarray(wanted["on_device"])
    assert fingerprint(jax.tree.map(_host, found)) == fingerprint(wanted)


def _host(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def save(place: Place, step: Any, **options: Any) -> str:
    """Saves the state of this step."""
    return ours.save_checkpoint(place.root, state(int(step)), step, **options)


def test_what_is_saved_comes_back(flag: bool, place: Place) -> None:
    """Bits, dtypes and types are those that were saved, into a target and without one, whole and in parts."""
    assert save(place, 3) == place / "checkpoint_3"
    expect(ours.restore_checkpoint(place.root, state(0)), 3)
    expect(ours.restore_checkpoint(place / "checkpoint_3", None), 3)
    with flax_ckpt_compat.open_checkpoint(place.root) as opened:
        assert opened.step == 3
        assert opened.path == place / "checkpoint_3"
        assert fingerprint(opened.read("layers/5")) == fingerprint({"layers": {"5": state(3)["layers"]["5"]}})


@pytest.mark.slow
def test_saves_in_the_background(flag: bool, place: Place) -> None:
    """The values are those at the call, the order is that of the calls, and retention runs after each."""
    manager = ours.AsyncManager()
    for step in (1, 2, 3):
        tree = state(step)
        ours.save_checkpoint(place.root, tree, step, async_manager=manager)
        tree["w"][:] = -1
    manager.wait_previous_save()
    assert place.names() == ["checkpoint_3"]
    expect(ours.restore_checkpoint(place.root, state(0)), 3)


@pytest.mark.slow
def test_paths_in_every_form(flag: bool, place: Place) -> None:
    """Trailing slashes, prefixes with slashes and PathLike objects mean the same place."""
    ours.save_checkpoint(place.root + "/", state(1), 1)
    ours.save_checkpoint(epath.Path(place.root), state(2), 2, keep=2)
    ours.save_checkpoint(place.root, state(3), 3, prefix="sub/model_")
    assert ours.latest_checkpoint(epath.Path(place.root)) == place / "checkpoint_2"
    assert ours.available_steps(place.root + "//") == [1, 2]
    assert ours.latest_checkpoint(place.root, "sub/model_") == place / "sub/model_3"
    expect(ours.restore_checkpoint(epath.Path(place / "sub"), None, prefix="model_"), 3)
    assert [record.step for record in flax_ckpt_compat.iter_checkpoints(epath.Path(place.root))] == [1, 2]


def test_where_nothing_is(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A place without anything gives back the target said at INFO, and None, and an error for a step."""
    target = state(1)
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        assert ours.restore_checkpoint(place.root, target) is target
    assert place.root in caplog.text
    assert ours.latest_checkpoint(place.root) is None
    assert ours.available_steps(place.root) == []
    assert list(flax_ckpt_compat.iter_checkpoints(place.root)) == []
    with pytest.raises(errors.CheckpointNotFoundError):
        ours.restore_checkpoint(place.root, target, step=1)
    with pytest.raises(errors.CheckpointNotFoundError):
        flax_ckpt_compat.open_checkpoint(place.root)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [False, True], ids=["msgpack", "orbax"])
@given(calls=st.lists(call, min_size=1, max_size=7).map(one_spelling))
@settings(max_examples=examples(12, quick=2), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_is_left_as_by_flax(bucket: Bucket, flag: bool, calls: list[dict[str, Any]]) -> None:
    """Every call has the same outcome and leaves the same names; the latest and the steps are the same."""
    prefix = uuid.uuid4().hex
    root = f"{bucket.url}/{prefix}"
    with new_folder() as folder:
        for index, one in enumerate(calls):
            with use_flag(False):
                expected = run(flax_checkpoints, folder, one)
            with use_flag(flag):
                assert run(ours, root, one) == expected, (index, one)
            assert sorted({key.split("/")[1] for key in bucket.keys(f"{prefix}/")}) == names(folder), (index, one)
        for start in {one.get("prefix", "checkpoint_") for one in calls}:
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
