"""Every checkpointer and handler of Orbax as reader: the values that were stored, or an error that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat import checkpoints, plan_restore, restore, rules
from flax_ckpt_compat.errors import CheckpointerError, CheckpointError, UnrecognizedFormatError
from tests.support.orbax_trees import on_host
from tests.support.peers import skip_without_typed_keys
from tests.support.saves import save_items, use_flag
from tests.support.trees import fingerprint

PYTREE_READERS: dict[str, Callable[[], Any]] = {
    "PyTreeCheckpointer": ocp.PyTreeCheckpointer,
    "StandardCheckpointer": ocp.StandardCheckpointer,
    "Checkpointer, PyTree": lambda: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
    "Checkpointer, Standard": lambda: ocp.Checkpointer(ocp.StandardCheckpointHandler()),
    "AsyncCheckpointer, PyTree": lambda: ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
    "AsyncCheckpointer, Standard": lambda: ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "Array": lambda: ocp.Checkpointer(ocp.ArrayCheckpointHandler()),
    "Json": lambda: ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    "Composite": lambda: ocp.Checkpointer(ocp.CompositeCheckpointHandler()),
    "async Composite": lambda: ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler()),
    "key": lambda: ocp.Checkpointer(ocp.JaxRandomKeyCheckpointHandler()),
}


def _tree() -> dict[str, Any]:
    skip_without_typed_keys()
    return {
        "array": np.arange(6.0).reshape(2, 3),
        "jax": jnp.arange(3),
        "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
        "nothing in it": np.zeros((0, 3)),
        "key": jax.random.key(3),
        "bool": True,
        "int": 5,
        "float": 1.5,
        "complex": 1 + 2j,
        "text": "hello",
        "bytes": b"\0x",
        "int64": np.int64(7),
        "float32": np.float32(2.5),
        "bool_": np.bool_(True),
        "none": None,
        "list": [1, {"x": 2.5}],
    }


def _save(directory: Path, tree: Any) -> None:
    with use_flag(True):
        checkpoints.save_checkpoint(directory, tree, 1)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of older releases
@pytest.mark.parametrize("with_target", [False, True], ids=["no target", "target"])
@pytest.mark.parametrize("name", PYTREE_READERS)
def test_every_leaf_has_its_type(name: str, with_target: bool, tmp_path: Path) -> None:
    """No reader turns a leaf into None, or into another type, for lack of an example of it."""
    tree = _tree()
    _save(tmp_path, tree)
    checkpointer = PYTREE_READERS[name]()
    restored = checkpoints.restore_checkpoint(tmp_path, tree if with_target else None, orbax_checkpointer=checkpointer)
    for key, value in on_host(tree).items():
        expected = {"0": value[0], "1": value[1]} if key == "list" and not with_target else value
        assert fingerprint(on_host(restored[key])) == fingerprint(expected), key
        assert type(restored[key]) is type(tree[key]) or key in ("bool_", "jax", "list"), key
    checkpointer.close()


def test_what_a_handler_makes_of_arrays_is_restored(tmp_path: Path) -> None:
    """A user's handler may decrypt or scale what is stored: its arrays are taken, not those of the files."""

    class Doubling(ocp.PyTreeCheckpointHandler):
        def restore(self, *args: Any, **kwargs: Any) -> Any:
            return {name: value * 2 for name, value in super().restore(*args, **kwargs).items()}

    _save(tmp_path, {"a": np.arange(3.0), "b": np.ones((2, 2), np.int32)})
    checkpointer = ocp.Checkpointer(Doubling())
    restored = checkpoints.restore_checkpoint(tmp_path, None, orbax_checkpointer=checkpointer)
    assert fingerprint(restored) == fingerprint({"a": np.arange(3.0) * 2, "b": np.full((2, 2), 2, np.int32)})
    checkpointer.close()


@pytest.mark.parametrize("with_target", [False, True], ids=["no target", "target"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_reader_of_something_else_is_an_error(name: str, with_target: bool, tmp_path: Path) -> None:
    """Handlers that are not for trees: the error names them and the way out, with theirs as the cause.

    So it is for saving, and nothing is taken for a checkpoint afterwards."""
    tree = {"a": np.arange(3.0), "n": 1}
    _save(tmp_path, tree)
    checkpointer = OTHERS[name]()
    with pytest.raises(CheckpointerError, match="leave orbax_checkpointer out") as caught:
        checkpoints.restore_checkpoint(tmp_path, tree if with_target else None, orbax_checkpointer=checkpointer)
    assert isinstance(caught.value, CheckpointError) and isinstance(caught.value, ValueError)
    assert type(checkpointer.handler).__name__ in str(caught.value) and caught.value.__cause__ is not None
    assert str(tmp_path / "checkpoint_1") in str(caught.value)
    with pytest.raises(CheckpointerError, match="one for pytrees"):
        checkpoints.save_checkpoint(tmp_path / "new", tree, 1, orbax_checkpointer=checkpointer)
    assert checkpoints.latest_checkpoint(tmp_path / "new") is None
    checkpointer.close()


def test_json_through_its_handler(tmp_path: Path) -> None:
    """A checkpoint of JSON alone is saved and restored through the handler for it."""
    checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    checkpoints.save_checkpoint(tmp_path, {"a": 1, "b": "x"}, 1, orbax_checkpointer=checkpointer)
    assert checkpoints.restore_checkpoint(tmp_path, None, orbax_checkpointer=checkpointer) == {"a": 1, "b": "x"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_several_items_through_composite(tmp_path: Path, asynchronous: bool) -> None:
    """Of items that a Composite wrote, the usual one is restored, also through a Composite."""
    made = ocp.AsyncCheckpointer if asynchronous else ocp.Checkpointer
    checkpointer = made(ocp.CompositeCheckpointHandler())
    tree = {"a": np.arange(3.0), "n": 1}
    items = ocp.args.Composite(state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave({"x": 1}))
    checkpointer.save(tmp_path / "checkpoint_1", args=items)
    if asynchronous:
        checkpointer.wait_until_finished()
    restored = checkpoints.restore_checkpoint(tmp_path, tree, orbax_checkpointer=checkpointer)
    assert fingerprint(restored) == fingerprint(tree)
    checkpointer.close()


class Secret:
    """A leaf that only a handler of its own saves and restores."""

    def __init__(self, text: str):
        self.text = text


class SecretHandler(ocp.type_handlers.TypeHandler):
    """Writes each leaf to a file of its own."""

    def typestr(self) -> str:
        return "tests.Secret"

    async def metadata(self, infos: Any, args: Any = None) -> Any:
        return [None for _ in infos]

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        for value, info in zip(values, infos, strict=True):
            (info.parent_dir / f"{info.name}.secret").write_text(value.text)
        return []

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        return [Secret((info.parent_dir / f"{info.name}.secret").read_text()) for info in infos]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Return a directory with a step in which a handler of a user's own saved one of two leaves."""
    ocp.type_handlers.register_type_handler(Secret, SecretHandler(), override=True)
    ocp.PyTreeCheckpointer().save(tmp_path / "checkpoint_1", {"w": np.arange(3.0), "own": Secret("text")})
    return tmp_path


def test_a_leaf_of_a_users_handler_hides_no_other(secret: Path) -> None:
    """As in real Orbax, what else is asked for is restored; asking for the leaf is an error that names it."""
    target = {"w": np.zeros(3)}
    arguments: dict[str, Any] = {"item": target, "transforms": {}, "restore_args": {"w": ocp.RestoreArgs()}}
    expected = ocp.PyTreeCheckpointer().restore(secret / "checkpoint_1", **arguments)
    for restored in (
        restore(secret, target),
        restore(secret, transforms=[rules.drop("own")]),
        restore(secret, {"w": np.zeros(3), "own": ...}),
        checkpoints.restore_checkpoint(secret, target),
    ):
        np.testing.assert_array_equal(restored["w"], expected["w"])
    assert plan_restore(secret, target).raises is None
    for whole in (None, {"w": np.zeros(3), "own": Secret("")}):
        for refused in (restore, checkpoints.restore_checkpoint):
            with pytest.raises(UnrecognizedFormatError, match=r"'own'.*tests\.Secret") as caught:
                refused(secret, whole)
            assert caught.value.leaf == "own"
        plan = plan_restore(secret, whole)
        assert plan.raises == "UnrecognizedFormatError"


@pytest.mark.parametrize("with_target", [False, True], ids=["no target", "target"])
def test_its_checkpointer_restores_that_leaf(secret: Path, with_target: bool) -> None:
    """With the other leaves, and under rules and transforms like them."""
    target = {"w": np.zeros(3), "new": Secret("")} if with_target else None
    restored = checkpoints.restore_checkpoint(
        secret, target, orbax_checkpointer=ocp.PyTreeCheckpointer(), orbax_transforms=[rules.rename("own", "new")]
    )
    assert restored["new"].text == "text" and restored["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", ["root", "step", "item"])
def test_a_checkpointer_reads_a_directory_of_items(layout: str, tmp_path: Path) -> None:
    """What restores without one, of a manager's steps, restores with one."""
    tree = {"a": np.arange(3.0), "n": 1}
    for step in (1, 2):
        save_items(tmp_path / "run", step, state=ocp.args.StandardSave(tree), ema={"b": np.full(2, step)})
    path = {"root": tmp_path / "run", "step": tmp_path / "run/2", "item": tmp_path / "run/2/state"}[layout]
    for checkpointer in (ocp.PyTreeCheckpointer(), ocp.StandardCheckpointer()):
        restored = checkpoints.restore_checkpoint(path, tree, orbax_checkpointer=checkpointer)
        assert fingerprint(restored) == fingerprint(tree)
        whole = checkpoints.restore_checkpoint(path, None, orbax_checkpointer=checkpointer)
        expected = tree if layout == "item" else {"state": tree, "ema": {"b": np.full(2, 2)}}
        assert fingerprint(on_host(whole)) == fingerprint(expected)
        checkpointer.close()
