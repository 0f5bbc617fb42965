"""One process that saves as many would, with an index of several levels."""

from __future__ import annotations

from unittest import mock

from flax_ckpt_compat.orbax_backend import ocdbt_encode

from flax_ckpt_compat._core.backend import WriteOptions
from tests.benchmarks import scale_play

LEAVES, HOSTS = 40, 12


def save(folder: str, compression: str | None = None) -> None:
    """A save of many leaves, in nodes of a few kB."""
    with (
        mock.patch.object(ocdbt_encode, "_NODE_BYTES", 3000),
        mock.patch.object(ocdbt_encode, "_COMPRESS_FROM_BYTES", 3000),
        mock.patch.object(scale_play, "WriteOptions", lambda: WriteOptions(compression)),
    ):
        scale_play.merge(folder, LEAVES)
