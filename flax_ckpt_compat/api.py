"""Save and restore with strict defaults, keyword arguments and explicit paths: the API for new code."""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from flax_ckpt_compat import config
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.location import as_text, normal
from flax_ckpt_compat._core.progress import Callback
from flax_ckpt_compat._discovery import saved_steps
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._restore import pipeline as restore_pipeline
from flax_ckpt_compat._restore.plan import RestoreOptions
from flax_ckpt_compat._save import pipeline as save_pipeline
from flax_ckpt_compat._save import request as save_request
from flax_ckpt_compat._save.async_saves import AsyncManager
from flax_ckpt_compat.errors import ArgumentError, SettingError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Tree = TypeVar("Tree", default=Any)  # the type of the target; without one, what is restored may be anything
else:
    Tree = Any

__all__ = ["restore", "save"]


class _Unset(enum.Enum):
    """Sentinel for an argument that was not given; None is a value."""

    UNSET = "the setting's value"


def restore(
    path: str | os.PathLike[str],
    target: Tree | None = None,
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    item: str | None = None,
    transforms: Any = None,
    transforms_default_to_original: bool = True,
    missing_leaves: Literal["error", "warn", "ignore"] | None = None,
    shape_mismatch: Literal["warn", "error", "ignore"] | None = None,
    kind_mismatch: Literal["warn", "error", "ignore"] | None = None,
    unused_leaves: Literal["auto", "error", "warn", "ignore"] | None = None,
    dtype: Literal["stored", "target"] | None = None,
    structure: Literal["flax", "stored"] | None = None,
    must_exist: bool | None = None,
    mapped: bool | None = None,
    progress: Callback | Literal["bar"] | None = None,
) -> Tree:
    """Restore a checkpoint of any format; raise if it does not match the target.

    A policy (``missing_leaves`` to ``mapped``) that is None takes the value set by an environment variable,
    ``config.update`` or ``config.override``, or else the strict default: ``shape_mismatch="error"``,
    ``kind_mismatch="error"``, ``structure="stored"``, ``must_exist=True``, and `flax_ckpt_compat.config`'s others.

    Args:
        path: one checkpoint (file or directory), or a directory of checkpoints.
        target: pytree of arrays or ``jax.ShapeDtypeStruct`` with the wanted structure; None restores the stored tree.
            Arrays get the sharding of a ``jax.ShapeDtypeStruct`` that has one, or of a ``jax.Array`` on several
            devices.
        step: the step in the directory: a number, a 0-d array, or text such as ``"best"``; None takes the latest
            complete one.
        prefix: literal text before the step in the checkpoints' names; may contain ``/``.
        item: the item of a checkpoint of several (a step of Orbax's managers) to restore, as one tree; None takes the
            one whose structure the target has, or all.
        transforms: mapping of stored leaves to the target's: a list of rules (`flax_ckpt_compat.rules`), a mapping of
            the target's key paths to stored ones (``{"params/encoder": "params/Dense_0"}``), or a pytree of
            `flax_ckpt_compat.transforms.Transform` by key path of the target, or expression; lists may mix them.
        transforms_default_to_original: target leaves without a transform come from the checkpoint; False keeps the
            target's own. Does not apply to rules.
        missing_leaves: a target leaf that nothing stored gives: raise, or keep the target's value.
        shape_mismatch: if shapes differ: raise, or return the stored shape.
        kind_mismatch: an array in the target over stored text, None, a number or a subtree, a stored sequence longer
            than the target's, or a target that is not a tree of leaves (a class, a function, a module): raise, or
            return the stored value.
        unused_leaves: stored leaves that the target lacks, which are dropped. ``"auto"`` raises only for numbered
            layers of which the target has fewer: a target may ask for a part, such as the parameters.
        dtype: ``"stored"``, or ``"target"``, which casts arrays and scalars, with a warning if values are lost.
        structure: without a target, ``"stored"`` returns lists, tuples and int keys where the format recorded them;
            ``"flax"`` returns Flax's nested dicts with text keys.
        must_exist: if there is no checkpoint, True raises; False returns the target.
        mapped: True memory-maps large numpy arrays that are stored uncompressed in a local file: available at once,
            writable without altering the file, often not aligned. Truncating the file kills who touches them later.
        progress: function that is called with a `Progress` at most five times a second, by one thread at a time, and
            once at the end; ``"bar"`` shows a progress bar on a terminal. What it raises is logged, ends no restore,
            and is its last call. None takes the setting.

    Returns:
        A tree like ``target`` with the stored leaves. Arrays are writable numpy arrays, or ``jax.Array`` if the target
        asks for a sharding (in Orbax directories also if its leaf is on one device). A directory of several Orbax
        items gives a dict.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        MissingLeavesError, UnusedLeavesError, ShapeMismatchError, KindMismatchError: a policy says so.
        DtypeMismatchError: no such cast exists.
        TransformError: a transform or rule is invalid, or does not fit.
        SettingError, ArgumentError: a policy has no such value, or the checkpoint no such item.
        IncompleteCheckpointError, UnrecognizedFormatError, CorruptCheckpointError: the checkpoint cannot be restored.
        StorageError: the file system or store failed.

    Example:
        >>> _ = save("runs", {"w": np.ones(2)}, step=1)
        >>> restore("runs", {"w": np.zeros(2)})
        {'w': array([1., 1.])}
        >>> restore("runs", {"v": np.zeros(2)}, transforms=[rules.rename("w", "v")])
        {'v': array([1., 1.])}
    """
    options = RestoreOptions.strict(
        transforms,
        transforms_default_to_original,
        item=item,
        missing_leaves=missing_leaves,
        shape_mismatch=shape_mismatch,
        kind_mismatch=kind_mismatch,
        unused_leaves=unused_leaves,
        dtype=dtype,
        structure=structure,
        must_exist=must_exist,
        mapped=mapped,
        progress=progress,
    )
    checkpoint_dir = saved_steps.checkpoint_dir(as_text(path), as_text(prefix, "prefix"))
    restored: Tree = restore_pipeline.restore(checkpoint_dir, target, step, options)
    return restored


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    overwrite: bool = False,
    keep: int | None = None,
    keep_every_n_steps: float | None = None,
    format: Literal["msgpack", "orbax"] | None = None,
    compression: Literal["crc32c", "zstd"] | _Unset | None = _Unset.UNSET,
    async_manager: AsyncManager | None = None,
    progress: Callback | Literal["bar"] | None = None,
) -> str:
    """Save a tree from this process. The save is atomic and durable, and replaces nothing but checkpoints.

    Args:
        path: without a step, the checkpoint itself (a file in the msgpack format, a directory in Orbax's); with one,
            the directory of checkpoints. Missing directories are created.
        tree: pytree, or any type that ``flax.serialization`` supports. Leaves: numpy and jax arrays of any dtype but
            object and record ones, numpy and Python scalars, str, bytes, None, typed PRNG keys.
        step: finite number (int, float, numpy scalar, 0-d array), or text such as ``"best"`` for a checkpoint outside
            the order of steps.
        prefix: with a step: literal text before it in the checkpoint's name; may contain ``/``.
        overwrite: replace an existing checkpoint; also allows a step older than the newest. Unlike
            ``save_checkpoint``, this removes no newer steps.
        keep: with a step: number of newest checkpoints of this prefix to keep, counting the one just saved, which is
            never removed even if it is older; None and 0 keep all.
        keep_every_n_steps: with ``keep``: also keep older checkpoints that are at least this many steps apart.
        format: the format; None follows Flax's flag ``flax_use_orbax_checkpointing``.
        compression: codec of array data in the Orbax format, or None for none; by default, the setting.
        async_manager: write in the background, with the values at the time of this call.
        progress: as for `restore`, also of a save in the background.

    Returns:
        The checkpoint's path, in the form in which ``path`` was given.

    Raises:
        InvalidCheckpointError: the path is taken and may not be replaced, or the step is older than the newest.
        ArgumentError, CheckpointerError: an invalid step, prefix, ``keep``, path, flag or manager.
        SettingError: no such format or codec, or a codec for a format that has none.
        UnsupportedLeafError, NameCollisionError: the format cannot hold the tree; nothing was written.
        MPACheckpointingRequiredError: an array is not fully addressable from this process.
        CleanupError: the step was saved, but an old checkpoint could not be removed.
        StorageError: the file system or store failed.

    Example:
        >>> save("runs", {"w": np.ones(2)}, step=1, keep=3)
        'runs/checkpoint_1'
        >>> save("runs/best", {"w": np.ones(2)}, format="msgpack")
        'runs/best'
    """
    try:
        chosen = None if format is None else Format(format)
    except ValueError:
        choices = " or ".join(repr(one.value) for one in Format)
        raise SettingError(f"format takes {choices}, or None for what Flax's flag says; found {format!r}") from None
    if step is None and (keep is not None or keep_every_n_steps is not None):
        raise ArgumentError("keep and keep_every_n_steps count the steps of a directory; pass step= with them")
    changes: config.Changes = {} if isinstance(compression, _Unset) else {"compression": compression}
    if progress is not None:
        changes["progress"] = progress
    location = normal(as_text(path))
    with config.override(**changes):
        if step is None:
            request = save_request.of_path(location, overwrite=overwrite, async_manager=async_manager, format=chosen)
        else:
            request = save_request.of_step(
                location,
                step,
                as_text(prefix, "prefix"),
                keep=0 if keep is None else keep,
                keep_every_n_steps=keep_every_n_steps,
                overwrite=overwrite,
                replace_only_checkpoints=True,
                async_manager=async_manager,
                format=chosen,
            )
    if not isinstance(compression, _Unset | None) and backend_for(request.format).uses_gda_folder:
        raise SettingError(
            f"a {request.format.value} file is not compressed, found compression={compression!r}; pass format='orbax'"
        )
    return save_pipeline.save(request, tree)
