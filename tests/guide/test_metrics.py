"""The guide's program for metrics of save and restore times, with the loggers that it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, config

PAGE = Path(__file__).parents[2] / "migration_guide" / "how_to.md"


@pytest.fixture
def metrics_of() -> Iterator[Callable[[], dict[str, float]]]:
    """The page's function, and its setting for as long as the test runs."""
    (program,) = re.findall(r"^(import queue\n.*?^    return metrics\n)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, Any] = {"config": config}
    exec(program, names)
    yield names["checkpoint_metrics"]
    config.update(progress=None)


def line(logger: str) -> str:
    """The page's line for a logger."""
    (found,) = re.findall(rf"^\| {logger} \| `(.*)` \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return str(found)


class Clu:
    """What writes scalars as clu's writers do (clu 0.0.12: ``write_scalars(step, scalars)``)."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []

    def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Keep them."""
        self.written.append((step, scalars))


def test_a_loop_logs_the_times(tmp_path: Path, metrics_of: Callable[[], dict[str, float]]) -> None:
    """Each save and restore is logged once, also one in the background, with the metrics of the step."""
    manager, writer = checkpoints.AsyncManager(), Clu()
    state = {"w": np.ones(1000)}
    for step in range(1, 4):
        checkpoints.save_checkpoint(tmp_path, state, step, async_manager=manager)
        manager.wait_previous_save()
        exec(line("clu"), {"writer": writer, "step": step, "metrics": {"loss": 1.0}, "checkpoint_metrics": metrics_of})
    checkpoints.restore_checkpoint(tmp_path, state)
    assert [step for step, _ in writer.written] == [1, 2, 3]
    for _, scalars in writer.written:
        assert scalars.keys() == {"loss", "checkpoint/save_seconds", "checkpoint/save_gigabytes"}
        assert scalars["checkpoint/save_gigabytes"] == 8e-6
    assert metrics_of().keys() == {"checkpoint/restore_seconds", "checkpoint/restore_gigabytes"}
    assert metrics_of() == {}


def test_wandb(tmp_path: Path, metrics_of: Callable[[], dict[str, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the page is a call of the real wandb, in its offline mode."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path))
    checkpoints.save_checkpoint(tmp_path / "run", {"w": np.ones(1000)}, 1)
    exec(line("wandb"), {"wandb": wandb, "step": 1, "metrics": {}, "checkpoint_metrics": metrics_of})
    assert run.summary["checkpoint/save_gigabytes"] == 8e-6
    run.finish()
