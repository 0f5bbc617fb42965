"""Checkpoints of real old releases, converted: each restores to what was saved."""

import logging
from pathlib import Path

import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from tests.both_formats.test_corpus import assert_equal, read_case
from tests.support import corpus

# Two leaves with one stored name, and checkpoints that are no single tree.
SPECIAL = ("collide", "json", "save_checkpointables", "orbax_prng/handler")
CASES = [case for case in corpus.cases() if not any(word in str(case) for word in SPECIAL)]
NEWEST = max(case.flax for case in CASES)
QUICK = ("legacy_msgpack", "gda", "orbax_manager", "orbax_v1")


def parameters() -> list[object]:
    """All cases; slow are all but the first of some writers in the newest release."""
    chosen = {case.family: case for case in reversed(CASES) if case.flax == NEWEST and case.family in QUICK}.values()
    return [pytest.param(case, id=str(case), marks=() if case in chosen else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_conversions_restore_to_what_was_saved(
    case: corpus.Case, unpacked: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To Orbax's format, and from there to msgpack; all that old releases wrote is theirs."""
    path, expected, _ = read_case(case, unpacked)
    with caplog.at_level(logging.ERROR, "flax_ckpt_compat"):
        (done,) = flax_ckpt_compat.convert(path, tmp_path / "orbax", "orbax")
        assert not [note for note in done.notes if "other files" in note]
        flax_ckpt_compat.convert(tmp_path / "orbax", tmp_path / "file", "msgpack")
        for result in ("orbax", "file"):
            assert_equal(case, expected, checkpoints.restore_checkpoint(tmp_path / result, None), with_target=False)
