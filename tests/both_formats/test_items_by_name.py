"""One item of several: by its name (``item=``, ``--item``), or the one whose structure a target has."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors, plan_restore, restore, rules
from flax_ckpt_compat.cli import main
from flax_ckpt_compat.errors import CorruptCheckpointError, KindMismatchError, MissingLeavesError
from tests.support.layouts import assert_same
from tests.support.saves import save_items

STATE = {"w": np.arange(4, dtype=np.float32), "step": np.int32(3)}
EMA = {"w": np.arange(4, dtype=np.float32) / 2, "step": np.int32(3)}
NOTES = {"epoch": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trees of one structure, and JSON, as a real manager saves them."""
    root = tmp_path_factory.mktemp("items") / "run"
    for step in (5, 6):
        save_items(root, step, ema=EMA, net=STATE, notes=ocp.args.JsonSave(NOTES))
    return root


def test_restore(run: Path) -> None:
    """The item is one tree, with a target that two items have, and without; JSON is one, too."""
    target = {"w": np.zeros(4, np.float32), "step": np.int32(0)}
    with pytest.raises(errors.KindMismatchError, match="equally like the target"):
        flax_ckpt_compat.restore(run, target)
    for name, value in (("ema", EMA), ("net", STATE)):
        assert_same(flax_ckpt_compat.restore(run, target, item=name), value)
        assert_same(flax_ckpt_compat.restore(run / "5", item=name), value)
        assert not flax_ckpt_compat.plan_restore(run, target, item=name).raises
    assert flax_ckpt_compat.restore(run, item="notes") == NOTES


def test_plan_and_view(run: Path) -> None:
    """What a restore gives is what a plan and an open checkpoint show; the step is that of the directory."""
    assert [leaf.path for leaf in flax_ckpt_compat.plan_restore(run, item="net").leaves] == ["step", "w"]
    with flax_ckpt_compat.open_checkpoint(run, item="ema") as view:
        assert (sorted(view.leaves()), view.step) == (["step", "w"], 6)
        assert_same(view.read(), EMA)


@pytest.mark.parametrize(
    "call",
    [
        flax_ckpt_compat.restore,
        flax_ckpt_compat.plan_restore,
        flax_ckpt_compat.open_checkpoint,
        lambda path, item: flax_ckpt_compat.diff(path, path, item=item),
    ],
)
def test_unknown_names(run: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    """The error lists the items that are there; a tree has none."""
    with pytest.raises(errors.ArgumentError, match=r"no item 'nets': its items are ema, net, notes"):
        call(run, item="nets")
    flax_ckpt_compat.save(tmp_path / "flat", STATE, format="orbax")
    with pytest.raises(errors.ArgumentError, match="without items"):
        call(tmp_path / "flat", item="net")
    for name in ("", 3):
        with pytest.raises(errors.ArgumentError, match="item is the name of an item"):
            call(run, item=name)


def test_commands(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """show, plan and diff look at one item; a file of one tree is compared with it."""

    def invoke(*arguments: Any) -> Any:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    shown = json.loads(invoke("show", run, "--item", "net", "--json").stdout)
    assert [leaf["path"] for leaf in shown["leaves"]] == ["step", "w"]
    assert invoke("plan", run, "--item", "net").exit_code == 0
    flax_ckpt_compat.save(tmp_path / "file", STATE, format="msgpack")
    assert invoke("diff", run, tmp_path / "file", "--item", "net").exit_code == 0
    assert invoke("diff", run, tmp_path / "file", "--item", "ema").exit_code == 1
    unknown = invoke("show", run, "--item", "nets")
    assert unknown.exit_code == 2 and "ema, net, notes" in unknown.stderr


def test_conversion_renames(run: Path, tmp_path: Path) -> None:
    """One item becomes the only one of a step, by the name that real managers read by default; others by theirs."""
    arguments = ["convert", str(run), str(tmp_path / "dst"), "--to", "manager", "--item", "net=default"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    with ocp.CheckpointManager(tmp_path / "dst") as manager:
        assert manager.all_steps() == [5, 6]
        np.testing.assert_equal(manager.restore(6, args=ocp.args.StandardRestore()), STATE | {"step": 3})
    flax_ckpt_compat.convert(run, tmp_path / "some", "manager", item={"ema": "average", "notes": ""})
    assert {path.name for path in (tmp_path / "some" / "6").iterdir() if path.is_dir()} == {"average", "notes"}
    flax_ckpt_compat.convert(run / "6", tmp_path / "flat", "orbax", item="ema")
    np.testing.assert_equal(ocp.PyTreeCheckpointer().restore(tmp_path / "flat"), EMA)


@pytest.mark.parametrize("item", ["nets", {"net": "a", "ema": "a"}, {"net": 3}, [], [3], "", {"net": "ema", "ema": ""}])
def test_conversion_refuses(run: Path, tmp_path: Path, item: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Names that are not there, two of one name, and what is no name; nothing is written."""
    caplog.set_level(logging.ERROR)
    with pytest.raises((errors.ArgumentError, errors.ConversionError)):
        flax_ckpt_compat.convert(run / "6", tmp_path / "dst", "manager", step=6, item=item)
    assert not list(tmp_path.rglob("6"))


MODEL = {"params": {"w": np.ones(3)}, "opt": {"mu": np.full(3, 2.0)}, "step": 7}
AVERAGED = {"w": np.zeros(3)}
EMPTY = {"params": {"w": np.full(3, 9.0)}, "opt": {"mu": np.full(3, 9.0)}, "step": 0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A step with averaged weights as ``params``, and the whole state as ``train_state``."""
    save_items(tmp_path, 1, params=AVERAGED, train_state=MODEL)
    return tmp_path


def test_the_structure_of_the_target_chooses(root: Path) -> None:
    """The weights of the item ``params`` are not taken for the state's own, nor its other fields left initial; items
    by their names, some or all, still are a mapping of them, also with rules."""
    assert_same(checkpoints.restore_checkpoint(root, EMPTY), MODEL)
    assert_same(checkpoints.restore_checkpoint(root, EMPTY, orbax_transforms={}), MODEL)
    assert_same(restore(root, {"w": np.ones(3)}), AVERAGED)
    assert_same(restore(root, {"params": {"w": np.ones(3)}}), {"params": AVERAGED})
    both = {"params": {"w": np.ones(3)}, "train_state": EMPTY}
    assert_same(restore(root, both), {"params": AVERAGED, "train_state": MODEL})
    renamed = restore(root, {"params": {"v": np.ones(3)}}, transforms=[rules.rename("params/w", "params/v")])
    assert_same(renamed, {"params": {"v": AVERAGED["w"]}})


def test_an_almost_fitting_target(root: Path) -> None:
    """The item with most of its leaves is meant; the error names that one, and how each item fits."""
    with pytest.raises(MissingLeavesError, match=r"train_state lacks 1 .*\n  extra") as caught:
        restore(root, {**EMPTY, "extra": np.ones(1)})
    assert "params (0 of 4 leaves, 1 besides)" in str(caught.value)
    assert "train_state (3 of 4 leaves)" in str(caught.value)
    assert "train_state (3 of 4 leaves)" in plan_restore(root, {**EMPTY, "extra": np.ones(1)}).why


def test_equals(tmp_path: Path) -> None:
    """Between trees of one structure the usual name decides; without one it is an error that names them all."""
    save_items(tmp_path / "usual", ema=AVERAGED, state={"w": np.full(3, 5.0)})
    assert_same(restore(tmp_path / "usual", {"w": np.ones(3)}), {"w": np.full(3, 5.0)})
    save_items(tmp_path / "others", student=AVERAGED, teacher={"w": np.full(3, 5.0)})
    with pytest.raises(KindMismatchError, match=r"student \(1 of 1 leaves\), teacher \(1 of 1 leaves\)"):
        restore(tmp_path / "others", {"w": np.ones(3)})


def test_a_broken_item_hides_no_whole_one(root: Path) -> None:
    """The whole one restores into its target, or by its name; where all are asked for, the error names it, and the
    other."""
    (root / "1" / "params" / "_METADATA").write_text('{"tree')
    assert_same(restore(root, EMPTY), MODEL)
    assert_same(restore(root, item="train_state"), MODEL)
    with pytest.raises(CorruptCheckpointError):
        restore(root, item="params")
    with pytest.raises(CorruptCheckpointError, match=r"1/params/_METADATA.* restore by their names: train_state"):
        restore(root)
