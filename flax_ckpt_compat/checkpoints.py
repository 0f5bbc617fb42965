"""Drop-in for ``flax.training.checkpoints``: the same names, signatures, results and error types.

``flax_use_orbax_checkpointing`` chooses what a save writes; what a restore reads is detected from the files.
Where Flax's two backends disagree, both sides of the flag follow legacy Flax here; the differences are listed
in the migration guide.
"""

from __future__ import annotations

import os
import re
from typing import Any

from flax import core

from flax_ckpt_compat._core import module_names, orbax_layout, paths, steps
from flax_ckpt_compat._core.module_names import MODULE_NUM_RE, SIGNED_FLOAT_RE, UNSIGNED_FLOAT_RE, natural_sort
from flax_ckpt_compat._discovery import listing, lookups
from flax_ckpt_compat._restore import pipeline as restore_pipeline
from flax_ckpt_compat._save import async_saves
from flax_ckpt_compat._save import pipeline as save_pipeline
from flax_ckpt_compat._save.async_saves import AsyncManager
from flax_ckpt_compat.errors import StepError

__all__ = [
    "COMMIT_SUCCESS_FILE",
    "MODULE_NUM_RE",
    "MP_ARRAY_PH",
    "MP_ARRAY_POSTFIX",
    "ORBAX_CKPT_FILENAME",
    "ORBAX_MANIFEST_OCDBT",
    "ORBAX_METADATA_FILENAME",
    "SCHEME_RE",
    "SIGNED_FLOAT_RE",
    "UNSIGNED_FLOAT_RE",
    "AsyncManager",
    "MultiprocessArrayType",
    "PyTree",
    "available_steps",
    "convert_pre_linen",
    "latest_checkpoint",
    "natural_sort",
    "restore_checkpoint",
    "safe_normpath",
    "save_checkpoint",
    "save_checkpoint_multiprocess",
]

SCHEME_RE = re.compile(r"^(?P<scheme>[a-z][a-z0-9.+-]+://)?(?P<path>.*)", re.IGNORECASE)
MP_ARRAY_POSTFIX = steps.ARRAYS_POSTFIX
MP_ARRAY_PH = "//GDAPlaceholder:"
COMMIT_SUCCESS_FILE = orbax_layout.COMMIT_FILE
ORBAX_CKPT_FILENAME = orbax_layout.MSGPACK_FILE
ORBAX_MANIFEST_OCDBT = orbax_layout.MANIFEST
ORBAX_METADATA_FILENAME = orbax_layout.TREE_METADATA
PyTree = Any
MultiprocessArrayType = Any


def save_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    target: PyTree,
    step: int | float,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    orbax_checkpointer: Any | None = None,
) -> str:
    """Saves a tree from this process alone; atomic, durable, and without waiting for other processes.

    Args:
        ckpt_dir: directory of the checkpoints; made if it does not exist.
        target: pytree, or anything that ``flax.serialization`` knows. Leaves: numpy and jax arrays of any
            dtype but object and record ones, numpy and Python scalars, str, bytes, None, typed PRNG keys.
        step: finite number (int, float, numpy scalar, 0-d array), or text such as ``"best"`` for a checkpoint
            outside the order of steps.
        prefix: literal text before the step in the checkpoint's name; may contain ``/``.
        keep: how many of the newest checkpoints of this prefix stay; 0 keeps all.
        overwrite: replace this step if it exists, and afterwards remove newer ones.
        keep_every_n_steps: of the older checkpoints, also keep those at least so far apart.
        async_manager: write in the background; the values saved are those at the time of this call.
        orbax_checkpointer: a checkpointer of real Orbax that shall do the writing.

    Returns:
        The checkpoint's path, in the form in which ``ckpt_dir`` was given.

    Raises:
        InvalidCheckpointError: without ``overwrite``, the step exists or is older than the newest.
        StepError: a step, ``keep`` or prefix that means nothing.
        UnsupportedLeafError, NameCollisionError: the tree cannot be held by the format; nothing was written.
        MPACheckpointingRequiredError: an array of which this process sees only a part.
        CleanupError: the step was saved, but an old checkpoint could not be removed.
        StorageError: the file system refused.
    """
    return save_pipeline.save(
        _directory(ckpt_dir),
        target,
        step,
        prefix,
        keep,
        overwrite,
        keep_every_n_steps,
        async_manager,
        orbax_checkpointer,
    )


def save_checkpoint_multiprocess(
    ckpt_dir: str | os.PathLike[str],
    target: PyTree,
    step: int | float,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    gda_manager: Any | None = None,
    orbax_checkpointer: Any | None = None,
) -> str:
    """Saves a tree that several processes hold together; called by all of them, with the same arguments.

    Of an array that is spread over the processes each writes its own shards; all else is taken from process 0, which
    also commits. No process waits for another longer than the setting ``coordination_timeout``. On one process it is
    the same as `save_checkpoint`.

    Args:
        gda_manager: a ``GlobalAsyncCheckpointManager``; not needed. A given one is waited for.
        async_manager: write and commit in the background; all processes pass one, or none does.
        ckpt_dir, target, step, prefix, keep, overwrite, keep_every_n_steps, orbax_checkpointer: as for
            `save_checkpoint`; every process sees the same directory.

    Returns:
        The checkpoint's path, in the form in which ``ckpt_dir`` was given.

    Raises:
        ProcessTimeoutError: processes did not come in time; the message names them.
        MultiprocessSaveError: another process failed, or saves something else; nothing was saved.
        CheckpointError: what `save_checkpoint` raises, and then in every process.
    """
    if gda_manager is not None:
        gda_manager.wait_until_finished()
    return save_pipeline.save(
        _directory(ckpt_dir),
        target,
        step,
        prefix,
        keep,
        overwrite,
        keep_every_n_steps,
        async_manager,
        orbax_checkpointer,
        is_multiprocess=True,
    )


def restore_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    target: Any | None,
    step: int | float | None = None,
    prefix: str = "checkpoint_",
    parallel: bool = True,  # noqa: ARG001  (Flax's signature)
    gda_manager: Any | None = None,
    allow_partial_mpa_restoration: bool = False,  # noqa: ARG001  (Flax's signature)
    orbax_checkpointer: Any | None = None,
    orbax_transforms: Any | None = None,
) -> PyTree:
    """Restores a checkpoint of any format, which is detected from the files; the flag plays no part.

    Args:
        ckpt_dir: a directory of checkpoints, or one checkpoint.
        target: tree of the wanted structure; None restores nested dicts with text keys.
        step: which checkpoint of the directory; None takes the latest complete one.
        prefix: literal text before the step in the checkpoints' names.
        parallel: accepted as in Flax; large files are always read in parallel.
        gda_manager: accepted as in Flax and waited for; not needed.
        allow_partial_mpa_restoration: accepted as in Flax; arrays that the target does not place come as numpy.
        orbax_checkpointer: a checkpointer of real Orbax that shall do the reading of Orbax directories.
        orbax_transforms: how the checkpoint's leaves become the target's, for every format: a list of rules (see
            `flax_ckpt_compat.rules`), or a pytree of `flax_ckpt_compat.transforms.Transform` (Orbax's own are accepted)
            by key path of the target, or regular expression. Unlike rules, transforms, ``{}`` included, keep the
            target's values for leaves that the checkpoint lacks, and its None.

    Returns:
        A tree like ``target`` with the stored leaves, or ``target`` itself, with a logged warning, where there is
        nothing to restore. Arrays are writable numpy arrays; those of Orbax directories become ``jax.Array`` where
        the target's leaf has a sharding.

    Raises:
        CheckpointNotFoundError: the given step does not exist (a ``ValueError``, as in Flax).
        MissingLeavesError: the target has leaves that the checkpoint lacks; the message ends with the rules that
            would find them, where that is clear.
        TransformError: a transform or rule that makes no sense, or does not fit.
        IncompleteCheckpointError, UnrecognizedFormatError, CorruptCheckpointError: what is there cannot be restored.
    """
    if gda_manager is not None:
        gda_manager.wait_until_finished()
    return restore_pipeline.restore(_directory(ckpt_dir), target, step, prefix, orbax_checkpointer, orbax_transforms)


def latest_checkpoint(ckpt_dir: str | os.PathLike[str], prefix: str = "checkpoint_") -> str | None:
    """Return the path of the latest complete checkpoint of a prefix, or None.

    The highest step is the latest, of the prefix or of a CheckpointManager in the same directory. Where there is none,
    the naturally last ``prefix + text`` is; and where there is none either, the last complete name that begins with
    the prefix, with a warning. A step's directory in a format that is not Flax's or Orbax's is named as in Flax.
    """
    where = listing.checkpoint_dir(os.fspath(ckpt_dir), prefix)
    async_saves.wait_for_joint_saves(where.directory)
    found = lookups.latest(where)
    return None if found is None else os.path.join(where.shown, found.name)


def available_steps(
    ckpt_dir: str | os.PathLike[str], prefix: str = "checkpoint_", step_type: type = int
) -> list[int | float]:
    """Return the steps of the complete checkpoints of a prefix, or of a CheckpointManager, as ``step_type``, in order.

    Raises:
        StepError: a step that ``step_type`` does not take, such as 2.5 for int.
    """
    where = listing.checkpoint_dir(os.fspath(ckpt_dir), prefix)
    async_saves.wait_for_joint_saves(where.directory)
    found = []
    for entry in lookups.available(where):
        try:
            found.append(step_type(entry.text))
        except ValueError as error:
            raise StepError(
                f"{entry.path}: its step is no {step_type.__name__}; call available_steps(…, step_type=float)",
                path=entry.path,
            ) from error
    return found


def safe_normpath(path: str) -> str:
    """``os.path.normpath`` that leaves the ``scheme://`` of a URL alone."""
    match = SCHEME_RE.match(path)
    assert match is not None  # every text matches
    return (match["scheme"] or "") + os.path.normpath(match["path"])


def convert_pre_linen(params: PyTree) -> PyTree:
    """Renames pre-Linen submodules (``Conv_0, Dense_1``: one count) to Linen's (``Conv_0, Dense_0``: one per class).

    Args:
        params: nested dict or FrozenDict; names that already are Linen's stay as they are.
    """
    if not isinstance(params, (dict, core.FrozenDict)):
        return params
    renamed = {new: convert_pre_linen(params[old]) for old, new in module_names.linen_names(params.keys()).items()}
    return core.freeze(renamed) if isinstance(params, core.FrozenDict) else renamed


def _directory(path: str | os.PathLike[str]) -> str:
    return paths.normal(os.fspath(path))
