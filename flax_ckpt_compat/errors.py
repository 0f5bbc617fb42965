"""Define the errors that the library raises: ours, and those that are also Flax's.

CheckpointError
├── InvalidCheckpointError(flax InvalidCheckpointError, ValueError)   outdated or existing step, overwrite=False
├── MPACheckpointingRequiredError(flax's, ValueError)   an array that is not fully addressable from this process
├── MPARestoreTargetRequiredError(flax's, ValueError)   never raised here; callers of Flax may catch it
├── MPARestoreDataCorruptedError(flax's, ValueError)    never raised here; callers of Flax may catch it
└── those of flax_ckpt_compat._core.errors, which do not depend on flax
"""

from __future__ import annotations

import copyreg
from typing import Any

from flax import errors as _flax

from flax_ckpt_compat._core.errors import *
from flax_ckpt_compat._core.errors import CheckpointError, sanitize

__all__ = [
    "ArgumentError", "CheckpointError", "CheckpointNotFoundError", "CheckpointerError", "ChecksumError", "CleanupError",
    "ConcurrentWriteError", "ConversionError", "CorruptCheckpointError", "DepthError", "DtypeMismatchError",
    "ForkedProcessError", "IncompleteCheckpointError", "InvalidCheckpointError", "KindMismatchError",
    "MPACheckpointingRequiredError", "MPARestoreDataCorruptedError", "MPARestoreTargetRequiredError",
    "MissingLeavesError", "MissingPathError", "MultiprocessRestoreError", "MultiprocessSaveError",
    "NameCollisionError", "OutOfMemoryError", "PermissionDeniedError", "ProcessTimeoutError", "ReplacedError",
    "SettingError", "ShapeMismatchError", "StorageError", "TransformError", "UnrecognizedFormatError",
    "UnsupportedLeafError", "UnusedLeavesError",
]  # fmt: skip
__dir__ = __all__.copy  # for completion


def _add_missing_classes() -> None:
    """Give `flax.errors` the classes that a later Flax lacks, for programs that catch them there."""

    def __init__(self: Any, *args: Any) -> None:  # noqa: N807
        Exception.__init__(self, *args)

    for name in __all__:
        if name.startswith(("Invalid", "MPA")) and not hasattr(_flax, name):
            setattr(_flax, name, type(name, (_flax.FlaxError,), {"__init__": __init__, "__module__": _flax.__name__}))


_add_missing_classes()


class _FlaxTooError(CheckpointError):
    """Base of errors that are both ours and Flax's, with our attributes and message."""

    def __init__(self, message: str, *, path: str, leaf: str | None = None):
        # Not by Flax's classes, which add a link to its documentation to reasons of their own.
        Exception.__init__(self, sanitize(message, path, leaf))
        self.path, self.leaf = path, leaf

    def __reduce__(self) -> Any:
        # Flax's own __reduce__ unpickles to a bare FlaxError.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class InvalidCheckpointError(_FlaxTooError, _flax.InvalidCheckpointError, ValueError):
    """Saving without ``overwrite`` at a step that exists or is older than the newest."""


class MPACheckpointingRequiredError(_FlaxTooError, _flax.MPACheckpointingRequiredError, ValueError):
    """An array spans processes, and only host-local arrays can be saved or restored here."""


class MPARestoreTargetRequiredError(_FlaxTooError, _flax.MPARestoreTargetRequiredError, ValueError):
    """A stored array spans processes, and the target has no sharding for it."""


class MPARestoreDataCorruptedError(_FlaxTooError, _flax.MPARestoreDataCorruptedError, ValueError):
    """The ``_gda`` folder beside the checkpoint was never finished."""


class MultiprocessSaveError(CheckpointError, RuntimeError):
    """Another process of a multi-process save failed or made a different call; nothing was saved."""


class MultiprocessRestoreError(CheckpointError, RuntimeError):
    """Processes of a job found different checkpoints."""


class ProcessTimeoutError(MultiprocessSaveError, TimeoutError):
    """Processes did not reach a barrier within the time limit.

    Attributes:
        absent: their process indices.
    """

    absent: tuple[int, ...] = ()
