"""What a failed save by several processes leaves, processes that stay away, and trees that differ between them."""

import importlib
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import checkpoints, config, transforms
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._save.coordination import KeyValueStore
from flax_ckpt_compat.errors import CheckpointError
from tests.multiprocess import jobs
from tests.multiprocess.jobs import (
    as_abstract,
    barrier,
    before,
    before_each,
    count,
    mesh,
    names,
    put,
    save_small,
    small,
    use,
)
from tests.support.logs import warnings_logged
from tests.support.peers import needs_arrays_without_shards
from tests.support.saves import around
from tests.support.team import team_of

WHOLE = count((24, 4), np.float32)


def save_late(folder: str, orbax: bool, step: int) -> None:
    """Saves where process 1 has opened its files, and writes to them when the others have given up."""
    use(orbax)
    backend_for(Format.ORBAX if orbax else Format.MSGPACK)  # loads what is changed here

    def wait() -> None:
        deadline = time.monotonic() + 15
        while any(name.startswith(".") for name in names(folder)) and time.monotonic() < deadline:
            time.sleep(0.01)

    with _late(orbax, wait if jax.process_index() == 1 else lambda: None):
        save_small(folder, orbax, step, None, 1)


def _late(orbax: bool, wait: Callable[[], None]) -> AbstractContextManager[None]:
    """Calls this when all is there that the values of the arrays are going to be written to."""
    name = "flax_ckpt_compat.orbax_backend.ocdbt_writer" if orbax else "flax_ckpt_compat.legacy.gda_write"
    module: Any = importlib.import_module(name)
    return before_each(*((module.Database, "submit") if orbax else (module, "_write_chunks")), wait)


def save_without_descriptors(folder: str, orbax: bool, step: int) -> None:
    """Saves where process 0 has no file descriptor left once it has begun."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def use_up() -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))

    try:
        with before(orbax, "begin_multiprocess", use_up):
            save_small(folder, orbax, step, None, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def save_where_0_removes_nothing(folder: str, orbax: bool, step: int) -> None:
    """Saves where process 1 cannot write, and ends last; process 0 fails to remove what both write to."""
    index, given_up = jax.process_index(), Path(f"{folder}.given_up")

    def refuse() -> None:
        if index == 1:
            raise OSError("the disk broke")

    def wait() -> None:
        while index == 1 and not given_up.exists():
            time.sleep(0.01)

    with (
        before(orbax, "write_process_part", refuse),
        before_each(atomic, "remove_temporary", wait),
        pytest.MonkeyPatch.context() as patch,
    ):
        if index == 0:
            patch.setattr(atomic, "_remove_leftover", lambda path: None)
        try:
            save_small(folder, orbax, step, None, 5)
        finally:
            if index == 0:
                given_up.touch()


def save_where_something_comes(folder: str, orbax: bool, step: int) -> None:
    """Saves where a folder of a user's comes into the place once all have written; it is there afterwards."""
    notes = Path(folder, f"checkpoint_{step}", "notes.txt")

    def come() -> None:
        notes.parent.mkdir()
        notes.touch()

    try:
        with before(orbax, "finish_multiprocess", come):
            save_small(folder, orbax, step, {"overwrite": True}, 5)
    finally:
        if jax.process_index() == 0:
            notes.unlink()
            notes.parent.rmdir()


def save_interrupted(folder: str, orbax: bool, step: int) -> None:
    """Saves in this process alone, and is interrupted while it waits for the others."""
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        save_small(folder, orbax, step, None, 3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


class Refusing(checkpoints.AsyncManager):
    """A manager of the user's that takes no task."""

    def save_async(self, task: Callable[[], Any]) -> None:
        """Refuses."""
        raise OSError("no tasks in this test")


def save_without_a_manager(folder: str, orbax: bool, step: int) -> None:
    """Saves in the background where process 1's manager takes no task, and waits.

    Process 0 answers its report before it goes on.
    """
    use(orbax)
    manager = Refusing() if jax.process_index() == 1 else checkpoints.AsyncManager()
    with config.override(coordination_timeout=20.0), pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == 1:
            around(patch, KeyValueStore, "set", then=lambda *_: time.sleep(0.2))
        checkpoints.save_checkpoint_multiprocess(folder, small(step), step, async_manager=manager)
    manager.wait_previous_save()


def save_split_otherwise(folder: str, orbax: bool, step: int, other: str = "order") -> None:
    """Saves an array that process 1 has in another order of devices, dtype or as a key, beside one like all others."""
    use(orbax)
    is_odd = jax.process_index() == 1
    kind = "flat" if is_odd and other == "order" else "plain"
    # Numpy has one typestr for the two of a byte.
    dtype = (ml_dtypes.float8_e4m3fn if is_odd else ml_dtypes.float8_e4m3b11fnuz) if other == "dtype" else np.uint32
    odd = put(WHOLE.reshape(-1, 4).astype(dtype), NamedSharding(mesh(kind), P("x")))
    if other == "key":
        odd = jax.random.wrap_key_data(odd, impl="unsafe_rbg" if is_odd else "rbg")
    tree = {"odd": odd, **small(step)}
    with config.override(coordination_timeout=20.0):
        checkpoints.save_checkpoint_multiprocess(folder, tree, step)


def save_own_keys(folder: str, orbax: bool, count: int) -> list[str]:
    """Saves two steps with a key that names the process beside so many that are the same; what was warned of."""
    use(orbax)
    index = jax.process_index()
    # Process 2 has fewer leaves, all of which process 0 has.
    own = {} if index == 2 else {f"host_{index}": np.arange(3)}
    with warnings_logged() as warnings:
        for step in (1, 2):
            tree = {**{f"leaf{number}": np.float32(number) for number in range(count)}, **own}
            checkpoints.save_checkpoint_multiprocess(folder, tree, step)
    return warnings


# Name → the processes whose devices hold an array, and how it is split.
SUB_MESHES: dict[str, tuple[tuple[int, ...], P]] = {
    "split01": ((0, 1), P("x")),
    "split12": ((1, 2), P("x")),
    "copies01": ((0, 1), P()),
    "copies12": ((1, 2), P()),
    "split0": ((0,), P("x")),
}


def sub_mesh(name: str) -> NamedSharding:
    """The devices of some of three processes."""
    owners, spec = SUB_MESHES[name]
    return NamedSharding(Mesh(np.array([one for one in jax.devices() if one.process_index in owners]), ("x",)), spec)


def sub_mesh_tree(scale: float, *, of_one: bool = True) -> dict[str, Any]:
    """Arrays that leave out one process or two, and one that all of them hold."""
    tree: dict[str, Any] = {"n": int(scale), "all": put(WHOLE * scale, NamedSharding(mesh(), P("x")))}
    for name, (owners, _) in SUB_MESHES.items():
        if of_one or len(owners) > 1:
            tree[name] = put(WHOLE * np.float32(scale), sub_mesh(name))
    return tree


def save_on_sub_meshes(folder: str, orbax: bool, background: bool) -> None:
    """Saves them as step 1."""
    use(orbax)
    manager = checkpoints.AsyncManager() if background else None
    checkpoints.save_checkpoint_multiprocess(folder, sub_mesh_tree(1), 1, async_manager=manager)
    if manager:
        manager.wait_previous_save()


def restore_on_sub_meshes(folder: str, abstract: bool) -> None:
    """Restores them where they were, in all processes, and checks each bit."""
    target = sub_mesh_tree(0)
    asked = jax.tree.map(as_abstract, target) if abstract else target
    check_sub_meshes(checkpoints.restore_checkpoint(folder, asked), target)


def check_sub_meshes(got: Any, target: Any) -> None:
    """Each array has the shards of this process, which may be none, and their values."""
    assert got["n"] == 1
    for name in target:
        if name == "n":
            continue
        leaf, wanted = got[name], target[name]
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype), name
        if isinstance(leaf, jax.Array):  # else of this process alone, which a msgpack file has whole
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), name
            assert len(leaf.addressable_shards) == len(wanted.addressable_shards), name
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), WHOLE[shard.index], name)
        else:
            np.testing.assert_array_equal(leaf, WHOLE, name)


def sub_meshes_with_flax(folder: str, writer: str) -> None:
    """Saves with ours and restores with real Flax, flag off, or the other way round."""
    from flax.training import checkpoints as flax_checkpoints
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    use(False)
    manager = GlobalAsyncCheckpointManager()
    tree, target = sub_mesh_tree(1, of_one=False), sub_mesh_tree(0, of_one=False)
    if writer == "flax":
        flax_checkpoints.save_checkpoint_multiprocess(folder, tree, 1, gda_manager=manager)
        manager.wait_until_finished()
    else:
        checkpoints.save_checkpoint_multiprocess(folder, tree, 1)
    barrier("saved on sub-meshes")
    module: Any = checkpoints if writer == "flax" else flax_checkpoints
    check_sub_meshes(module.restore_checkpoint(folder, target, 1, gda_manager=manager), target)


def read_with_orbax(path: str) -> None:
    """Reads the checkpoint of `save_on_sub_meshes` with real Orbax in a single process, as numpy."""
    import orbax.checkpoint as ocp

    tree = dict.fromkeys(["n", "all", *SUB_MESHES], 0)
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    arguments["n"] = ocp.RestoreArgs(restore_type=int)
    got = ocp.PyTreeCheckpointer().restore(path, restore_args=arguments)
    assert got.pop("n") == 1
    for name, values in got.items():
        np.testing.assert_array_equal(values, WHOLE, name)


def restore_other_kinds(folder: str) -> None:
    """Saves what each process has, and restores it onto devices of processes 1 and 2 only; keys and computed, too."""
    use(False)
    values = np.arange(8, dtype=np.float32)
    tree = {"keys": jax.random.split(jax.random.key(3), 8), "old": values, "plain": values}
    checkpoints.save_checkpoint_multiprocess(folder, tree, 1)
    sharding = sub_mesh("split12")
    shapes = {"keys": tree["keys"], "new": values, "plain": values}
    target = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in shapes.items()}
    rules = {"new": transforms.Transform(original_key="old", value_fn=lambda leaf: leaf + 1)}
    got = checkpoints.restore_checkpoint(folder, target, orbax_transforms=rules)
    wanted = {"keys": np.asarray(jax.random.key_data(tree["keys"])), "new": values + 1, "plain": values}
    for name, leaf in got.items():
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (target[name].shape, target[name].dtype, sharding), name
        for shard in leaf.addressable_shards:
            data = jax.random.key_data(shard.data) if name == "keys" else shard.data
            np.testing.assert_array_equal(np.asarray(data), wanted[name][shard.index], name)
    assert bool(got["plain"].addressable_shards) == (jax.process_index() > 0)
    unfit = {"plain": jax.ShapeDtypeStruct((9,), np.float32, sharding=sharding)}
    checkpoints.save_checkpoint_multiprocess(folder, {"plain": np.zeros(9, np.float32)}, 2)
    with pytest.raises(CheckpointError, match="does not fit the target's"):
        checkpoints.restore_checkpoint(folder, unfit, 2)


# Processes wait for each other in the same way in both formats.
IN_ONE_FORMAT = pytest.mark.parametrize("orbax", [True, pytest.param(False, marks=pytest.mark.slow)], indirect=True)


@pytest.mark.slow
@IN_ONE_FORMAT
def test_a_process_that_wakes_after_the_others_gave_up(orbax: bool, tmp_path: Path) -> None:
    """It writes its part, finds that nobody waits for it, and removes what it made anew."""
    team = team_of(2)
    team.call(jobs.save_small, str(tmp_path), orbax, 1)
    before = jobs.names(str(tmp_path))
    for outcome in team.run(save_late, str(tmp_path), orbax, 2):
        assert outcome.kinds[0] == "ProcessTimeoutError", outcome
        assert "process 1 of 2 did not reach barrier 'commit'" in outcome.error
    assert jobs.names(str(tmp_path)) == before
    team.call(jobs.save_small, str(tmp_path), orbax, 2)


@IN_ONE_FORMAT
def test_an_interrupted_wait_leaves_no_registration(orbax: bool, tmp_path: Path) -> None:
    """The next save of the same step, and of another one, finds all processes and accuses none."""
    team = team_of(2)
    for step in (1, 2):
        outcome = team.run(save_interrupted, str(tmp_path), orbax, 1, only=[1], timeout=20)[1]
        assert outcome.kinds[0] == "KeyboardInterrupt", outcome
        alone = team.run(save_small, str(tmp_path), orbax, 1, None, 0.5, only=[0], timeout=20)[0]
        assert "process 1 of 2 did not reach barrier 'begin'" in alone.error, alone
        team.call(jobs.save_small, str(tmp_path), orbax, step, None, 3)
    assert team.call(jobs.restore_small, str(tmp_path)) == [2, 2]


@IN_ONE_FORMAT
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_leaves_that_process_0_does_not_hold(orbax: bool, tmp_path: Path, count: int) -> None:
    """They are not saved, as in Flax, which process 0 says once; a process may hold fewer."""
    warned, *others = team_of(count).call(save_own_keys, str(tmp_path), orbax, 3)
    assert others == [[]] * (count - 1)
    assert len(warned) == 1, warned
    assert "are not saved (4 leaves, and 4 in process 0)" in warned[0]


MULTI, LEAF = "MultiprocessSaveError", "UnsupportedLeafError"
# Job, its arguments after the step, the class of the error in each process, and what all of them say.
FAULTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[str], str]] = {
    "no descriptors": (save_without_descriptors, (), [], "Too many open files"),
    "no removal in 0": (save_where_0_removes_nothing, (), [MULTI, "StorageError"], "the disk broke"),
    "something else": (save_where_something_comes, (), ["InvalidCheckpointError"] * 2, "notes.txt"),
    "no manager": (save_without_a_manager, (), [MULTI, "OSError"], "no tasks in this test"),
    "other shardings": (save_split_otherwise, (), [MULTI, MULTI], "process 1 saves .*shardings.* look at odd;"),
    "other dtypes": (save_split_otherwise, ("dtype",), [MULTI, MULTI], "process 1 saves .*dtypes.* look at odd;"),
    "other keys": (save_split_otherwise, ("key",), [MULTI, MULTI], "process 1 saves .*dtypes.* look at odd;"),
    "no place in 0": (jobs.save_without_a_temporary, (0,), [], "not this user's own"),
    "no place in 1": (jobs.save_without_a_temporary, (1,), [], "not this user's own"),
    "full disk in 0": (jobs.save_full_disk, (0,), [], "File too large"),
    "full disk in 1": (jobs.save_full_disk, (1,), [], "File too large"),
    "leaf in 0": (jobs.save_a_leaf, (0,), [LEAF] * 4, "unknown"),
    "leaf in 1": (jobs.save_a_leaf, (1,), [MULTI, LEAF, MULTI, MULTI], "unknown"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_in_one_process_fails_in_all(orbax: bool, tmp_path: Path, fault: str) -> None:
    """At once, for the same reason; the last step stays, nothing is left over, and the next save works."""
    job, arguments, kinds, told = FAULTS[fault]
    team = team_of(len(kinds) or 2)
    team.call(jobs.save_small, str(tmp_path), orbax, 1)
    outcomes = team.run(job, str(tmp_path), orbax, 2, *arguments, timeout=30)
    assert not kinds or [outcome.kinds[0] for outcome in outcomes] == kinds, outcomes
    for outcome in outcomes:
        assert outcome.kinds and re.search(told, outcome.error, re.S), outcome
        assert outcome.seconds < 10
    if fault != "no descriptors":  # with which nothing can be removed
        assert jobs.names(str(tmp_path)) == jobs.steps_and_arrays(orbax, 1)
    team.call(jobs.restore_small, str(tmp_path))
    team.call(jobs.save_small, str(tmp_path), orbax, 3)
    assert jobs.names(str(tmp_path)) == jobs.steps_and_arrays(orbax, 3)


@needs_arrays_without_shards
@pytest.mark.parametrize("background", [False, True])
def test_sub_meshes_that_leave_out_a_process(orbax: bool, tmp_path: Path, background: bool) -> None:
    """All processes save and restore arrays of which some see nothing; real Orbax reads them, too."""
    team = team_of(3)
    team.call(save_on_sub_meshes, str(tmp_path), orbax, background)
    for abstract in (False, True):
        team.call(restore_on_sub_meshes, str(tmp_path), abstract)
    if orbax and not background:
        read_with_orbax(str(tmp_path / "checkpoint_1"))


@needs_arrays_without_shards
@pytest.mark.parametrize("writer", ["ours", "flax"])
def test_sub_meshes_with_real_flax(tmp_path: Path, writer: str) -> None:
    """Real Flax restores ours in all processes, and ours restore its."""
    team_of(3).call(sub_meshes_with_flax, str(tmp_path), writer)


@needs_arrays_without_shards
def test_any_leaf_is_restored_onto_a_sub_mesh(tmp_path: Path) -> None:
    """Typed keys, what a transform computed, and plain arrays; what does not fit is the same error in all processes."""
    team_of(3).call(restore_other_kinds, str(tmp_path))


# Processes that stay away, or hang: the others raise the reason within the bound


WAIT = 1.0
# Looks are at most half a second apart, and the machine may be busy.
SLACK = 5.0


@IN_ONE_FORMAT
@pytest.mark.parametrize(
    ("count", "absent"), [(2, [1]), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, [0]), (4, [1, 3])))]
)
def test_processes_that_do_not_come(orbax: bool, tmp_path: Path, count: int, absent: list[int]) -> None:
    """The others fail within the bound, naming missing processes and barrier; saving the step again works."""
    team = team_of(count)
    team.call(jobs.save_small, str(tmp_path), orbax, 1)
    here = [index for index in range(count) if index not in absent]
    outcomes = team.run(jobs.save_small, str(tmp_path), orbax, 2, None, WAIT, only=here, timeout=20)
    for index in here:
        assert outcomes[index].kinds[:2] == ("ProcessTimeoutError", "MultiprocessSaveError")
        assert f"process {', '.join(map(str, absent))} of {count} did not reach" in outcomes[index].error
        assert "'begin'" in outcomes[index].error
        assert "coordination_timeout" in outcomes[index].error
        assert outcomes[index].seconds < 2 * WAIT + SLACK
    team.call(jobs.save_small, str(tmp_path), orbax, 2)
    assert team.call(jobs.restore_small, str(tmp_path)) == [2] * count


@pytest.mark.slow
@IN_ONE_FORMAT
def test_a_late_process_raises_the_same_error(orbax: bool, tmp_path: Path) -> None:
    """A process that comes when the others have given up fails soon, with the same reason."""
    team = team_of(4)
    waited = team.run(jobs.save_small, str(tmp_path), orbax, 1, None, WAIT, only=[0, 1, 3], timeout=20)
    late = team.run(jobs.save_small, str(tmp_path), orbax, 1, None, WAIT, only=[2], timeout=20)[2]
    assert late.kinds[0] == "ProcessTimeoutError"
    assert late.error == waited[0].error
    assert late.seconds < WAIT + SLACK
    team.call(jobs.save_small, str(tmp_path), orbax, 1)


@IN_ONE_FORMAT
@pytest.mark.parametrize("stage", [pytest.param("begin", marks=pytest.mark.slow), "commit"])
def test_one_fails_while_another_hangs(orbax: bool, tmp_path: Path, stage: str) -> None:
    """Nobody waits as long for a process that hangs once another has failed: the save fails anyway."""
    outcomes = team_of(4).run(jobs.save_while_another_hangs, str(tmp_path), orbax, stage, 12.0, timeout=60)
    for index in (0, 1, 2):
        assert "the disk broke" in outcomes[index].error
        assert outcomes[index].seconds < 0.5 + SLACK
    assert not checkpoints.available_steps(tmp_path)
