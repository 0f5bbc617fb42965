"""save_checkpoint and save_checkpoint_multiprocess as callers see them: bytes, events, arguments, errors."""

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import config, errors
from tests.support.profiles import examples
from tests.support.samples import FLAX_KNOWS, SAMPLES, Fields, Pair, fingerprint
from tests.support.saves import as_nobody, before_publish, names, refuse, run_saving, save_by, tree, use_flag

FUNCTIONS = ("save_checkpoint", "save_checkpoint_multiprocess")


def both_files(folder: Path, function: str, target: Any) -> tuple[bytes, bytes]:
    """The files that ours and Flax's function of this name write."""
    with use_flag(False):
        paths = [
            getattr(module, function)(folder / name, target, 0, overwrite=True)
            for name, module in (("ours", ours), ("theirs", flax_checkpoints))
        ]
    mine, theirs = (Path(path).read_bytes() for path in paths)
    return mine, theirs


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", FLAX_KNOWS)
def test_files_are_flaxs_to_the_byte(tmp_path: Path, function: str, name: str) -> None:
    """TrainStates and optimizer states give the file that Flax gives; the multi-process function sorts all names."""
    mine, theirs = both_files(tmp_path, function, SAMPLES[name]())
    assert mine == theirs


leaf = st.one_of(st.integers(-5, 300), st.floats(width=32), st.text(max_size=3), st.none(), st.just(np.arange(3)))
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=3) | st.integers(0, 30), inner, max_size=4).filter(
            lambda found: len({str(key) for key in found}) == len(found)
        ),
        st.lists(inner, max_size=12),
        st.lists(inner, max_size=12).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Fields, inner, inner),
    ),
    max_leaves=25,
)


@settings(max_examples=examples(60, quick=12))
@given(target=trees, function=st.sampled_from(FUNCTIONS))
def test_files_of_any_tree_are_flaxs_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory, target: Any, function: str
) -> None:
    """So it is for any nesting of dicts, lists, tuples, namedtuples and dataclasses."""
    mine, theirs = both_files(tmp_path_factory.mktemp("bytes"), function, target)
    assert mine == theirs


@pytest.fixture
def events() -> Iterator[Callable[[], list[str]]]:
    """Takes the names of Flax's events and durations recorded since the last call, in order."""
    recorded: list[str] = []

    def record(name: str, *_: Any, **__: Any) -> None:
        if name.startswith(("/jax/flax/", "/jax/checkpoint/write/dur", "/jax/checkpoint/read/dur")):
            recorded.append(name)

    def take() -> list[str]:
        taken = list(recorded)
        recorded.clear()
        return taken

    jax.monitoring.register_event_listener(record)
    jax.monitoring.register_event_duration_secs_listener(record)
    yield take
    # An older jax has no such functions; there the listener goes on recording what nobody takes.
    for name in ("unregister_event_listener", "unregister_event_duration_listener"):
        getattr(jax.monitoring, name, lambda _: None)(record)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_monitoring_events_are_flaxs(
    flag: bool, tmp_path: Path, function: str, events: Callable[[], list[str]]
) -> None:
    """The same names in the same order as Flax records with the same flag, for saves that work and that fail."""
    found = []
    for module, folder in ((flax_checkpoints, tmp_path / "theirs"), (ours, tmp_path / "ours")):
        manager = module.AsyncManager()
        with use_flag(flag):
            save, outcome = getattr(module, function), []
            save(folder, tree(1), 1)
            outcome.append(events())
            save(folder, tree(2), 2, async_manager=manager)
            manager.wait_previous_save()
            outcome.append(sorted(events()))  # the background thread has an order of its own
            if not flag:
                with pytest.raises(errors.InvalidCheckpointError if module is ours else Exception):
                    save(folder, tree(1), 1)
                outcome.append(events())
            module.restore_checkpoint(folder, None)
            outcome.append(events())
            module.restore_checkpoint(folder / "nowhere", None)
            outcome.append(events())
        found.append(outcome)
    assert found[1] == found[0]


def test_managers_are_accepted_and_waited_for(flag: bool, tmp_path: Path) -> None:
    """gda_manager and async_manager are honoured by the multi-process function; arguments may be positional.

    As in Flax, a manager is asked for its truth."""
    waiter, manager = Mock(), ours.AsyncManager()  # the first stands for jax's GlobalAsyncCheckpointManager
    path = ours.save_checkpoint_multiprocess(tmp_path, tree(1), 1, "c_", 2, False, None, manager, waiter, None)
    manager.wait_previous_save()
    assert (path, waiter.wait_until_finished.call_count) == (str(tmp_path / "c_1"), 1)
    assert ours.restore_checkpoint(tmp_path, None, None, "c_", True, waiter, False, None, None)["n"] == 1
    assert waiter.wait_until_finished.call_count == 2
    for step, nothing in enumerate((None, False, 0), 2):
        path = ours.save_checkpoint(tmp_path, tree(step), step, "c_", 2, True, None, nothing, nothing)
        assert (path, ours.available_steps(tmp_path, "c_")) == (str(tmp_path / f"c_{step}"), [step - 1, step])


def test_the_flag_is_read_at_every_call(tmp_path: Path) -> None:
    """Code that flips the flag mid-script gets the format of the moment."""
    for step, flag in enumerate([False, True, False]):
        with use_flag(flag):
            assert os.path.isdir(ours.save_checkpoint(tmp_path, tree(), step, keep=9)) == flag


def donated(array: jax.Array) -> jax.Array:
    """What jit leaves of an array that was donated to it."""
    array.delete()
    return array


# What makes a leaf that cannot be saved, and what is told.
UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (object, ""),
    "array of objects": (lambda: np.array([object()]), ""),
    "set": (lambda: {1, 2}, ""),
    "int of 65 bits": (lambda: 2**64, ""),
    "structured array": (lambda: np.zeros(2, [("x", "i4")]), ""),
    "masked array": (lambda: np.ma.array([1], mask=[1]), ""),
    "keys of one text": (lambda: {1: 1, "1": 2}, "unique"),
    "abstract": (lambda: jax.eval_shape(lambda: jnp.zeros(2)), "inner/leaf is abstract.*pass the arrays"),
    "donated array": (lambda: donated(jnp.arange(3)), "inner/leaf.*deleted"),
    "donated key": (lambda: donated(jax.random.key(1)), "inner/leaf.*deleted"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_tree_that_cannot_be_saved_is_refused_before_anything_is_written(
    flag: bool, tmp_path: Path, kind: str
) -> None:
    """Sync and async, alone and after a leaf of its type, the error is raised by the call itself and names the leaf."""
    make, told = UNFIT[kind]
    for manager in (None, ours.AsyncManager()):
        for beside in ({}, {"a": jnp.arange(3)}):
            with pytest.raises(errors.CheckpointError, match=told or "inner/leaf") as caught:
                inner = {**beside, "leaf": make()}
                ours.save_checkpoint(tmp_path / "new", {"inner": inner}, 1, async_manager=manager)
            assert isinstance(caught.value, ValueError if told == "unique" else TypeError)
            assert told == "unique" or caught.value.leaf == "inner/leaf"
    assert names(tmp_path) == []


def test_an_array_of_as_many_axes_as_possible(flag: bool, tmp_path: Path) -> None:
    """Numpy's most (64, before numpy 2 32) in msgpack, as in Flax; Orbax's format has 32, and more are refused."""
    most = 64 if int(np.__version__.split(".")[0]) > 1 else 32
    for rank in sorted({31, 32, most}):
        expected = np.arange(2.0).reshape((1,) * (rank - 1) + (2,))
        tree = {"a": expected, "b": expected + 1}
        if flag and rank > 32:
            with pytest.raises(errors.UnsupportedLeafError, match=r"^a: an array of 64 axes.*at most 32"):
                ours.save_checkpoint(tmp_path, tree, rank)
            assert f"checkpoint_{rank}" not in names(tmp_path)
        else:
            ours.save_checkpoint(tmp_path, tree, rank)
            restored = ours.restore_checkpoint(tmp_path, None, rank)
            assert fingerprint(restored) == fingerprint(tree)
            if not flag:
                assert fingerprint(flax_checkpoints.restore_checkpoint(tmp_path, None, rank)) == fingerprint(tree)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_saving_inside_of_jit_is_refused(flag: bool, tmp_path: Path, function: str) -> None:
    """A value that jit has not computed yet cannot be saved: the error names the leaf and says to save outside."""

    def step(x: jax.Array) -> jax.Array:
        getattr(ours, function)(tmp_path, {"params": {"w": x}}, 1)
        return x

    for transformed in (jax.jit(step), jax.grad(lambda x: step(x).sum())):
        with pytest.raises(errors.UnsupportedLeafError, match=r"params/w .*outside of it") as caught:
            transformed(jnp.ones(3))
        assert caught.value.leaf == "params/w" and names(tmp_path) == []


def test_a_file_in_the_directorys_place_is_an_error(flag: bool, tmp_path: Path) -> None:
    """A checkpoint directory that is a file cannot be saved into."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.StorageError, match=f"^{tmp_path}/file: .*check the path"):
        ours.save_checkpoint(tmp_path / "file", tree(), 1)
    assert (tmp_path / "file").read_text() == "x"


FULL = """
import ctypes, errno, resource

def mount_small(folder):
    # In a namespace of this process, with which the mount ends, however that ends.
    new_namespace, private = 0x20000, 0x40000 | 0x4000
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(new_namespace)
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=3m")
    )

limit = int(arguments[0])
if not limit and mount_small(folder):
    print("not mounted")
    raise SystemExit
good = {"w": np.arange(1000.0)}
checkpoints.save_checkpoint(folder, good, 1)
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
big = {"w": np.random.default_rng(0).random(10**6), "v": np.ones(10)}
for manager in (None, checkpoints.AsyncManager()):
    for step in (1, 2):
        try:
            checkpoints.save_checkpoint(folder, big, step, overwrite=True, async_manager=manager)
            manager.wait_previous_save()
        except errors.StorageError as error:
            assert str(error).startswith(f"{folder}/checkpoint_{step} could not be saved: "), error
            assert "tmp" not in str(error).replace(folder, ""), error
            if limit:
                assert "ulimit -f" in str(error) and error.errno == errno.EFBIG, error
            else:
                assert "free space or files" in str(error) and error.errno == errno.ENOSPC, error
                assert f"`flax-ckpt clean {folder}`" in str(error), error
            assert error.path == f"{folder}/checkpoint_{step}"
            assert error.__cause__ is not None
        else:
            raise SystemExit("no error")
        assert os.listdir(folder) == ["checkpoint_1"], os.listdir(folder)
        np.testing.assert_array_equal(checkpoints.restore_checkpoint(folder, None)["w"], good["w"])
checkpoints.save_checkpoint(folder, good, 3)
assert os.listdir(folder) == ["checkpoint_3"]
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no namespaces of mounts")
@pytest.mark.parametrize("limit", [10**6, 0])
def test_a_full_disk_loses_nothing(flag: bool, tmp_path: Path, limit: int) -> None:
    """With files cut at 1 MB, or no space left, a large save is a StorageError; the old checkpoint stays, no temporary
    does."""
    out, _ = run_saving(FULL, tmp_path, flag, limit)
    if "not mounted" in out:
        pytest.skip("only root can mount a small file system")


@pytest.mark.parametrize(("number", "remedy"), [(errno.EACCES, "check the permissions of"), (errno.EIO, "disk")])
def test_a_refused_write_names_the_checkpoint(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """Not its temporary, and nobody is told to free space who lacks permission."""
    with monkeypatch.context() as patch, pytest.raises(errors.StorageError) as caught:
        refuse(patch, "mkdir" if flag else "open", "", number)
        ours.save_checkpoint(tmp_path, tree(), 1)
    assert str(caught.value).startswith(f"{tmp_path}/checkpoint_1 could not be saved: {os.strerror(number)}; ")
    assert remedy in str(caught.value) and "space" not in str(caught.value) and "tmp-" not in str(caught.value)
    assert caught.value.errno == number and names(tmp_path) == []


def test_a_directory_that_one_may_only_read(flag: bool, open_path: Path) -> None:
    """Saving is a StorageError that names it and changes nothing; listing and restoring work."""
    for step in (1, 2):
        ours.save_checkpoint(open_path, tree(step), step, keep=2)
    ours.restore_checkpoint(open_path, None)  # all modules are loaded
    open_path.chmod(0o555)
    with as_nobody():
        for manager in (None, ours.AsyncManager()):
            with pytest.raises(errors.StorageError, match=str(open_path)) as caught:
                save_by(manager, open_path, tree(3), 3)
            assert caught.value.errno == errno.EACCES
        assert names(open_path) == ["checkpoint_1", "checkpoint_2"]
        assert ours.available_steps(open_path) == [1, 2]
        assert ours.restore_checkpoint(open_path, None, step=1)["n"] == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interrupted_save_leaves_no_temporary(
    flag: bool, tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C and the like go through as they are; the old checkpoint stays and nothing half written does."""
    ours.save_checkpoint(tmp_path, tree(1), 1)
    before_publish(monkeypatch, Mock(side_effect=error))
    with pytest.raises(error):
        ours.save_checkpoint(tmp_path, tree(2), 2)
    assert names(tmp_path) == ["checkpoint_1"]


MEGABYTE = {"w": np.zeros((250, 1000), np.float32), "step": 3}
LINE = r"(Saved|Restored) \S+checkpoint_1: 1\.00 MB in [\d.]+ s, [1-9][\d.]* [MG]B/s \((.*)\)"


@pytest.mark.parametrize("background", [False, True])
def test_lines_of_the_log(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool) -> None:
    """One of a save and one of a restore: bytes, seconds, and where the time went."""
    manager = ours.AsyncManager() if background else None
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        save_by(manager, tmp_path, MEGABYTE, 1)
        ours.restore_checkpoint(tmp_path, MEGABYTE)
    lines = [re.fullmatch(LINE, record.getMessage()) for record in caplog.records]
    assert [line and line[1] for line in lines] == ["Saved", "Restored"]
    saved = [part.rsplit(" ", 1)[0] for part in lines[0][2].split(", ")]
    assert saved == ["wait for earlier saves", "prepare", *["queue"] * background, "write", "publish", "retain"]


def test_a_file_without_checksums_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once for a restore, at INFO: as real Flax writes it. With checksums="off" nobody asked for them."""
    with use_flag(False):
        flax_checkpoints.save_checkpoint(tmp_path / "flax", MEGABYTE, 1)
        ours.save_checkpoint(tmp_path / "ours", MEGABYTE, 1)
    for name, options, expected in (("flax", {}, 1), ("ours", {}, 0), ("flax", {"checksums": "off"}, 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "flax_ckpt_compat"), config.override(**options):
            ours.restore_checkpoint(tmp_path / name, MEGABYTE)
        told = [record.getMessage() for record in caplog.records if "is not verified" in record.getMessage()]
        assert len(told) == expected, (name, options)
        assert not told or told[0].startswith(f"{tmp_path}/flax/checkpoint_1 has no checksums")
