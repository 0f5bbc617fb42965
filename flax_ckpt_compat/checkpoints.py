"""Drop-in for ``flax.training.checkpoints``: the same names, signatures, results and error types.

``flax_use_orbax_checkpointing`` chooses the format of a save; a restore detects the format from the files. If Flax's
two backends disagree, both settings of the flag follow legacy Flax; the migration guide lists the differences.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import TYPE_CHECKING, Any

from flax import core

from flax_ckpt_compat import config as _settings  # ``checkpoints.config`` is Flax's, as in its own module
from flax_ckpt_compat._core import arguments, numbered_names, orbax_layout
from flax_ckpt_compat._core.location import as_text, normal
from flax_ckpt_compat._core.numbered_names import MODULE_NUM_RE, SIGNED_FLOAT_RE, UNSIGNED_FLOAT_RE, natural_sort
from flax_ckpt_compat._discovery import saved_steps
from flax_ckpt_compat._restore import pipeline as restore_pipeline
from flax_ckpt_compat._restore.plan import RestoreOptions
from flax_ckpt_compat._restore.transform_spec import TransformSpec
from flax_ckpt_compat._save import async_saves
from flax_ckpt_compat._save import pipeline as save_pipeline
from flax_ckpt_compat._save import request as save_request
from flax_ckpt_compat._save.async_saves import AsyncManager
from flax_ckpt_compat.errors import ArgumentError, CheckpointerError

__all__ = [
    "COMMIT_SUCCESS_FILE", "MODULE_NUM_RE", "MP_ARRAY_PH", "MP_ARRAY_POSTFIX", "ORBAX_CKPT_FILENAME",
    "ORBAX_MANIFEST_OCDBT", "ORBAX_METADATA_FILENAME", "SCHEME_RE", "SIGNED_FLOAT_RE", "UNSIGNED_FLOAT_RE",
    "AsyncManager", "MultiprocessArrayType", "PyTree", "available_steps", "convert_pre_linen", "latest_checkpoint",
    "natural_sort", "restore_checkpoint", "safe_normpath", "save_checkpoint", "save_checkpoint_multiprocess",
]  # fmt: skip
__dir__ = __all__.copy  # for completion

SCHEME_RE = re.compile(r"^(?P<scheme>[a-z][a-z0-9.+-]+://)?(?P<path>.*)", re.IGNORECASE)
MP_ARRAY_POSTFIX = numbered_names.ARRAYS_POSTFIX
MP_ARRAY_PH = numbered_names.ARRAYS_PLACEHOLDER
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
    """Save a tree from this process. The save is atomic and durable, and does not wait for other processes.

    Args:
        ckpt_dir: directory of the checkpoints; created if it does not exist.
        target: pytree, or any type that ``flax.serialization`` supports. Leaves: numpy and jax arrays of any
            dtype but object and record ones, numpy and Python scalars, str, bytes, None, typed PRNG keys.
        step: finite number (int, float, numpy scalar, 0-d array), or text such as ``"best"`` for a checkpoint
            outside the order of steps.
        prefix: literal text before the step in the checkpoint's name; may contain ``/``.
        keep: number of newest checkpoints of this prefix to keep; 0 keeps all.
        overwrite: replace this step if it exists, and afterwards remove newer ones.
        keep_every_n_steps: also keep older checkpoints that are at least this many steps apart.
        async_manager: write in the background, with the values at the time of this call.
        orbax_checkpointer: an Orbax checkpointer to write with; one in the background has old steps removed later.

    Returns:
        The checkpoint's path, in the form in which ``ckpt_dir`` was given.

    Raises:
        InvalidCheckpointError: without ``overwrite``, the step exists or is older than the newest.
        ArgumentError: an invalid step, ``keep``, prefix or flag.
        CheckpointerError: ``async_manager`` or ``orbax_checkpointer`` cannot save this.
        UnsupportedLeafError, NameCollisionError: the format cannot hold the tree; nothing was written.
        MPACheckpointingRequiredError: an array is not fully addressable from this process.
        CleanupError: the step was saved, but an old checkpoint could not be removed.
        StorageError: the file system or store failed.

    Example:
        >>> checkpoints.save_checkpoint("runs", {"w": np.ones(2)}, step=1, keep=3)
        'runs/checkpoint_1'
    """
    request = save_request.of_step(
        normal(as_text(ckpt_dir)),
        step,
        as_text(prefix, "prefix"),
        keep=keep,
        keep_every_n_steps=keep_every_n_steps,
        overwrite=overwrite,
        async_manager=async_manager,
        orbax_checkpointer=orbax_checkpointer,
    )
    return save_pipeline.save(request, target)


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
    """Save a tree that is spread over several processes; all of them call this, with the same arguments.

    Each process writes its own shards of multiprocess arrays; process 0 writes all else, and commits. At each barrier,
    process 0 waits for the others for at most the setting ``coordination_timeout``; they wait for process 0 for at
    most twice as long. On one process it is the same as `save_checkpoint`.

    Arguments are those of `save_checkpoint`. Every process sees ``ckpt_dir``. With an ``async_manager``, which all
    processes pass or none does, it commits in the background. A ``gda_manager`` is waited for, and not needed.

    Returns:
        The checkpoint's path, in the form in which ``ckpt_dir`` was given.

    Raises:
        ProcessTimeoutError: processes timed out at a barrier; the message names them.
        MultiprocessSaveError: another process failed, or was called with other arguments or another tree; nothing was
            saved.
        CheckpointError: an error of `save_checkpoint`, raised in every process.
    """
    if gda_manager:  # as Flax asks
        if not hasattr(gda_manager, "wait_until_finished"):
            remedy = "leave it out: arrays of several processes are saved without one"
            raise CheckpointerError(f"gda_manager has no wait_until_finished, {arguments.found(gda_manager)}; {remedy}")
        gda_manager.wait_until_finished()
    request = save_request.of_step(
        normal(as_text(ckpt_dir)),
        step,
        as_text(prefix, "prefix"),
        keep=keep,
        keep_every_n_steps=keep_every_n_steps,
        overwrite=overwrite,
        multiprocess=True,
        async_manager=async_manager,
        orbax_checkpointer=orbax_checkpointer,
    )
    return save_pipeline.save(request, target)


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
    """Restore a checkpoint of any format, detected from the files; the flag has no effect.

    Args:
        ckpt_dir: a directory of checkpoints, or one checkpoint.
        target: tree of the wanted structure; None restores nested dicts with text keys.
        step: the step in the directory; None takes the latest complete one.
        prefix: literal text before the step in the checkpoints' names.
        parallel: accepted as in Flax; large files are always read in parallel.
        gda_manager: accepted as in Flax and waited for; not needed.
        allow_partial_mpa_restoration: accepted as in Flax; arrays without a sharding in the target become numpy arrays.
        orbax_checkpointer: an Orbax checkpointer to read Orbax directories with.
        orbax_transforms: as ``transforms`` of `flax_ckpt_compat.restore`, for every format; Orbax's own are accepted.
            Unlike rules, transforms (even ``{}``) keep the target's value where the checkpoint has no such leaf, and
            where the target has None.

    Returns:
        A tree like ``target`` with the stored leaves, or ``target`` itself, with a line in the log, if there is no
        checkpoint. Arrays are writable numpy arrays; those of Orbax directories become ``jax.Array`` if the target's
        leaf has a sharding.

    Raises:
        CheckpointNotFoundError: the given step does not exist (a ``ValueError``, as in Flax).
        MissingLeavesError: the target has leaves that the checkpoint lacks; the message ends with rules that would
            find them, if they are clear.
        TransformError: a transform or rule is invalid, or does not fit.
        IncompleteCheckpointError, UnrecognizedFormatError, CorruptCheckpointError: the checkpoint cannot be restored.

    Example:
        >>> _ = checkpoints.save_checkpoint("runs", {"w": np.ones(2)}, step=1)
        >>> checkpoints.restore_checkpoint("runs", target={"w": np.zeros(2)})
        {'w': array([1., 1.])}
    """
    if gda_manager is not None and hasattr(gda_manager, "wait_until_finished"):
        gda_manager.wait_until_finished()
    options = RestoreOptions(_settings.current(), TransformSpec(orbax_transforms))
    checkpoint_dir = saved_steps.checkpoint_dir(normal(as_text(ckpt_dir)), as_text(prefix, "prefix"))
    return restore_pipeline.restore(checkpoint_dir, target, step, options, orbax_checkpointer or None)


def latest_checkpoint(ckpt_dir: str | os.PathLike[str], prefix: str = "checkpoint_") -> str | None:
    """Return the path of the latest complete checkpoint of a prefix, or None.

    That is the highest step, of the prefix or of a CheckpointManager; else the last ``prefix + text`` in natural order;
    else the last complete name that begins with the prefix, with a warning. As in Flax, it may be a foreign directory.

    Args:
        ckpt_dir: directory of the checkpoints.
        prefix: literal text before the step in the checkpoints' names; may contain ``/``.
    """
    checkpoint_dir = _checkpoint_dir(ckpt_dir, prefix)
    found = saved_steps.in_one_listing(checkpoint_dir, saved_steps.latest_of)
    return None if found is None else os.path.join(saved_steps.shown_directory(ckpt_dir, prefix), found.name)


def available_steps(
    ckpt_dir: str | os.PathLike[str], prefix: str = "checkpoint_", step_type: type = int
) -> list[int | float]:
    """Return the steps of the complete checkpoints of a prefix, or of a CheckpointManager, in order.

    Args:
        ckpt_dir: directory of the checkpoints.
        prefix: literal text before the step in the checkpoints' names; may contain ``/``.
        step_type: type of the returned steps.

    Raises:
        ArgumentError: a step cannot be converted to ``step_type``, such as 2.5 to int, or that is not a type.
    """
    checkpoint_dir = _checkpoint_dir(ckpt_dir, prefix)
    found = []
    for entry in saved_steps.in_one_listing(checkpoint_dir, saved_steps.available_in):
        try:
            found.append(step_type(entry.text))
        except (TypeError, ValueError, ArithmeticError) as error:  # the last one of a Decimal
            message = f"{entry.location}: its step is not of the type {step_type}; pass step_type=float"
            raise ArgumentError(message, path=entry.location.path) from error
    return found


def safe_normpath(path: str) -> str:
    """Normalise a path with ``os.path.normpath``, leaving the ``scheme://`` of a URL alone."""
    match = SCHEME_RE.match(path)
    assert match is not None  # every text matches
    return (match["scheme"] or "") + os.path.normpath(match["path"])


def convert_pre_linen(params: PyTree) -> PyTree:
    """Rename pre-Linen submodules (``Conv_0, Dense_1``: one count) to Linen's (``Conv_0, Dense_0``: one per class).

    Args:
        params: nested dict or FrozenDict; names that already are Linen's stay as they are.
    """
    if not isinstance(params, (dict, core.FrozenDict)):
        return params
    renamed = {new: convert_pre_linen(params[old]) for old, new in numbered_names.linen_names(params.keys()).items()}
    return core.freeze(renamed) if isinstance(params, core.FrozenDict) else renamed


def _checkpoint_dir(ckpt_dir: str | os.PathLike[str], prefix: str) -> saved_steps.CheckpointDir:
    checkpoint_dir = saved_steps.checkpoint_dir(as_text(ckpt_dir), as_text(prefix, "prefix"))
    async_saves.wait_for_multiprocess_saves(checkpoint_dir.directory)
    return checkpoint_dir


# The rest is private in Flax's module too, but evaluation scripts call it.
def _checkpoint_path(ckpt_dir: str, step: int | float | str, prefix: str = "checkpoint_") -> str:
    return os.path.join(ckpt_dir, f"{prefix}{step}")


def _checkpoint_path_step(path: str) -> float | None:
    numbers = SIGNED_FLOAT_RE.findall(path)
    return float(numbers[-1]) if numbers else None


def _all_checkpoints(ckpt_dir: str | os.PathLike[str], prefix: str = "checkpoint_") -> list[str]:
    checkpoint_dir = _checkpoint_dir(ckpt_dir, prefix)
    found = saved_steps.in_one_listing(checkpoint_dir, saved_steps.all_of)
    shown = saved_steps.shown_directory(ckpt_dir, prefix)
    return [os.path.join(shown, entry.name) for entry in found]


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any misspelt name

    def __getattr__(name: str) -> Any:
        """Return what else Flax's module has: modules that it imports, and helpers that scripts call."""
        if not name.startswith("__"):
            try:
                return vars(importlib.import_module("flax.training.checkpoints"))[name]
            except Exception:  # noqa: BLE001, S110 - releases of orbax and jax broke it with errors of many types
                pass
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
