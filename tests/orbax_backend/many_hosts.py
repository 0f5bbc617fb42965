"""One process that saves as many would, with an index of several levels."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

from flax_ckpt_compat.orbax_backend import multiprocess, ocdbt_encode

from flax_ckpt_compat._core.backend import WriteOptions
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.location import Location
from tests.benchmarks import scale_play

LEAVES, HOSTS = 40, 12


def save(folder: str, compression: str | None = None, lost: str | None = None) -> str:
    """What a save raised, after a file of host 5 had been removed before the merge."""
    check = multiprocess._check_done

    def lose(path: Location, process: int, folder: Location, digest: str) -> None:
        check(path, process, folder, digest)
        if process == 5 and lost is not None:
            os.remove((folder / lost).path)

    patches = [
        mock.patch.object(ocdbt_encode, "_NODE_BYTES", 3000),
        mock.patch.object(ocdbt_encode, "_COMPRESS_FROM_BYTES", 3000),
        mock.patch.object(multiprocess, "_check_done", lose),
        mock.patch.object(scale_play, "WriteOptions", lambda: WriteOptions(compression)),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            scale_play.merge(folder, LEAVES)
        except StorageError as error:
            return f"{error} leaf={error.leaf}"
    return "saved"
