"""What has to be true while a project moves, as real Flax and real Orbax read it; the page names these functions.

Each takes the run, and what the terminal shows after the block, without colours.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

if TYPE_CHECKING:
    from tests.guide.walk import Walk

PROJECT = Path(__file__).with_name("walk_project")
_RENAMED = {"Dense_0": "encoder", "Dense_1": "head"}


def trained_last_year(walk: Walk, _: str) -> None:
    """Train by real Flax; and once more to the end, for comparison: that run never moves."""
    for workdir, steps in (("runs/a", "150"), (str(walk.aside / "run"), "450")):
        command = [sys.executable, "train.py", workdir, steps]
        done = subprocess.run(command, cwd=walk.folder, env=walk.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def same_file(walk: Walk, _: str) -> None:
    """What was saved under the shim is real Flax's file, byte for byte."""
    for step in (100, 200):
        ours, theirs = walk.folder / f"runs/a/checkpoint_{step}", walk.aside / f"run/checkpoint_{step}"
        assert ours.read_bytes() == theirs.read_bytes()


def same_values(walk: Walk, _: str) -> None:
    """Real Orbax reads from the new directory what real Flax's file of that step holds."""
    assert (walk.folder / "runs/a/checkpoint_200").is_file()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ocp.PyTreeCheckpointer().restore(walk.folder / "runs/a/checkpoint_300")
    _assert_same(tree, walk.aside / "run/checkpoint_300", {})


def paste(walk: Walk, shown: str) -> None:
    """Paste the proposed rules."""
    begin, end = shown.index("from flax_ckpt_compat import rules"), shown.rindex("\n]") + 2
    (walk.folder / "renamed.py").write_text(shown[begin:end] + "\n", encoding="utf-8")


def managed(walk: Walk, _: str) -> None:
    """A real CheckpointManager lists all steps and restores the values, under the new names."""
    assert _managed_steps(walk) == [100, 200, 300, 350]
    for step in (100, 200, 300):
        _assert_same(_managed_tree(walk, step), walk.aside / f"run/checkpoint_{step}", _RENAMED)


def trained_on_gpus(walk: Walk, _: str) -> None:
    """Save two items by a real CheckpointManager, as of a GPU; and write the program that reads one by Orbax alone."""
    state = jax.tree.map(jnp.asarray, _managed_tree(walk, 350))
    items = {"state": state, "ema": state["params"]}
    with ocp.CheckpointManager(walk.folder / "runs/teacher", item_names=tuple(items)) as manager:
        manager.save(
            350, args=ocp.args.Composite(**{name: ocp.args.StandardSave(tree) for name, tree in items.items()})
        )
    files = list((walk.folder / "runs/teacher").rglob("_sharding"))
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert "cpu:0" in text or "CPU" in text
        file.write_text(text.replace("TFRT_CPU_0", "cuda:0").replace("cpu:0", "cuda:0"), encoding="utf-8")
    assert len(files) == 2
    # In the words of Orbax 0.11.7, and of later releases.
    refused = r"Topology mismatch|Device cuda:0 was not found"
    with pytest.raises(ValueError, match=refused), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ocp.StandardCheckpointer().restore(walk.folder / "runs/teacher/350/ema")
    shutil.copy(PROJECT / "later/evaluate_orbax.py", walk.folder)


def on_cpus(walk: Walk, shown: str) -> None:
    """Real Orbax has restored the weights on this machine's CPU, bit by bit; they are as good as they were."""
    assert "accuracy 0.97" in shown
    with warnings.catch_warnings(), ocp.CheckpointManager(walk.folder / "orbax/teacher") as manager:
        warnings.simplefilter("ignore")
        found = manager.restore(350, args=ocp.args.StandardRestore())
    expected = dict(_leaves(_managed_tree(walk, 350)["params"]))
    assert {path: value.tobytes() for path, value in _leaves(found)} == {
        path: value.tobytes() for path, value in expected.items()
    }


def uninstall(walk: Walk, _: str) -> None:
    """Make this library as good as uninstalled, and write the new program."""
    shutil.copy(PROJECT / "later/train_orbax.py", walk.folder)
    folder = walk.aside / "uninstalled"
    folder.mkdir()
    (folder / "flax_ckpt_compat.py").write_text("raise ImportError('uninstalled')\n", encoding="utf-8")
    walk.environment["PYTHONPATH"] = str(folder)


def as_if_never_moved(walk: Walk, shown: str) -> None:
    """The run that moved ends with the state of the one that did not."""
    assert "from step 350" in shown
    assert _managed_steps(walk) == [100, 200, 300, 400, 450]
    _assert_same(_managed_tree(walk, 450), walk.aside / "run/checkpoint_450", _RENAMED)
    del walk.environment["PYTHONPATH"]


def _managed_steps(walk: Walk) -> list[int]:
    with ocp.CheckpointManager(walk.folder / "orbax/a") as manager:
        return sorted(manager.all_steps())


def _managed_tree(walk: Walk, step: int) -> Any:
    with warnings.catch_warnings(), ocp.CheckpointManager(walk.folder / "orbax/a") as manager:
        warnings.simplefilter("ignore")
        return manager.restore(step, args=ocp.args.StandardRestore())


def _assert_same(tree: Any, file: Path, renamed: dict[str, str]) -> None:
    """Compare a tree of Orbax with a msgpack file of Flax, bit by bit."""
    expected = {
        tuple(renamed.get(name, name) for name in path): value
        for path, value in _leaves(serialization.msgpack_restore(file.read_bytes()))
    }
    found = dict(_leaves(tree))
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for path, value in expected.items():
        here = np.asarray(found[path])
        assert (here.dtype, here.shape, here.tobytes()) == (value.dtype, value.shape, value.tobytes()), path


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    items = dict(enumerate(tree)) if isinstance(tree, list | tuple) else tree
    if isinstance(items, dict):
        for name, value in items.items():
            yield from _leaves(value, (*path, str(name)))
    elif tree is not None:
        yield path, np.asarray(tree)
