"""The functions that code without Flax's habits calls: keyword arguments, strict defaults, paths as they are given."""

from __future__ import annotations

import enum
import os
from typing import Any, Literal, SupportsFloat

from flax_ckpt_compat import config
from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._restore import pipeline as restore_pipeline
from flax_ckpt_compat._save import pipeline as save_pipeline
from flax_ckpt_compat._save.async_saves import AsyncManager
from flax_ckpt_compat.errors import SettingError, StepError

__all__ = ["restore", "save"]


class _Unset(enum.Enum):
    """Stands for an argument that was not given, where None is a value."""

    UNSET = "the setting's value"


def restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    transforms: Any = None,
    transforms_default_to_original: bool = True,
    missing_leaves: Literal["error", "warn", "keep"] | None = None,
    shape_mismatch: Literal["warn", "error", "ignore"] | None = None,
    kind_mismatch: Literal["warn", "error", "ignore"] | None = None,
    dtype: Literal["stored", "target"] | None = None,
    structure: Literal["flax", "stored"] | None = None,
    must_exist: bool | None = None,
    mapped: bool | None = None,
) -> Any:
    """Restores a checkpoint of any format, and raises where it is not what the caller described.

    The policies `missing_leaves` to `mapped` are, if None: what was set as an environment variable, with
    ``config.update`` or ``config.override``, and else the strict values named here.

    Args:
        path: one checkpoint (file or directory), or a directory of checkpoints.
        target: pytree of the wanted structure, of arrays or ``jax.ShapeDtypeStruct``; None restores what is stored.
            Arrays come back with the sharding of a ``jax.ShapeDtypeStruct`` that has one, or of a ``jax.Array`` on
            several devices.
        step: which checkpoint of the directory: a number, a 0-d array, or text such as ``"best"``; None takes the
            latest complete one.
        prefix: literal text before the step in the checkpoints' names; may contain ``/``.
        transforms: how the stored leaves become the target's: a list of rules (`flax_ckpt_compat.rules`), or a
            pytree of `flax_ckpt_compat.transforms.Transform` by key path of the target, or regular expression.
        transforms_default_to_original: target leaves without a transform come from the checkpoint; False keeps the
            target's own. Says nothing about rules.
        missing_leaves: for a target leaf that neither the checkpoint nor a transform gives, ``"error"`` raises;
            ``"warn"`` and ``"keep"`` keep the target's value.
        shape_mismatch: where shapes differ, ``"error"`` raises; ``"warn"`` and ``"ignore"`` return the stored shape.
        kind_mismatch: where the target has an array and the checkpoint text, None, a number or a subtree, where a
            stored sequence is longer than the target's, and where the target is not a tree of leaves (a class, a
            function, a module), ``"error"`` raises; ``"warn"`` and ``"ignore"`` return what is stored.
        dtype: ``"stored"`` keeps the dtypes of the checkpoint; ``"target"`` casts arrays and scalars to those of the
            target's leaves, with a warning where values do not survive.
        structure: without a target, ``"stored"`` gives lists, tuples and int keys where the format recorded them;
            ``"flax"`` gives Flax's nested dicts with text keys.
        must_exist: True raises where there is nothing to restore; False returns the target.
        mapped: True lets large numpy arrays lie over the mapped file, where it is local and holds them as they are:
            there at once, writable without altering the file, often not aligned. Truncating the file while they are
            alive kills the process that touches them. False reads them into memory.

    Returns:
        A tree like ``target`` with the stored leaves. Arrays are writable numpy arrays, or ``jax.Array`` where the
        target asks for a sharding (in Orbax directories also where its leaf is on one device). A directory of
        several Orbax items gives a dict.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        MissingLeavesError: the target has leaves that the checkpoint lacks.
        ShapeMismatchError: a stored shape is not the target's, or does not fit its sharding.
        KindMismatchError: a stored leaf is of another kind than the target's, or the target is not a tree.
        DtypeMismatchError: a cast that does not exist.
        TransformError: a transform or rule that makes no sense, or does not fit.
        SettingError: a policy has no such value.
        IncompleteCheckpointError, UnrecognizedFormatError, CorruptCheckpointError: what is there cannot be restored.
        StorageError: the file system refused.
    """
    policies = {
        "missing_leaves": missing_leaves,
        "shape_mismatch": shape_mismatch,
        "kind_mismatch": kind_mismatch,
        "dtype": dtype,
        "structure": structure,
        "must_exist": must_exist,
        "mapped": mapped,
    }
    given = {name: value for name, value in policies.items() if value is not None}
    with config.defaults(config.STRICT), config.override(**given):
        return restore_pipeline.restore(
            os.fspath(path),
            target,
            step,
            prefix,
            None,
            transforms,
            transforms_default_to_original,
            strict=True,
        )


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
    compression: Literal["zstd", "gzip", "blosc"] | _Unset | None = _Unset.UNSET,
    async_manager: AsyncManager | None = None,
) -> str:
    """Saves a tree from this process; atomic, durable, and nothing but a checkpoint is ever replaced.

    Args:
        path: without a step, the checkpoint itself (a file in the msgpack format, a directory in Orbax's); with one,
            the directory of checkpoints. Missing directories are made.
        tree: pytree, or anything that ``flax.serialization`` knows. Leaves: numpy and jax arrays of any dtype but
            object and record ones, numpy and Python scalars, str, bytes, None, typed PRNG keys.
        step: finite number (int, float, numpy scalar, 0-d array), or text such as ``"best"`` for a checkpoint outside
            the order of steps.
        prefix: with a step: literal text before it in the checkpoint's name; may contain ``/``.
        overwrite: replace what is there if it is a checkpoint; also allows a step older than the newest. Unlike
            ``save_checkpoint``, this removes no newer steps.
        keep: with a step: how many of the newest checkpoints of this prefix stay, and the one just saved; None and 0
            keep all.
        keep_every_n_steps: with ``keep``: of the older checkpoints, also keep those at least so far apart.
        format: what to write; None goes by Flax's flag ``flax_use_orbax_checkpointing``.
        compression: codec of array data in the Orbax format, or None; not given, the setting decides.
        async_manager: write in the background; the values saved are those at the time of this call.

    Returns:
        The checkpoint's path, in the form in which ``path`` was given.

    Raises:
        InvalidCheckpointError: something is there that may not be replaced, or the step is older than the newest.
        StepError: a step, prefix, ``keep`` or path that means nothing.
        SettingError: no such format or codec, or a codec for a format that has none.
        UnsupportedLeafError, NameCollisionError: the tree cannot be held by the format; nothing was written.
        MPACheckpointingRequiredError: an array of which this process sees only a part.
        CleanupError: the step was saved, but an old checkpoint could not be removed.
        StorageError: the file system refused.
    """
    chosen = _format(format)
    codec = {} if isinstance(compression, _Unset) else {"compression": compression}
    place = paths.normal(os.fspath(path))
    with config.override(**codec):
        if codec and compression is not None and chosen is Format.MSGPACK:
            raise SettingError(
                f"a msgpack file is not compressed, found compression={compression!r}; pass format='orbax'"
            )
        if step is not None:
            return save_pipeline.save(
                place, tree, step, prefix, 0 if keep is None else keep, overwrite, keep_every_n_steps,
                async_manager, None, replace_only_checkpoints=True, format=chosen,
            )  # fmt: skip
        if keep is not None or keep_every_n_steps is not None:
            raise StepError("keep and keep_every_n_steps count the steps of a directory; pass step= with them")
        return save_pipeline.save_at(place, tree, overwrite, async_manager, chosen)


def _format(name: str | None) -> Format:
    if name is None:
        return Format.ORBAX if config.use_orbax_format() else Format.MSGPACK
    try:
        return Format(name)
    except ValueError:
        choices = " or ".join(repr(format.value) for format in Format)
        raise SettingError(f"format takes {choices}, or None for what Flax's flag says; found {name!r}") from None
