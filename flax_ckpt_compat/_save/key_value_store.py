"""Key-value store of ``jax.distributed``, which every job of several processes has; no device takes part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from flax_ckpt_compat._core.errors import MultiprocessSaveError, ProcessTimeoutError

# The first and the longest blocking read, in seconds; Python handles no signal meanwhile.
_READ_SECONDS = (1.0, 4.0)


class KeyValueStore:
    """Read and write JSON objects under string keys.

    Every method raises ProcessTimeoutError if the store, which lives in process 0, cannot be reached.
    """

    def __init__(self, path: str):
        """Connect to the store of this job.

        Args:
            path: the checkpoint's, for error messages.
        """
        self._path, self._client = path, _client()

    def set(self, key: str, value: Mapping[str, Any]) -> None:
        """Set a key that has no value yet."""
        self._call(lambda: self._client.key_value_set(key, json.dumps(value)))

    def read_folder(self, folder: str) -> dict[str, Any]:
        """Return the present values below ``folder`` (with its final slash) by the last part of their keys, sorted.

        It never blocks; to read a single key is to wait for it.
        """
        found = self._call(lambda: self._client.key_value_dir_get(folder))
        return {key.rpartition("/")[2]: json.loads(text) for key, text in sorted(found)}

    def wait_for(self, key: str, seconds: float) -> Any:
        """Wait for a value; return None if there is none in time."""
        try:
            return json.loads(self._client.blocking_key_value_get(key, max(1, int(seconds * 1000))))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise self._unreachable(error) from error

    def delete(self, key: str) -> None:
        """Delete a key, or, if it ends in a slash, all keys below it."""
        self._call(lambda: self._client.key_value_delete(key))

    def _call(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ProcessTimeoutError:
        return ProcessTimeoutError(
            f"{self._path}: process 0, which holds the job's key-value store, does not answer: {error}",
            path=self._path,
            absent=(0,),
        )


def read_timeouts() -> Iterator[float]:
    """Yield timeouts for successive `KeyValueStore.wait_for` calls, in seconds."""
    return growing(*_READ_SECONDS)


def growing(seconds: float, most: float) -> Iterator[float]:
    """Yield growing pauses in seconds, so that thousands of processes can poll for long."""
    while True:
        yield seconds
        seconds = min(1.5 * seconds, most)


def _client() -> Any:
    # jax has no public way to the store; multihost_utils and Orbax use it in just this way.
    from jax._src import distributed

    client = getattr(distributed.global_state, "client", None)
    if client is None:
        raise MultiprocessSaveError(
            f"jax counts {jax.process_count()} processes but has no connection between them; call "
            "jax.distributed.initialize() in all of them first"
        )
    return client
