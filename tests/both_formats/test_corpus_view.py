"""Checkpoints of real releases, opened: each leaf is announced as what it was saved as, and reads alone as it does
with all others."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, open_checkpoint
from flax_ckpt_compat._core.backend import LeafHandle
from tests.support import corpus
from tests.support.samples import fingerprint

CASES = corpus.cases()


def announced(leaf: LeafHandle) -> Any:
    """Shape and dtype that a handle shows."""
    return leaf.shape, leaf.dtype


@pytest.mark.parametrize("case", corpus.parameters(CASES, oldest=False))
def test_opened(case: corpus.Case, unpacked: Path) -> None:
    """read() is what a restore without a target gives; arrays are announced with their saved shape and dtype."""
    directory = corpus.unpack(case.release, unpacked) / case.name
    meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    expected = json.loads((directory / "expected.json").read_text(encoding="utf-8"))
    path = directory / "ckpt" / meta["ckpts"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # test_corpus.py knows which are due
        whole = checkpoints.restore_checkpoint(path, None)
        with open_checkpoint(path) as view:
            assert fingerprint(view.read()) == fingerprint(whole)
            leaves = view.leaves()
            for leaf in list(leaves.values())[::7]:
                read, value = view.read(leaf.path), whole
                for key in leaf.path:
                    # In a list the index of a leaf that is alone stays, as a key.
                    read, value = read[key], value[int(key) if isinstance(value, list) else key]
                assert fingerprint(read) == fingerprint(value)
    item = "state/" if case.name == "orbax_v1/save_checkpointables" else ""
    for name, entry in expected.items() if meta["target"] != "json" else ():
        want = corpus.expected_value(entry)
        if isinstance(want, np.ndarray):
            assert announced(leaves[item + name]) == (want.shape, want.dtype), name
        elif isinstance(want, jax.Array):
            assert announced(leaves[item + name]) == (jax.random.key_data(want).shape, np.uint32), name
