"""An error as text that goes to the other processes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax_ckpt_compat import errors
from flax_ckpt_compat._core.errors import CheckpointError, MultiprocessSaveError, ProcessTimeoutError

# Those that are made of a message and a path alone.
_PLAIN = {
    "CleanupError", "DepthError", "NameCollisionError", "SettingError", "StepError", "StorageError",
    "MultiprocessSaveError", "UnsupportedLeafError",
}  # fmt: skip


def encode_error(error: BaseException | None) -> dict[str, Any] | None:
    """What JSON can hold of an error; None for none."""
    if error is None:
        return None
    return {
        "kind": type(error).__name__,
        "message": str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}",
        "path": getattr(error, "path", None),
        "leaf": getattr(error, "leaf", None),
        "absent": list(getattr(error, "absent", ())),
    }


def decode_error(told: Mapping[str, Any], path: str) -> CheckpointError:
    """The error again, of the class that it had where that is one of ours."""
    kind, message, where = told["kind"], told["message"], told["path"] or path
    if kind == "InvalidCheckpointError":
        return errors.InvalidCheckpointError(message, path=where, step=None)
    if kind == "ProcessTimeoutError":
        return ProcessTimeoutError(message, path=where, absent=tuple(told["absent"]))
    if kind in _PLAIN:
        error: CheckpointError = getattr(errors, kind)(message, path=where)
        error.leaf = told["leaf"]
        return error
    return MultiprocessSaveError(f"{path}: {message}", path=where)
