"""Sums of replicas: what is computed on accelerators, here on the CPU, is its formula, and every change changes it."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flax_ckpt_compat._core.tree import HostCopy
from flax_ckpt_compat._save import replica_checksums

SHAPES = [(24,), (4, 6), (2, 3, 4), ()]
DTYPES = ["float32", "bfloat16", "float16", "int8", "uint16", "bool", "complex64", "float8_e4m3fn"]


def values(shape: tuple[int, ...], dtype: str) -> Any:
    """Values of which every one has bits that are set, in both parts of complex ones."""
    array: Any = np.random.default_rng(5).integers(1, 100, shape)
    if dtype == "complex64":
        array = array + 1j * np.flip(array + 1)
    return np.asarray(array % 2 if dtype == "bool" else array).astype(getattr(jnp, dtype))


def formula(words: Any) -> int:
    """Each word, times 1, 3, 5 and so on."""
    return sum((2 * at + 1) * int(word) for at, word in enumerate(words.reshape(-1))) % 2**32


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weighted_sum(dtype: str) -> None:
    """It is the formula, in any shape."""
    for shape in SHAPES:
        array = values(shape, dtype)
        parts = [array.real, array.imag] if dtype == "complex64" else [array]
        unsigned = [np.asarray(part).view(f"u{part.dtype.itemsize}") for part in parts]
        wanted = sum(formula(words) * 5**at for at, words in enumerate(unsigned)) % 2**32
        assert int(replica_checksums.weighted_sum(jnp.asarray(array))) == wanted, shape


def test_any_change_of_one_word_and_any_exchange_of_two_changes_it() -> None:
    """Words that are equal aside."""
    array = np.arange(1, 25, dtype=np.uint16)
    before = int(replica_checksums.weighted_sum(jnp.asarray(array)))
    for at in range(array.size):
        for bit in range(16):
            changed = array.copy()
            changed[at] ^= 1 << bit
            assert int(replica_checksums.weighted_sum(jnp.asarray(changed))) != before
        exchanged = array.copy()
        exchanged[[at, at - 1]] = array[[at - 1, at]]
        assert int(replica_checksums.weighted_sum(jnp.asarray(exchanged))) != before


def test_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the CRC-32 of all blocks, alike for copies of an async save; and where the device cannot compute it."""
    array = np.random.default_rng(2).random((700, 513), np.float32)  # more than one block
    blocks = [array.tobytes()[at : at + 2**20] for at in range(0, array.nbytes, 2**20)]
    wanted = zlib.crc32(b"".join(zlib.crc32(block).to_bytes(4, "little") for block in blocks)).to_bytes(4, "little")
    on_device = jnp.asarray(array)
    copy = HostCopy.whole(array, on_device.sharding)
    arrays = {("a",): array, ("b",): on_device, ("c",): copy, ("d",): np.asfortranarray(array)}
    assert set(replica_checksums.sums_of(arrays).values()) == {wanted}
    monkeypatch.setattr(replica_checksums, "_program", lambda: jax.jit(lambda _: 1 / 0))
    monkeypatch.setattr(replica_checksums, "_is_on_accelerator", lambda one: isinstance(one, jax.Array))
    assert set(replica_checksums.sums_of(arrays).values()) == {wanted}


def test_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of less than a byte are summed on the host, whatever context the caller is in."""
    monkeypatch.setattr(replica_checksums, "_is_on_accelerator", lambda one: isinstance(one, jax.Array))
    array = values((4, 6), "float32")
    narrow = np.arange(8).astype(ml_dtypes.int4)
    with jax.transfer_guard("disallow"), jax.disable_jit():
        found = replica_checksums.sums_of({("a",): jax.device_put(array), ("b",): jax.device_put(narrow)})
    assert found["a",] == formula(array.view(np.uint32)).to_bytes(4, "little")
    wanted = zlib.crc32(zlib.crc32(narrow.tobytes()).to_bytes(4, "little"))
    assert found["b",] == wanted.to_bytes(4, "little")


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e5m2", "int4"])
def test_what_devices_can_sum(dtype: str) -> None:
    """All but what is narrower than a byte: that costs a copy to the host."""
    assert replica_checksums._has_words(jnp.zeros((), dtype).dtype) is (dtype != "int4")
