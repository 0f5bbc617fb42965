"""Checkpoints of real releases with one file lost: what was saved comes back, or an error that names what is gone."""

import json
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.errors import CheckpointError, IncompleteCheckpointError
from tests.support import corpus

# Small cases of every layout; the others differ from them in leaves only.
NAMES = (
    "flax_orbax/steps", "orbax_array/int", "orbax_array/jax_bf16", "orbax_composite/small",
    "orbax_manager/single_args", "orbax_manager/single_legacy", "orbax_mp/manager", "orbax_mp/no_ocdbt",
    "orbax_mp/ocdbt_zarr3", "orbax_prng/handler", "orbax_prng/pytree", "orbax_prng/v1",
    "orbax_pytree_default/flax_save_args", "orbax_pytree_no_ocdbt/slashkey", "orbax_pytree_no_ocdbt/plain",
    "orbax_pytree_ocdbt/slashkey", "orbax_v1/save", "orbax_v1/save_checkpointables", "orbax_v1/zarr2",
)  # fmt: skip
CASES = [case for case in corpus.cases() if case.name in NAMES]


@pytest.mark.slow
@pytest.mark.parametrize("case", corpus.parameters(CASES, oldest=False))
def test_any_file_may_be_lost(case: corpus.Case, unpacked: Path, tmp_path: Path) -> None:
    """Never other values, and no error that does not tell which file, or which directory of files, it needs."""
    directory = corpus.unpack(case.release, unpacked) / case.name
    name = json.loads((directory / "meta.json").read_text(encoding="utf-8"))["ckpts"][0]
    expected = json.loads((directory / "expected.json").read_text(encoding="utf-8"))
    path = tmp_path / name
    shutil.copytree(directory / "ckpt", tmp_path, dirs_exist_ok=True)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    for file in files:
        content = file.read_bytes()
        file.unlink()
        try:
            restored = quietly_restored(path)
        except CheckpointError as error:
            named = file.name in str(error) or (file.parent != path and file.parent.name in str(error))
            # Without one of these, a directory is taken for one of a release that wrote no such file, and lacks others.
            is_layout = file.name in ("_METADATA", "manifest.ocdbt")
            assert named or (is_layout and re.search(r"is missing|there are arrays, but no", str(error))), file
        else:
            # A directory without any file is, by contract, no checkpoint that was lost.
            assert (restored is None and len(files) == 1) or wrong(case, expected, restored) == {}, file
        file.write_bytes(content)


def test_an_array_whose_metadata_is_lost(unpacked: Path, tmp_path: Path) -> None:
    """The folder of an array item of Orbax 0.2.7 still shows what it was: its chunks are there."""
    directory = corpus.unpack("flax-0.7.0_orbax-0.2.7", unpacked) / "orbax_array" / "int"
    name = json.loads((directory / "meta.json").read_text(encoding="utf-8"))["ckpts"][0]
    shutil.copytree(directory / "ckpt", tmp_path, dirs_exist_ok=True)
    (metadata,) = (tmp_path / name).rglob(".zarray")
    metadata.unlink()
    with pytest.raises(IncompleteCheckpointError, match="zarray"):
        checkpoints.restore_checkpoint(tmp_path / name, None)


def quietly_restored(path: Path) -> Any:
    """Restores without a target. Warnings may come, and are no excuse for other values."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoints.restore_checkpoint(path, None)


def wrong(case: corpus.Case, expected: dict[str, Any], restored: Any) -> dict[str, Any]:
    """What differs from the saved values; whole items that are gone are told in the log."""
    if case.name == "orbax_v1/save_checkpointables":
        restored = restored.get("state", restored)
    got = {path: leaf for path, leaf in corpus.flatten(restored) if not path.startswith("npkey")}
    differing = {path: f"left over: {leaf!r}" for path, leaf in got.items() if path not in expected}
    for path, entry in expected.items():
        what = corpus.difference(case, path, entry, got[path], with_target=False) if path in got else "missing"
        if what:
            differing[path] = what
    return differing
