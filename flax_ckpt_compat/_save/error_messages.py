"""Encode errors as JSON for other processes, and decode them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax_ckpt_compat import errors
from flax_ckpt_compat._core.errors import CheckpointError, MultiprocessSaveError, ProcessTimeoutError

# Errors whose constructors take a message and a path.
_PLAIN = {
    "CleanupError", "DepthError", "NameCollisionError", "SettingError", "StepError", "StorageError",
    "MultiprocessSaveError", "UnsupportedLeafError",
}  # fmt: skip


def encode_error(error: BaseException | None) -> dict[str, Any] | None:
    """Return a JSON-serializable form of an error; None for None."""
    if error is None:
        return None
    return {
        "kind": type(error).__name__,
        "message": str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}",
        "path": getattr(error, "path", None),
        "leaf": getattr(error, "leaf", None),
        "absent": list(getattr(error, "absent", ())),
    }


def decode_error(encoded: Mapping[str, Any], path: str) -> CheckpointError:
    """Return the error of `encode_error`, as a MultiprocessSaveError if its class is not one of ours."""
    kind, message, error_path = encoded["kind"], encoded["message"], encoded["path"] or path
    if kind == "InvalidCheckpointError":
        return errors.InvalidCheckpointError(message, path=error_path, step=None)
    if kind == "ProcessTimeoutError":
        return ProcessTimeoutError(message, path=error_path, absent=tuple(encoded["absent"]))
    if kind in _PLAIN:
        error: CheckpointError = getattr(errors, kind)(message, path=error_path)
        error.leaf = encoded["leaf"]
        return error
    return MultiprocessSaveError(f"{path}: {message}", path=error_path)
