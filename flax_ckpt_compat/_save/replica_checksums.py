"""Sum all bytes of arrays on their devices, to detect replicas that drifted apart before they are written.

In host memory this is a CRC-32, at the speed of memory. On an accelerator it is a weighted sum of the words, without a
copy to the host: any change of one word changes it, and of more words all but one change in 2**32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.thread_pools import results_of, run_apart
from flax_ckpt_compat._core.tree import HostCopy, Path

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
_THREADS = 4


def sums_of(arrays: Mapping[Path, Any]) -> dict[Path, bytes]:
    """Return the sum of each array, all of which lies on one device or in host memory."""
    on_devices = {path: array for path, array in arrays.items() if _is_on_accelerator(array)}
    found = dict(zip(on_devices, _of_devices(list(on_devices.values())), strict=True))
    left = [path for path in arrays if not found.get(path)]
    return found | results_of(lambda path: _on_host(arrays[path]), left, _THREADS)


def _on_host(one: Any) -> bytes:
    with jax.transfer_guard_device_to_host("allow"):
        array = np.ascontiguousarray(one.data if isinstance(one, HostCopy) else one)
    return checksums.encode(checksums.total(checksums.of_blocks(array.reshape(-1).view(np.uint8))))


def _is_on_accelerator(array: Any) -> bool:
    return isinstance(array, jax.Array) and next(iter(array.devices())).platform != "cpu"


def _of_devices(arrays: Sequence[jax.Array]) -> list[bytes]:
    """Return the sums of arrays on devices; b"" for those that have to be summed on the host."""
    found = [b""] * len(arrays)

    def run() -> None:
        with suppress(Exception), jax.transfer_guard("allow"):  # without memory for a program, for example
            started = {at: _program()(array) for at, array in enumerate(arrays) if _has_words(array.dtype)}
            for at, total in zip(started, jax.device_get(list(started.values())), strict=True):
                found[at] = checksums.encode(int(total))

    # A thread has none of the caller's contexts, such as a mesh of all processes.
    if arrays:
        run_apart(run)
    return found


def _has_words(dtype: Any) -> bool:
    """Return whether a dtype is not narrower than a byte."""
    return dtype.kind in "biufc" or dtype.name.startswith(("bfloat16", "float8"))


@functools.cache
def _program() -> Any:
    return jax.jit(weighted_sum)


def weighted_sum(array: jax.Array) -> jax.Array:
    """Return the sum of an array's words, each times an odd number that tells where it is, modulo 2**32."""
    if array.dtype.kind == "c":
        return weighted_sum(array.real) + np.uint32(5) * weighted_sum(array.imag)
    if array.dtype.kind == "b":
        array = array.astype(np.uint8)
    words = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(np.uint32)
    weights = jax.lax.full(words.shape, np.uint32(1))
    for axis in range(words.ndim):  # not of the flat array, which some devices would have to copy
        step = np.uint32(2 * math.prod(words.shape[axis + 1 :]) % 2**32)
        weights += step * jax.lax.broadcasted_iota(np.uint32, words.shape, axis)
    return (words * weights).sum(dtype=np.uint32)
