"""Folders of CLU: Flax's msgpack beside the files of TensorFlow, of which one names the latest step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from tests.support.layouts import assert_every_function_reads, assert_same


def state(step: int) -> dict[str, Any]:
    """The state of a step."""
    return {"step": np.int32(step), "params": {"w": np.full(3, step, np.float32)}}


def write(folder: Path, *steps: int, latest: str) -> None:
    """Write what CLU's ``Checkpoint`` writes: a .flax file a step, TensorFlow's files, and the look-up file."""
    for step in steps:
        (folder / f"ckpt-{step}.flax").write_bytes(serialization.to_bytes(state(step)))
        (folder / f"ckpt-{step}.index").write_bytes(b"\x00\x00\x02\x08\x01" + bytes(40))
        (folder / f"ckpt-{step}.data-00000-of-00001").write_bytes(bytes(16))
    names = "".join(f'all_model_checkpoint_paths: "ckpt-{step}"\n' for step in steps)
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{latest}"\n{names}')


@pytest.mark.parametrize("latest", ["ckpt-9", "/cns/of/another/cell/ckpt-9", "gs://bucket/run/ckpt-9"])
def test_every_function_reads_it(latest: str, tmp_path: Path) -> None:
    """The look-up file names the latest step, wherever the folder is now; it is not the one with the largest number."""
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", 8, 9, 10, latest=latest)
    assert_every_function_reads(tmp_path / "run", state(9), "clu", tmp_path / "converted")
    assert_same(flax_ckpt_compat.restore(tmp_path / "run" / "ckpt-8.flax"), state(8))


@pytest.mark.parametrize("latest", ["ckpt-7", "../ckpt-9", "..", "", 'ckpt-9\\"', "a/"])
def test_a_step_that_is_not_there(latest: str, tmp_path: Path) -> None:
    """The folder is refused, with a file in it that restores; only names in the folder count."""
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", 8, 10, latest=latest)
    with pytest.raises(errors.CheckpointError, match=r"\.flax"):
        flax_ckpt_compat.restore(tmp_path / "run")


def test_saves_leave_it_alone(tmp_path: Path) -> None:
    """Flax's own checkpoints may be saved beside it; then these are the latest."""
    write(tmp_path, 8, 9, latest="ckpt-9")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, state(step), step, keep=1, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {*before, "checkpoint_2"}
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert_same(flax_ckpt_compat.restore(tmp_path), state(2))


def test_what_clu_wrote() -> None:
    """The files are those of clu 0.0.12 with TensorFlow 2.21, which saved steps 1 and 2 of a class of flax.struct."""
    folder = Path(__file__).parents[1] / "data" / "layouts" / "clu_0.0.12"
    params = {"kernel": np.full((2, 3), 2, np.float32), "bias": np.zeros(3, ml_dtypes.bfloat16)}
    opt_state = {"0": np.ones(2, np.float32), "1": np.array(2, np.int32)}
    expected = {"step": 2, "params": {"dense": params}, "opt_state": opt_state}
    assert_same(flax_ckpt_compat.restore(folder), expected)
    assert flax_ckpt_compat.restore(folder / "ckpt-2.flax")["step"] == 1
    target = {**expected, "opt_state": (np.zeros(2, np.float32), np.array(0, np.int32))}
    assert_same(flax_ckpt_compat.restore(folder, target)["opt_state"], tuple(opt_state.values()))
