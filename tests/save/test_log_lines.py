"""One line at INFO for each save and restore: bytes, seconds, rate, and the phases."""

import logging
import re

import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, rules
from tests.support.saves import use_flag

TREE = {"w": np.zeros((250, 1000), np.float32), "step": 3}
LINE = r"(Saved|Restored) \S+checkpoint_1: 1\.00 MB in ([\d.]+) s, ([\d.]+) GB/s \((.*)\)"


@pytest.mark.parametrize("background", [False, True])
def test_lines(flag, tmp_path, caplog, background):
    """The phases add up to the seconds, and bytes by seconds give the rate."""
    manager = checkpoints.AsyncManager() if background else None
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        checkpoints.save_checkpoint(tmp_path, TREE, 1, async_manager=manager)
        if manager:
            manager.wait_previous_save()
        checkpoints.restore_checkpoint(tmp_path, TREE)
    lines = [re.fullmatch(LINE, record.getMessage()) for record in caplog.records]
    assert [line and line[1] for line in lines] == ["Saved", "Restored"]
    saved = [part.rsplit(" ", 1)[0] for part in lines[0][4].split(", ")]
    assert saved == ["wait for earlier saves", "prepare", *["queue"] * background, "write", "publish", "retain"]
    for line in lines:
        phases = dict(part.rsplit(" ", 1) for part in line[4].split(", "))
        assert sum(map(float, phases.values())) == pytest.approx(float(line[2]), abs=0.005)
        # Seconds are rounded to thousandths, and the rate to hundredths.
        shortest, longest = max(float(line[2]) - 6e-4, 1e-6), float(line[2]) + 6e-4
        assert 1e-3 / longest - 0.006 <= float(line[3]) <= 1e-3 / shortest + 0.006


def test_leaves_of_rules_are_counted(tmp_path, caplog):
    """Those that a rule cuts from one stored array, by its bytes."""
    checkpoints.save_checkpoint(tmp_path, {"layers": {"w": np.zeros((4, 250_000), np.float32)}}, 1)
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        target = {f"layers_{n}": {"w": np.zeros(250_000, np.float32)} for n in range(4)}
        flax_ckpt_compat.restore(tmp_path, target, transforms=[rules.unstack("layers", "layers_{}")])
    assert "4.00 MB" in caplog.records[-1].getMessage()


def test_nothing_is_counted_when_nobody_listens(tmp_path, caplog):
    """Without INFO there is no line."""
    with caplog.at_level(logging.WARNING, "flax_ckpt_compat"), config.override(must_exist=True):
        checkpoints.save_checkpoint(tmp_path, TREE, 1)
        checkpoints.restore_checkpoint(tmp_path, TREE)
    assert not caplog.records


def test_a_file_without_checksums_is_told(tmp_path, caplog):
    """Once for a restore, at INFO: as real Flax writes it. With checksums="off" nobody asked for them."""
    with use_flag(False):
        flax_checkpoints.save_checkpoint(tmp_path / "flax", TREE, 1)
        checkpoints.save_checkpoint(tmp_path / "ours", TREE, 1)
    for name, settings, expected in (("flax", {}, 1), ("ours", {}, 0), ("flax", {"checksums": "off"}, 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "flax_ckpt_compat"), config.override(**settings):
            checkpoints.restore_checkpoint(tmp_path / name, TREE)
        told = [record.getMessage() for record in caplog.records if "is not verified" in record.getMessage()]
        assert len(told) == expected, (name, settings)
        assert not told or told[0].startswith(f"{tmp_path}/flax/checkpoint_1 has no checksums")
