"""What the processes of a team do together with real Flax and real Orbax."""

from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.training import checkpoints as flax_checkpoints
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic
from tests.multiprocess.jobs import VALUES, barrier, check_shards, names, split_tree, use

# What real Flax can hold of `VALUES`, in both of its formats.
NAMES = ("both", "rows", "columns", "merged", "replicated", "zero_d", "bf16", "flags", "large", "wide")


def tree(kind: str, *, blank: bool = False) -> dict[str, Any]:
    """Arrays over all processes and some leaves beside them."""
    split = {name: array for name, array in split_tree(kind, blank=blank).items() if name in NAMES}
    return {"split": split, "step": 0 if blank else 3, "host": np.zeros(3) if blank else np.arange(3.0)}


def check(got: Any, target: Any) -> None:
    """Every bit that this process holds is as it was saved."""
    assert got["step"] == 3
    np.testing.assert_array_equal(got["host"], np.arange(3.0))
    for name in NAMES:
        leaf = got["split"][name]
        if not isinstance(leaf, jax.Array):  # of the file, where real Flax returns all as numpy
            assert np.asarray(leaf).tobytes() == VALUES[name][0].tobytes(), name
            continue
        assert leaf.sharding.is_equivalent_to(target["split"][name].sharding, leaf.ndim), name
        check_shards(name, leaf, VALUES[name][0])


def save(folder: str, orbax: bool, kind: str, writer: str, step: int = 1) -> list[str]:
    """Saves with ``ours`` or ``flax``; what the directory holds then."""
    use(orbax)
    module: Any = checkpoints if writer == "ours" else flax_checkpoints
    manager = GlobalAsyncCheckpointManager() if writer == "flax" and not orbax else None
    module.save_checkpoint_multiprocess(folder, tree(kind), step, gda_manager=manager)
    if manager:
        manager.wait_until_finished()
    barrier("saved")
    return names(folder)


def restore(folder: str, orbax: bool, kind: str, reader: str, step: int | None = None) -> None:
    """Restores with ``ours``, ``flax`` or ``orbax``, onto this mesh, and checks it."""
    use(orbax)
    target = tree(kind, blank=True)
    if reader == "orbax":
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        got = ocp.PyTreeCheckpointer().restore(f"{folder}/checkpoint_1", item=target, restore_args=arguments)
    elif reader == "ours":
        got = checkpoints.restore_checkpoint(folder, target, step)
    else:
        manager = None if orbax else GlobalAsyncCheckpointManager()
        got = flax_checkpoints.restore_checkpoint(folder, target, step, gda_manager=manager)
    check(got, target)


def save_with_orbax(folder: str, kind: str) -> None:
    """Saves with real Orbax, without Flax."""
    ocp.PyTreeCheckpointer().save(f"{folder}/checkpoint_1", tree(kind))


def save_given(folder: str, orbax: bool, given: str) -> list[str]:
    """Saves three steps, and mostly the last one again, with ours and a manager or checkpointer that the caller gives.

    Args:
        given: ``gda``, ``async``, ``both``, ``checkpointer`` or ``async checkpointer``.

    Returns:
        What the directory holds after the waits that callers of Flax write.
    """
    use(orbax)
    options: dict[str, Any] = {}
    if given in ("gda", "both"):
        options["gda_manager"] = GlobalAsyncCheckpointManager()
    if given in ("async", "both"):
        options["async_manager"] = checkpoints.AsyncManager()
    if given == "checkpointer":
        options["orbax_checkpointer"] = ocp.PyTreeCheckpointer()
    if given == "async checkpointer":
        options["orbax_checkpointer"] = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    for step in (0, 1, 2, 2):
        checkpoints.save_checkpoint_multiprocess(folder, tree("plain"), step, keep=2, overwrite=step == 2, **options)
    if "async_manager" in options:
        options["async_manager"].wait_previous_save()
    if "gda_manager" in options:
        options["gda_manager"].wait_until_finished()
    got = checkpoints.restore_checkpoint(folder, tree("plain", blank=True), 2)
    check(got, tree("plain"))
    barrier("restored")
    return names(folder)


def refuse_given(folder: str) -> None:
    """Saves a step that exists through a checkpointer of real Orbax."""
    checkpoints.save_checkpoint_multiprocess(folder, tree("plain"), 2, orbax_checkpointer=ocp.PyTreeCheckpointer())


def fail_to_publish(folder: str) -> None:
    """Replaces a step through an async checkpointer where process 0 cannot publish."""
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    with mock.patch.object(atomic, "publish", side_effect=StorageError("no renaming in this test")):
        try:
            checkpoints.save_checkpoint_multiprocess(
                folder, tree("plain"), 2, overwrite=True, orbax_checkpointer=checkpointer
            )
        finally:
            barrier("failed")
