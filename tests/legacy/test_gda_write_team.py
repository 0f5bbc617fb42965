"""Two real processes with two devices each save and restore together: ours and real Flax, in both directions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints as ours
from tests.legacy import gda_jobs as jobs
from tests.support.saves import names
from tests.support.team import team_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our saves: step 1 once, step 2 over one that was there, step 3 in the background."""
    path = str(tmp_path_factory.mktemp("gda"))
    for step, n, copied in ((1, 1, False), (2, 1, False), (2, 2, False), (3, 3, True)):
        team_of(2).call(jobs.save_ours, path, step, n, copied)
    return path


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Real Flax's save of version 2 as step 1."""
    path = str(tmp_path_factory.mktemp("gda"))
    team_of(2).call(jobs.save_real, path, 1, 2)
    return path


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves by their names joined with ``|``."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: leaf for name, child in tree.items() for key, leaf in flat(child, f"{path}|{name}").items()}


def bits(value: Any) -> Any:
    """What has to be equal: dtype, shape and bytes of arrays."""
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def expected(n: int, plain: bool) -> dict[str, Any]:
    """What numpy has."""
    spread = jobs.values(n)
    dots = spread.pop("..")
    found: dict[str, Any] = {f"|layers|0|{name}": value for name, value in spread.items()}
    found |= {f"|layers|1|{name}": dots for name in (["w/x"] if plain else ["..", "a/b", "a|b"])}
    return found | {"|n": n, "|text": "t" * n, "|host": np.full(3, n), "|copied": np.full(4, n, np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3])
def test_one_process_reads_what_two_wrote(folder: str, step: int) -> None:
    """Without a target every leaf is bit for bit what numpy has, in numpy."""
    found = flat(ours.restore_checkpoint(folder, None, step))
    assert {name: bits(leaf) for name, leaf in found.items()} == {
        name: bits(leaf) for name, leaf in expected(step, plain=False).items()
    }


@pytest.mark.parametrize("step", [1, 2, 3])
def test_real_flax_restores_ours(folder: str, step: int) -> None:
    """Flax's manager places every array as the target says, whether the step was new or replaced another."""
    assert team_of(2).call(jobs.restore_real, folder, step) == [(step, [])] * 2


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
def test_two_processes_restore_ours(folder: str, shape: tuple[int, int]) -> None:
    """On the mesh of the save and on others."""
    assert team_of(2).call(jobs.restore_ours, folder, 2, shape) == [(2, [])] * 2


def test_one_process_reads_real_flaxs(real: str) -> None:
    """Real Flax's checkpoint of two processes, without a target."""
    found = flat(ours.restore_checkpoint(real, None, 1))
    assert {name: bits(leaf) for name, leaf in found.items()} == {
        name: bits(leaf) for name, leaf in expected(2, plain=True).items()
    }


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_two_processes_restore_real_flaxs(real: str, shape: tuple[int, int]) -> None:
    """Real Flax's checkpoint, placed on the mesh of the save and on another."""
    assert team_of(2).call(jobs.restore_ours, real, 1, shape, True) == [(2, [])] * 2


def files_of(folder: str) -> dict[str, Any]:
    """The arrays' metadata and the names of their chunks, by path in the folder."""
    found: dict[str, Any] = {}
    for path, _, entries in os.walk(folder):
        for entry in entries:
            name = os.path.relpath(os.path.join(path, entry), folder)
            found[name] = json.loads(Path(path, entry).read_text()) if entry == ".zarray" else None
    return found


def test_the_folder_is_laid_out_as_in_flax(folder: str, real: str) -> None:
    """The same files by the same names, chunks of zeros among them, and the same metadata but for our checksum."""
    mine, theirs = files_of(f"{folder}/checkpoint_1_gda/layers/0"), files_of(f"{real}/checkpoint_1_gda/layers/0")
    assert all("flax_ckpt_compat" in metadata for metadata in mine.values() if metadata)
    for metadata in filter(None, mine.values()):
        del metadata["flax_ckpt_compat"]
    assert mine == theirs
    assert len(mine) > 40


def test_nothing_else_is_left(folder: str) -> None:
    """No temporaries, and a replaced step has one set of arrays."""
    assert names(folder) == [f"checkpoint_{step}{end}" for step in (1, 2, 3) for end in ("", "_gda")]
    assert len(names(f"{folder}/checkpoint_2_gda")) == 1
