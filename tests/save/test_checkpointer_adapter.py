"""Checkpointer objects of real Orbax: they do the work, our naming, overwrite and retention rules stay around them."""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import syncing
from flax_ckpt_compat.errors import InvalidCheckpointError, StorageError
from tests.support.layouts import assert_same
from tests.support.path_kinds import WordsHandler
from tests.support.peers import needs, skip_without_typed_keys
from tests.support.samples import fingerprint
from tests.support.saves import names, run_saving, use_flag

TREE = {"a": np.arange(6.0).reshape(2, 3), "b": {"c": np.ones(4, np.float32), "n": 3}, "l": [np.zeros(1, np.int8)]}
NEW = {**TREE, "a": TREE["a"] + 1}


FIRE = RuntimeError("the disk caught fire")


class Gated(ocp.PyTreeCheckpointHandler):
    """A handler whose commit waits for a gate, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def finalize(self, directory: Any) -> None:
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        super().finalize(directory)


CHECKPOINTERS: dict[str, Callable[[], Any]] = {
    "Checkpointer": lambda: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
    "PyTreeCheckpointer": ocp.PyTreeCheckpointer,
    "StandardCheckpointer": ocp.StandardCheckpointer,
    "AsyncCheckpointer": lambda: ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
    "CommitFile": lambda: ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(), temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath
    ),
}


KINDS = {"sync": ocp.Checkpointer, "async": ocp.AsyncCheckpointer}


@pytest.fixture(params=CHECKPOINTERS)
def checkpointer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One of the checkpointers that users pass."""
    with CHECKPOINTERS[request.param]() as made:
        yield made


@pytest.fixture
def handler() -> Gated:
    """A handler for a checkpointer."""
    return Gated()


@pytest.fixture
def checkpointing(handler: Gated, tmp_path: Path) -> Iterator[Any]:
    """A checkpointer that saves in the background by it; it is closed before its files are removed."""
    with ocp.AsyncCheckpointer(handler) as made:
        yield made


def settle(directory: Path) -> None:
    """A call of ours for the directory, which finishes its background saves."""
    checkpoints.restore_checkpoint(directory, None)


def test_save_and_restore_go_through_it(checkpointer: Any, tmp_path: Path) -> None:
    """The given object writes and reads, and the tree comes back with its containers, dtypes and types; our own reader
    restores it, also while its save is on its way."""
    with patch.object(checkpointer, "save", wraps=checkpointer.save) as save:
        path = checkpoints.save_checkpoint(tmp_path, TREE, 1, orbax_checkpointer=checkpointer)
    assert path == str(tmp_path / "checkpoint_1") and [str(call.args[0]) for call in save.call_args_list] == [path]
    with patch.object(checkpointer, "restore", wraps=checkpointer.restore) as restore:
        for through in (None, checkpointer):
            restored = checkpoints.restore_checkpoint(tmp_path, TREE, orbax_checkpointer=through)
            assert fingerprint(restored) == fingerprint(TREE)
            assert type(restored["a"]) is np.ndarray and restored["a"].flags.writeable
    assert [str(call.args[0]) for call in restore.call_args_list] == [path]


def test_msgpack_files_need_no_checkpointer(tmp_path: Path) -> None:
    """A msgpack file restores by our reader, whatever checkpointer is passed, as in Flax."""
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path, TREE, 1)
    reader = ocp.Checkpointer(WordsHandler())  # which cannot read it
    assert_same(checkpoints.restore_checkpoint(tmp_path, TREE, orbax_checkpointer=reader), TREE)


def test_overwrite_replaces_the_step(checkpointer: Any, tmp_path: Path) -> None:
    """overwrite=True replaces an existing step by the new values and removes newer ones."""
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, TREE, step, keep=5, orbax_checkpointer=checkpointer)
    checkpoints.save_checkpoint(tmp_path, NEW, 1, keep=5, overwrite=True, orbax_checkpointer=checkpointer)
    settle(tmp_path)
    assert names(tmp_path) == ["checkpoint_1"]
    assert_same(checkpoints.restore_checkpoint(tmp_path, TREE, orbax_checkpointer=checkpointer), NEW)


def test_an_uncommitted_save_evicts_nothing(handler: Gated, checkpointing: Any, tmp_path: Path) -> None:
    """With keep=1 the old checkpoint stays, and is the latest, until the new one is committed, and its checkpointer is
    used again, be it elsewhere."""
    checkpoints.save_checkpoint(tmp_path, TREE, 1, orbax_checkpointer=checkpointing)
    checkpointing.wait_until_finished()
    handler.gate.clear()
    checkpoints.save_checkpoint(tmp_path, TREE, 2, orbax_checkpointer=checkpointing)
    assert checkpoints.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_1")
    handler.gate.set()
    checkpoints.save_checkpoint(tmp_path / "other", TREE, 1, orbax_checkpointer=checkpointing)
    assert names(tmp_path) == ["checkpoint_2", "other"]


@pytest.mark.parametrize("call", ["its save", "a save", "a restore"])
def test_a_failed_commit_is_raised_whatever_its_class(
    handler: Gated, checkpointing: Any, call: str, tmp_path: Path
) -> None:
    """TensorStore raises ValueError, also where a disk fails."""
    handler.error = ValueError("the disk caught fire")
    checkpoints.save_checkpoint(tmp_path, TREE, 1, orbax_checkpointer=checkpointing)
    with pytest.raises(ValueError, match="caught fire"):
        if call == "a restore":
            settle(tmp_path)
        else:
            its_own = checkpointing if call == "its save" else None
            checkpoints.save_checkpoint(tmp_path, TREE, 2, orbax_checkpointer=its_own)


def test_a_restore_through_another_path_waits_for_the_commit(
    handler: Gated, checkpointing: Any, tmp_path: Path
) -> None:
    """As it does for our own background saves: a link and what it leads to are one directory."""
    runs, link = tmp_path / "runs", tmp_path / "latest"
    runs.mkdir()
    link.symlink_to(runs)
    handler.gate.clear()
    checkpoints.save_checkpoint(link, TREE, 1, orbax_checkpointer=checkpointing)
    threading.Timer(0.2, handler.gate.set).start()
    assert_same(checkpoints.restore_checkpoint(runs, None)["a"], TREE["a"])


def test_the_checkpointer_is_never_changed(handler: Gated, checkpointing: Any, tmp_path: Path) -> None:
    """Its attributes are what they were, and its own wait and its own check raise the failure of its save, once."""
    checkpointer, before = checkpointing, dict(vars(checkpointing))
    for step, find in enumerate([checkpointer.wait_until_finished, checkpointer.check_for_errors]):
        handler.error = FIRE
        handler.gate.clear()
        checkpoints.save_checkpoint(tmp_path, TREE, step, orbax_checkpointer=checkpointer)
        assert vars(checkpointer).keys() == before.keys()
        handler.gate.set()
        with pytest.raises(RuntimeError, match="fire"):
            for _ in range(3000):
                find()
                threading.Event().wait(0.01)
        handler.error = None
        checkpoints.save_checkpoint(tmp_path, TREE, step, orbax_checkpointer=checkpointer)
        settle(tmp_path)
        # Old releases of Orbax leave the failed save's temporary.
        assert [name for name in names(tmp_path) if "tmp" not in name] == [f"checkpoint_{step}"]


def test_a_checkpointer_that_was_closed_before_its_save_was_finished(tmp_path: Path) -> None:
    """Closing waits for the commit, after which the next call removes what the save replaces."""
    for step in (1, 2):
        with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpoints.save_checkpoint(tmp_path, TREE, step, orbax_checkpointer=checkpointer)
    settle(tmp_path)
    assert names(tmp_path) == ["checkpoint_2"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_wait_loses_no_commit(
    handler: Gated, checkpointing: Any, error: type[BaseException], tmp_path: Path
) -> None:
    """After Ctrl-C, or a signal's ``sys.exit``, the next call waits for the commit anew."""
    handler.gate.clear()
    checkpoints.save_checkpoint(tmp_path, TREE, 1, orbax_checkpointer=checkpointing)
    with patch.object(checkpointing, "wait_until_finished", side_effect=error), pytest.raises(error):
        checkpoints.restore_checkpoint(tmp_path, {"a": 0})
    threading.Timer(0.1, handler.gate.set).start()
    assert_same(checkpoints.restore_checkpoint(tmp_path, {**TREE, "a": None})["a"], TREE["a"])


@pytest.mark.parametrize("fault", ["commit", "sync"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_overwrite_leaves_the_old(kind: str, fault: str, tmp_path: Path) -> None:
    """It is there, whole, while the new one is written, and after that failed, or Orbax's files cannot be synced."""
    handler = Gated()
    checkpointer = KINDS[kind](handler)
    checkpoints.save_checkpoint(tmp_path, TREE, 1, orbax_checkpointer=checkpointer)
    settle(tmp_path)
    handler.error = FIRE if fault == "commit" else None
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    with (
        patch.object(syncing, "_sync", side_effect=broken) if fault == "sync" else nullcontext(),
        pytest.raises((RuntimeError, StorageError), match=r"fire|Input/output error"),
    ):
        checkpoints.save_checkpoint(tmp_path, NEW, 1, overwrite=True, orbax_checkpointer=checkpointer)
        assert (tmp_path / "checkpoint_1" / "_METADATA").exists()
        settle(tmp_path)
    assert checkpoints.available_steps(tmp_path) == [1]
    assert_same(checkpoints.restore_checkpoint(tmp_path, TREE), TREE)
    handler.error = None
    checkpoints.save_checkpoint(tmp_path, NEW, 1, overwrite=True, orbax_checkpointer=checkpointer)
    settle(tmp_path)
    assert_same(checkpoints.restore_checkpoint(tmp_path, TREE), NEW)
    assert os.listdir(tmp_path) == ["checkpoint_1"]
    checkpointer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_saved_meanwhile_is_not_replaced(kind: str, tmp_path: Path) -> None:
    """Without overwrite, an empty directory gives way, but not what another writer has put there by then."""
    other = {"a": np.ones(2)}

    class Slow(ocp.PyTreeCheckpointHandler):
        def finalize(self, directory: Any) -> None:
            with use_flag(True):
                saved = checkpoints.save_checkpoint(tmp_path / "elsewhere", other, 1)
            (tmp_path / "checkpoint_1").rmdir()
            os.rename(saved, tmp_path / "checkpoint_1")
            super().finalize(directory)

    (tmp_path / "checkpoint_1").mkdir()
    checkpointer = KINDS[kind](Slow())
    with pytest.raises(InvalidCheckpointError, match="already exists"):
        checkpoints.save_checkpoint(tmp_path, TREE, 1, orbax_checkpointer=checkpointer)
        settle(tmp_path)
    assert_same(checkpoints.restore_checkpoint(tmp_path, other), other)
    assert sorted(name for name in names(tmp_path) if name != "elsewhere") == ["checkpoint_1"]
    checkpointer.close()


@pytest.mark.parametrize("target", [None, np.zeros(5)], ids=["no target", "target"])
@pytest.mark.parametrize("through", [True, False], ids=["through it", "without it"])
def test_a_single_array(target: Any, through: bool, tmp_path: Path) -> None:
    """The handler of a single array saves and restores a bare array, through it and by our reader."""
    checkpointer = ocp.Checkpointer(ocp.ArrayCheckpointHandler())
    checkpoints.save_checkpoint(tmp_path, np.arange(5.0), 1, orbax_checkpointer=checkpointer)
    restored = checkpoints.restore_checkpoint(tmp_path, target, orbax_checkpointer=checkpointer if through else None)
    assert_same(restored, np.arange(5.0))


@needs("orbax-checkpoint", 0, 12, why="leaves less in its directories to know a finished one by")
def test_a_handler_with_a_format_of_its_own(tmp_path: Path) -> None:
    """Listing, retention and restoring work around a handler whose files only it can read; without it: an error."""
    checkpointer = ocp.Checkpointer(WordsHandler())
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, f"step {step}", step, orbax_checkpointer=checkpointer)
    assert names(tmp_path) == ["checkpoint_2"]
    assert checkpoints.restore_checkpoint(tmp_path, None, orbax_checkpointer=checkpointer) == "step 2"
    with pytest.raises(ValueError, match="orbax_checkpointer that wrote it"):
        checkpoints.restore_checkpoint(tmp_path, None)


def test_jax_targets_get_their_device(tmp_path: Path) -> None:
    """Arrays come back as jax.Array with the sharding of the target's leaf."""
    skip_without_typed_keys()
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    tree = {"a": jnp.arange(3), "key": jax.random.key(7)}
    checkpoints.save_checkpoint(tmp_path, tree, 1, orbax_checkpointer=checkpointer)
    restored = checkpoints.restore_checkpoint(tmp_path, tree, orbax_checkpointer=checkpointer)
    assert isinstance(restored["a"], jax.Array) and restored["a"].sharding == tree["a"].sharding
    assert restored["a"].tolist() == [0, 1, 2]
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
    checkpointer.close()


EXIT = """
import orbax.checkpoint as ocp
class Slow(ocp.PyTreeCheckpointHandler):
    def finalize(self, directory):
        time.sleep(0.5)
        super().finalize(directory)
checkpointer = ocp.AsyncCheckpointer(Slow())
for step, size in ((1, 3), (2, 3), (2, 4)):
    tree = {"a": np.arange(size)}
    checkpoints.save_checkpoint(folder, tree, step, overwrite=True, orbax_checkpointer=checkpointer)
"""


@pytest.mark.slow
def test_exit_with_a_save_on_its_way(tmp_path: Path) -> None:
    """A program that ends without waiting ends cleanly, its last save published and the older ones evicted."""
    _, err = run_saving(EXIT, tmp_path, False, whole_end=True)
    if sys.version_info >= (3, 12) and "r shutdown" in err:
        pytest.skip("from Python 3.12 on, Orbax may be refused the threads that it needs while Python exits")
    assert "Traceback" not in err
    assert names(tmp_path) == ["checkpoint_2"]
    assert checkpoints.restore_checkpoint(tmp_path, None)["a"].tolist() == [0, 1, 2, 3]
