"""Define the errors that do not depend on flax; ``flax_ckpt_compat.errors`` re-exports them, and has the others.

Each class inherits the built-in that callers of Flax already catch. Errors of the file system are translated into ours
here, with reason and remedy."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import traceback
from contextlib import AbstractContextManager
from typing import Any

from flax_ckpt_compat._core.text_formatting import printable

_PUBLIC = "flax_ckpt_compat.errors"  # the module that tracebacks name, and that programs import from
_ENDLESS = re.compile(r"(\S{1000})\S{4000,}(\S{100})")  # no path of a file, but names in damaged files
# What to do about a leaf of an unsupported type.
LEAF_REMEDY = (
    "convert it to an array, list, number, str or bytes, or leave it out of the tree: remove the key, or declare the "
    "field with flax.struct.field(pytree_node=False)"
)


class CheckpointError(Exception):
    """Base class of all errors of this library.

    Attributes:
        path: the file or directory concerned, as text, or None.
        leaf: key path of the leaf concerned, joined with ``/``, or None.
    """

    __module__ = _PUBLIC

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = _PUBLIC
        # That of the first base refuses; tblib, and so Dask, unpickles errors with it.
        base = OSError if issubclass(cls, OSError) else Exception
        cls.__new__ = base.__new__  # type: ignore[method-assign]

    def __init__(self, message: str, *, path: str | None = None, leaf: str | None = None, **attributes: Any):
        super().__init__(sanitize(message, path, leaf))
        self.path, self.leaf = path, leaf
        for name, value in attributes.items():
            if not hasattr(self, name):  # a subclass gives each of its own a default
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)


def add_sentence(error: CheckpointError, sentence: str) -> None:
    """Append a sentence to an error's message: what its raiser could not know of the remedy."""
    before = str(error.args[0])
    stop = "" if before.endswith((".", "!", "?", ":", "\n")) else "."
    error.args = (sanitize(f"{before}{stop} {sentence}", error.path, error.leaf), *error.args[1:])


def sanitize(message: str, *names: str | None) -> str:
    """Make a message safe to print: escape control characters, and line breaks from these names; cut endless words."""
    message = _ENDLESS.sub(r"\1…\2", message)
    # Part by part: the message may name a directory above the path, too.
    for part in "/".join(filter(None, names)).split("/"):
        if "\n" in part:
            message = message.replace(part, printable(part, one_line=True))
    return printable(message)


class CheckpointNotFoundError(CheckpointError, ValueError, FileNotFoundError):
    """There is no checkpoint where one was asked for; the message says what to do next."""

    has_remedy = True  # some messages of 1.0.0 did not say that


class IncompleteCheckpointError(CheckpointError, ValueError):
    """The checkpoint exists, but its writer never finished it."""


class UnrecognizedFormatError(CheckpointError, ValueError):
    """The path exists but holds no checkpoint; the message says what it looks like."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """The checkpoint is of a known format but does not decode: truncated, damaged or hostile."""


class ChecksumError(CorruptCheckpointError):
    """Stored bytes do not have the checksum that was recorded when they were saved."""


class ReplacedError(CheckpointError, ValueError):
    """Another checkpoint took the path of one that was read."""


class MissingLeavesError(CheckpointError, ValueError):
    """The target has leaves that the checkpoint lacks.

    Attributes:
        missing: every missing key path, joined with ``/``.
    """

    missing: tuple[str, ...] = ()


class UnusedLeavesError(CheckpointError, ValueError):
    """The target lacks stored leaves: layers that would be cut off, or any with ``unused_leaves="error"``."""


class ShapeMismatchError(CheckpointError, ValueError):
    """Stored and target shapes differ and the setting ``shape_mismatch`` is ``error``."""


class KindMismatchError(CheckpointError, TypeError, ValueError):
    """Stored and target leaves are of different kinds, or the target is not a tree of leaves, or of items."""


class DtypeMismatchError(CheckpointError, TypeError, ValueError):
    """No cast exists from the stored dtype to the one that the target asks for."""


class TransformError(CheckpointError, ValueError):
    """A transform or rule is invalid, or does not fit this checkpoint and this target."""


class UnsupportedLeafError(CheckpointError, TypeError, ValueError):
    """A leaf of the tree to save has a type or dtype that no checkpoint format can hold."""


class ForkedProcessError(CheckpointError):
    """This process was forked from one that had used TensorStore, which would abort it."""


class OutOfMemoryError(CheckpointError, MemoryError):
    """This process has too little memory for what is to be restored or saved."""


class DepthError(CheckpointError, ValueError, RecursionError):
    """A tree is nested too deeply to be saved or restored within Python's recursion limit."""


class CheckpointerError(CheckpointError, ValueError):
    """The ``orbax_checkpointer`` that was given cannot save this tree, or restore this checkpoint."""


class NameCollisionError(CheckpointError, ValueError):
    """Two key paths of the tree to save would be stored under one name, so one would be lost."""


class ArgumentError(CheckpointError, TypeError, ValueError):
    """An argument is invalid: a step, ``keep``, a prefix, path, flag or function."""


class SettingError(CheckpointError, ValueError):
    """A setting is unknown, or a value is not allowed for it."""


class ConversionError(CheckpointError, ValueError):
    """Some checkpoints could not be converted.

    Attributes:
        conversions: what became of each, as `flax_ckpt_compat.convert` returns it.
    """

    conversions: tuple[object, ...] = ()


class StorageError(CheckpointError, OSError):
    """The file system or object store refused an operation; the original error is the cause.

    Attributes:
        errno: the operating system's error number, where there was one.
    """

    def __init__(self, message: str, *, path: str | None = None, errno: int | None = None, **attributes: Any):
        super().__init__(message, path=path, **attributes)
        self.errno, self.strerror, self.filename = errno, None if errno is None else os.strerror(errno), path

    __str__ = Exception.__str__  # OSError makes another text of the number and the file

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        of_os = {name: getattr(self, name) for name in ("errno", "strerror", "filename")}  # which OSError leaves out
        return type(self), self.args, {**vars(self), **of_os}


class PermissionDeniedError(StorageError, PermissionError):
    """The file system refused access; code that was written for Flax catches Python's PermissionError."""


class MissingPathError(StorageError, FileNotFoundError):
    """A file or folder is not there, or a part of its path is a file; code may catch Python's FileNotFoundError."""


class CleanupError(StorageError):
    """The checkpoint was saved, but checkpoints that it replaces, or that ``keep`` evicts, could not be removed."""


class ConcurrentWriteError(StorageError):
    """Another process writes or has written the same checkpoint of a store, or removes this one: it is not there."""


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler of the program raised an error: a TimeoutError, say, which must reach it."""
    handlers = list(filter(callable, map(signal.getsignal, signal.valid_signals())))
    handlers += [one.func for one in handlers if isinstance(one, functools.partial)]
    # A function or method, or an object that is called.
    codes = {getattr(form, "__code__", None) for one in handlers for form in (one, type(one).__call__)} - {None}
    return bool(codes) and any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM)
_REMEDIES = {
    **dict.fromkeys(_DENIED, "check the permissions of {folder}, and of what is in it"),
    **dict.fromkeys(FULL_DISK, "free space or files (df -i), or save to another directory"),
    errno.EROFS: "{folder} is mounted read-only; save to another directory",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "too many files are open; close some, or raise ulimit -n"),
    errno.EFBIG: "a file would be too large for this process (ulimit -f) or the file system",
    errno.ENOTEMPTY: "another program wrote there meanwhile; try again",
    errno.ENOTDIR: "a part of this path is no directory; check the path",
    errno.EIO: "the disk or the network file system failed; check it, or save to another directory",
    errno.ENAMETOOLONG: "shorten the directory, the prefix or the step",
}
_KINDS = dict.fromkeys(_DENIED, PermissionDeniedError) | dict.fromkeys((errno.ENOENT, errno.ENOTDIR), MissingPathError)


class translated(AbstractContextManager[Any]):  # noqa: N801  (each look-up enters one, so it is no generator)
    """Translate OSErrors into StorageError; ``doing`` completes "could not be …".

    StorageErrors about a ``temporary`` become such about the checkpoint at the path, too."""

    def __init__(self, path: str, doing: str = "", *, temporary: str = ""):
        self._path, self._doing, self._temporary = path, doing, temporary

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # A ProcessTimeoutError is an OSError, because it is a TimeoutError.
        is_ours = isinstance(error, CheckpointError) and not (self._temporary and isinstance(error, StorageError))
        if not isinstance(error, OSError) or is_ours or is_of_handler(error):
            return
        path, doing, temporary = self._path, self._doing, self._temporary
        number = error.errno if isinstance(error.errno, int) else None  # other libraries give two texts
        folder = os.path.dirname(temporary or path)
        reason = str(error.strerror or error)
        if number in _REMEDIES:
            reason += f"; {_REMEDIES[number].format(folder=folder)}"
            if number in FULL_DISK and folder != os.path.dirname(path):  # a save to a store, which is prepared there
                reason += f", by TMPDIR, in place of {folder}"
        elif temporary:
            reason = str(error).replace(temporary, path)
        elif doing and "://" in path:
            reason += "; nothing else may change what is there meanwhile; try again"
        elif number == errno.ENOENT:
            reason += "; it was removed meanwhile, or was never there"
        else:
            reason += "; check the path, and the disk or network file system that it is on"
        what = f"{path} could not be {doing}" if doing else path
        message = reason if temporary and reason.startswith(path) else f"{what}: {reason}"
        cause = error.__cause__ if isinstance(error, StorageError) else None
        raise _KINDS.get(number or 0, StorageError)(message, path=path, errno=number) from (cause or error)


def not_found(url: str) -> FileNotFoundError:
    """Return the error for a missing object."""
    return FileNotFoundError(errno.ENOENT, "no such object in the store", url)
