"""Which of several trees a target means: its structure decides, and names only between equals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat import checkpoints, plan_restore, restore, rules
from flax_ckpt_compat.errors import CorruptCheckpointError, KindMismatchError, MissingLeavesError
from tests.support.samples import fingerprint

STATE = {"params": {"w": np.ones(3)}, "opt": {"mu": np.full(3, 2.0)}, "step": 7}
AVERAGED = {"w": np.zeros(3)}
EMPTY = {"params": {"w": np.full(3, 9.0)}, "opt": {"mu": np.full(3, 9.0)}, "step": 0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A step with averaged weights as ``params``, and the whole state as ``train_state``."""
    save(tmp_path, params=AVERAGED, train_state=STATE)
    return tmp_path


def save(root: Path, **items: Any) -> None:
    """Save a step of these trees by a real CheckpointManager."""
    with ocp.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.Composite(**{name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}))
        manager.wait_until_finished()


def same(found: Any, expected: Any) -> None:
    """Assert equality to the last bit."""
    assert fingerprint(found) == fingerprint(expected)


@pytest.mark.parametrize("options", [{}, {"orbax_transforms": {}}], ids=["plain", "transforms"])
def test_a_state_whose_field_has_an_items_name(root: Path, options: dict[str, Any]) -> None:
    """The weights of the item ``params`` are not taken for the state's own, nor its other fields left initial."""
    same(checkpoints.restore_checkpoint(root, EMPTY, **options), STATE)


def test_the_other_item(root: Path) -> None:
    """A target like the averaged weights means these."""
    same(restore(root, {"w": np.ones(3)}), AVERAGED)


def test_a_mapping_of_items(root: Path) -> None:
    """Items by their names, some or all, still are a mapping of them, also with rules."""
    same(restore(root, {"params": {"w": np.ones(3)}}), {"params": AVERAGED})
    both = {"params": {"w": np.ones(3)}, "train_state": EMPTY}
    same(restore(root, both), {"params": AVERAGED, "train_state": STATE})
    renamed = restore(root, {"params": {"v": np.ones(3)}}, transforms=[rules.rename("params/w", "params/v")])
    same(renamed, {"params": {"v": AVERAGED["w"]}})


def test_an_almost_fitting_target(root: Path) -> None:
    """The item with most of its leaves is meant; the error names that one, and how each item fits."""
    with pytest.raises(MissingLeavesError, match=r"train_state lacks 1 .*\n  extra") as caught:
        restore(root, {**EMPTY, "extra": np.ones(1)})
    assert "params (0 of 4 leaves, 1 besides)" in str(caught.value)
    assert "train_state (3 of 4 leaves)" in str(caught.value)
    assert "train_state (3 of 4 leaves)" in plan_restore(root, {**EMPTY, "extra": np.ones(1)}).why


def test_equals(tmp_path: Path) -> None:
    """Between trees of one structure the usual name decides; without one it is an error that names them all."""
    save(tmp_path / "usual", ema=AVERAGED, state={"w": np.full(3, 5.0)})
    same(restore(tmp_path / "usual", {"w": np.ones(3)}), {"w": np.full(3, 5.0)})
    save(tmp_path / "others", student=AVERAGED, teacher={"w": np.full(3, 5.0)})
    with pytest.raises(KindMismatchError, match=r"student \(1 of 1 leaves\), teacher \(1 of 1 leaves\)"):
        restore(tmp_path / "others", {"w": np.ones(3)})


def test_a_broken_item_hides_no_whole_one(root: Path) -> None:
    """The whole one restores into its target; where all are asked for, the error names it, and the other."""
    (root / "1" / "params" / "_METADATA").write_text('{"tree')
    same(restore(root, EMPTY), STATE)
    with pytest.raises(CorruptCheckpointError, match=r"1/params/_METADATA.* restore by their names: train_state"):
        restore(root)
