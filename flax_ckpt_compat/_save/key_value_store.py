"""Key-value store of ``jax.distributed``, which every job of several processes has, and errors as its values."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from flax_ckpt_compat import errors
from flax_ckpt_compat._core.errors import CheckpointError, MultiprocessSaveError, ProcessTimeoutError

# Errors that other processes raise as they are; their constructors take a message and a path.
_SENT_ERRORS = (
    errors.CleanupError, errors.DepthError, errors.InvalidCheckpointError, errors.MultiprocessSaveError,
    errors.NameCollisionError, errors.ProcessTimeoutError, errors.SettingError, errors.ArgumentError,
    errors.StorageError, errors.UnsupportedLeafError,
)  # fmt: skip
# The first and the longest blocking read, in seconds; Python handles no signal meanwhile.
_READ_SECONDS = (1.0, 4.0)


class KeyValueStore:
    """Read and write JSON objects under string keys.

    Every method raises ProcessTimeoutError if the store, which lives in process 0, cannot be reached.
    """

    def __init__(self, path: str):
        """Connect to the store of this job; ``path`` is the checkpoint's, for error messages."""
        self._path, self._client = path, _state().client
        if self._client is None:
            raise MultiprocessSaveError(
                f"jax counts {jax.process_count()} processes but has no connection between them; call "
                "jax.distributed.initialize() in all of them first"
            )

    def set(self, key: str, value: Mapping[str, Any]) -> None:
        """Set a key that has no value yet."""
        self._call(lambda: self._client.key_value_set(key, json.dumps(value)))

    def read_folder(self, folder: str) -> dict[str, Any]:
        """Return the present values below ``folder`` (with its final slash) by the last part of their keys, sorted.

        It never blocks; to read a single key is to wait for it.
        """
        found = self._call(lambda: self._client.key_value_dir_get(folder))
        return {key.rpartition("/")[2]: json.loads(text) for key, text in sorted(found)}

    def wait_for(self, key: str, seconds: float) -> dict[str, Any] | None:
        """Wait for a value; return None if there is none in time."""
        deadline, pauses = time.monotonic() + seconds, growing(*_READ_SECONDS)
        while (left := deadline - time.monotonic()) > 0:
            try:
                text = self._client.blocking_key_value_get(key, max(1, int(min(next(pauses), left) * 1000)))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._unreachable(error) from error
            else:
                return dict(json.loads(text))
        return None

    def delete(self, key: str) -> None:
        """Delete a key, or, if it ends in a slash, all keys below it."""
        self._call(lambda: self._client.key_value_delete(key))

    def _call(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ProcessTimeoutError:
        message = f"{self._path}: process 0, which holds the job's key-value store, does not answer: {error}"
        return ProcessTimeoutError(message, path=self._path, absent=(0,))


def growing(seconds: float, most: float) -> Iterator[float]:
    """Yield growing pauses in seconds, so that thousands of processes can poll for long."""
    while True:
        yield seconds
        seconds = min(1.5 * seconds, most)


def is_connected() -> bool:
    """Return whether this process is connected with others, as one of a job; does not start jax's backends."""
    return _state().client is not None


def process_and_count() -> tuple[int, int]:
    """Return this process's index in its job, and the number of processes; does not start jax's backends."""
    state = _state()
    return state.process_id or 0, state.num_processes or 1


def _state() -> Any:
    # jax has no public way to the store; multihost_utils and Orbax use it in just this way.
    from jax._src import distributed

    return distributed.global_state


def encode_error(error: BaseException | None) -> dict[str, Any] | None:
    """Return a JSON-serializable form of an error; None for None."""
    if error is None:
        return None
    return {
        "kind": type(error).__name__,
        "message": str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}",
        **{name: getattr(error, name, None) for name in ("path", "leaf", "absent")},
    }


def decode_error(encoded: Mapping[str, Any], path: str) -> CheckpointError:
    """Return the error of `encode_error`, as a MultiprocessSaveError if its class is not one of ours."""
    message, own_path = encoded["message"], encoded["path"] or path
    kind = next((kind for kind in _SENT_ERRORS if kind.__name__ == encoded["kind"]), None)
    if kind is None:
        return MultiprocessSaveError(f"{path}: {message}", path=own_path)
    error: CheckpointError = kind(message, path=own_path)
    error.leaf = encoded["leaf"]
    if isinstance(error, ProcessTimeoutError):
        error.absent = tuple(encoded["absent"])
    return error
