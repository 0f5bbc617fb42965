"""Our directories where Orbax users look: as an item of a CheckpointManager's step, and through Orbax v1.

An item needs nothing of ours changed. A step needs its own ``_CHECKPOINT_METADATA`` (which says who reads the item)
for ``restore`` without arguments and for v1; with arguments the bare item is enough (Orbax 0.12.8, measured).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.orbax_trees import on_host, save
from tests.support.peers import needs, ocp_v1
from tests.support.trees import fingerprint

_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
STEP_METADATA = {"metrics": {}, "performance_metrics": {}, "init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}


@pytest.fixture
def tree() -> dict[str, Any]:
    """What StandardCheckpointer can hold."""
    return {
        "params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)},
        "host": np.arange(30_000.0).reshape(300, 100),
        "step": 5,
        "rate": 2.5,
        "list": [1, jnp.ones(2), {"deep": jnp.zeros(4)}],
        "none": None,
    }


def abstract(tree: Any) -> Any:
    """Shapes and dtypes in place of arrays, with the shardings."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "standard": lambda tree: ocp.args.StandardRestore(),
    "standard with a target": lambda tree: ocp.args.StandardRestore(tree),
    "standard with an abstract target": lambda tree: ocp.args.StandardRestore(abstract(tree)),
    "pytree": lambda tree: ocp.args.PyTreeRestore(),
    "pytree with an item": lambda tree: ocp.args.PyTreeRestore(item=tree),
}


def make_step(root: Path, tree: Any, item: str = "default", described: bool = True) -> Path:
    """``root/3/<item>`` by our writer, with or without the file that real managers put into a step."""
    step = root / "3"
    step.mkdir(parents=True)
    save(step / item, tree)
    if described:
        text = json.dumps({"item_handlers": {item: _HANDLER}, "custom_metadata": {}, **STEP_METADATA})
        (step / "_CHECKPOINT_METADATA").write_text(text)
    return step


def same(restored: Any, tree: Any) -> None:
    """The same structure, types and bits."""
    assert fingerprint(on_host(restored)) == fingerprint(on_host(tree))


@pytest.mark.parametrize("described", [True, False], ids=["described", "bare"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_manager_restores_our_item(tmp_path: Path, tree: Any, arguments: str, described: bool) -> None:
    """With arguments of either kind, whether or not the step has a file of its own."""
    make_step(tmp_path / "root", tree, described=described)
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        assert manager.latest_step() == 3
        same(manager.restore(3, args=ARGUMENTS[arguments](tree)), tree)


@needs("orbax-checkpoint", 0, 11, 6, why="cannot restore without arguments")
def test_our_item_in_the_place_of_a_real_one(tmp_path: Path, tree: Any) -> None:
    """A real step whose item directory is replaced by ours restores our values, and the manager goes on saving."""
    root = tmp_path / "root"
    other = jax.tree.map(lambda x: x * 0, tree)
    with ocp.CheckpointManager(root) as manager:
        manager.save(3, args=ocp.args.StandardSave(other))
    shutil.rmtree(root / "3" / "default")
    save(root / "3" / "default", tree)
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        same(manager.restore(3), tree)
        for step in (4, 5):
            manager.save(step, args=ocp.args.StandardSave(other))
        manager.wait_until_finished()
        assert manager.all_steps() == [4, 5]
    assert not os.path.exists(root / "3")


def test_v1_reads_the_flat_directory(tmp_path: Path, tree: Any) -> None:
    """``load`` with and without an abstract tree, and ``metadata``, which knows every shape and dtype."""
    path = save(tmp_path / "c", tree)
    same(ocp_v1.load(path), tree)
    # v1 needs a sharding for each abstract leaf, so numpy arrays stay as they are, as for real directories.
    target = jax.tree.map(lambda x: abstract(x) if isinstance(x, jax.Array) else x, tree)
    same(ocp_v1.load(path, target), tree)
    described = ocp_v1.metadata(path).metadata
    assert described["params"]["b"].shape == (3,)
    assert described["params"]["b"].dtype == jnp.bfloat16
    assert described["host"].shape == (300, 100)


def test_v1_reads_our_item_of_a_step(tmp_path: Path, tree: Any) -> None:
    """A described step is one checkpointable to v1, for all its functions."""
    step = make_step(tmp_path / "root", tree)
    same(ocp_v1.load(step), tree)
    same(ocp_v1.load_checkpointables(step)["default"], tree)
    assert ocp_v1.metadata(step).metadata["params"]["w"].shape == (2, 3)
