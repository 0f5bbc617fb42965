"""Checkpoints of real releases from flax 0.1.0 and orbax-checkpoint 0.1.8 on: restored, opened, with a file lost."""

import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

from flax_ckpt_compat import checkpoints, open_checkpoint
from flax_ckpt_compat.errors import CheckpointError, IncompleteCheckpointError
from tests.support import corpus
from tests.support.logs import warnings_logged
from tests.support.samples import fingerprint

COLLIDING = ("a/b.c", "a.b/c")
CASES = corpus.cases()


def restore(case: corpus.Case, path: Path, target: Any = None, *, json_item: bool = False) -> Any:
    """Restore; each warning is due.

    Due are: two leaves with one stored name, chunks of zeros that were not stored, values that the writer lost (it
    stored None), and a JSON item beside the tree.
    """
    due = set()
    if json_item:
        due.add("left out")
    if case.orbax and "collide" in case.name:
        due.add("only one value")
    elif case.name == "orbax_pytree_no_ocdbt/zarr3" and case.orbax < (0, 10, 3):
        due.add("not all chunk files")
    with warnings_logged() as logged:
        restored = checkpoints.restore_checkpoint(path, target)
    wanted = dict(corpus.flatten(target)) if target is not None else {}
    if any(value is None and wanted.get(name) is not None for name, value in corpus.flatten(restored)):
        due.add("stored None, target")
    assert {text for text in due for message in logged if text in message} == due
    assert len(logged) == len(due)
    return restored


def assert_equal(case: corpus.Case, expected: dict[str, Any], restored: Any, *, with_target: bool) -> None:
    """Asserts that all leaves and no others are there, as they were saved."""
    differing = wrong(case, expected, restored, with_target=with_target)
    if "collide" in case.name and case.orbax:
        # One value was lost when it was saved, whichever; restore warned about it.
        assert None in [differing.pop(path, None) for path in COLLIDING]
        got = dict(corpus.flatten(restored))
        assert len({got[path].tobytes() for path in COLLIDING}) == 1
    assert not differing


@pytest.mark.slow
@pytest.mark.parametrize("archive", sorted(corpus.ARCHIVES.glob("*.tar.gz")), ids=lambda archive: archive.name)
def test_all_cases_are_listed(archive: Path) -> None:
    """What is not in cases.txt would never be tested."""
    assert corpus.cases_in(archive) == [case for case in CASES if archive.name == f"{case.release}.tar.gz"]


@pytest.mark.slow
@pytest.mark.parametrize("case", corpus.parameters(CASES))
def test_without_target(case: corpus.Case, unpacked: Path) -> None:
    """Value, dtype, shape and type of every leaf are the saved ones."""
    path, expected, meta = corpus.read(case, unpacked)
    restored = restore(case, path)
    if meta["target"] == "json":
        assert restored == meta["json_item"]
        return
    if case.name == "orbax_v1/save_checkpointables":
        assert restored.keys() == {"metadata", "state"}
    if case.name == "orbax_prng/handler":
        assert restored["npkey"]["0"] == "MT19937"
    assert_equal(case, expected, restored, with_target=False)


@pytest.mark.parametrize("case", corpus.parameters(case for case in CASES if case.family != "orbax_json"))
def test_with_target(case: corpus.Case, unpacked: Path) -> None:
    """The same with a target of the saved types and other values."""
    path, expected, _ = corpus.read(case, unpacked)
    if case.name == "orbax_v1/save_checkpointables":
        path /= next(name for name in ("state", "pytree") if (path / name).is_dir())
    target: Any = {}
    for name, entry in expected.items():
        *above, last = [name] if "slashkey" in case.name else name.split("/")
        node = target
        for part in above:
            node = node.setdefault(part, {})
        node[last] = other_value(entry)
    assert_equal(case, expected, restore(case, path, target.get("", target)), with_target=True)


def other_value(entry: dict[str, Any]) -> Any:
    """Something of the type that was saved, but of another value."""
    value = corpus.expected_value(entry)
    if entry["kind"] == "jax":
        return jnp.zeros_like(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.type(0) if isinstance(value, np.generic) else np.zeros_like(value)
    return value if value is None or isinstance(value, dict) or entry["kind"] == "prng_key" else type(value)()


MANAGED = [case for case in CASES if case.family == "orbax_manager"]


@pytest.mark.parametrize("case", corpus.parameters(MANAGED))
def test_roots_and_steps_of_managers(case: corpus.Case, unpacked: Path) -> None:
    """A manager's root restores as its latest step, or the one asked for: its one tree, whatever else is saved."""
    path, expected, meta = corpus.read(case, unpacked)
    root = path.parents[1]
    has_json = (path.parent / "metadata").is_dir()
    for restored in (restore(case, root, json_item=has_json), checkpoints.restore_checkpoint(root, None, meta["step"])):
        assert_equal(case, expected, restored, with_target=False)
    if has_json:
        assert checkpoints.restore_checkpoint(path.parent / "metadata", None) == meta["json_item"]
    older = [int(step.name.rpartition("_")[2]) for step in root.iterdir() if step.name[-1:].isdigit()]
    assert len(older) > 1
    for step in set(older) - {meta["step"]}:
        assert checkpoints.restore_checkpoint(root, None, step)["n"] != expected["n"]["value"]


TRAIN_STATES = [case for case in CASES if case.name.endswith("train_state")]


@pytest.mark.parametrize("case", corpus.parameters(TRAIN_STATES))
def test_train_states(case: corpus.Case, unpacked: Path) -> None:
    """A real TrainState with optax' own states is rebuilt from the files of every release."""
    path, expected, _ = corpus.read(case, unpacked)
    saved = {name: corpus.expected_value(expected[f"params/Dense_0/{name}"]) for name in ("bias", "kernel")}
    zeros = {"Dense_0": jax.tree.map(jnp.zeros_like, saved)}
    target = TrainState.create(apply_fn=None, params=zeros, tx=optax.adamw(1e-3))
    restored = restore(case, path, target)
    assert type(restored) is TrainState and jax.tree.structure(restored) == jax.tree.structure(target)
    stored = serialization.to_state_dict(restored)
    wrong = {name: corpus.difference(case, name, expected[name], leaf, with_target=True)
             for name, leaf in corpus.flatten(stored)}  # fmt: skip
    assert wrong.keys() == expected.keys() and not any(wrong.values())


@pytest.mark.parametrize("case", corpus.parameters(CASES, oldest=False))
def test_opened(case: corpus.Case, unpacked: Path) -> None:
    """read() is what a restore without a target gives; arrays are announced with their saved shape and dtype."""
    path, expected, meta = corpus.read(case, unpacked)
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
        if isinstance(want, jax.Array):
            want = np.asarray(jax.random.key_data(want))
        if isinstance(want, np.ndarray):
            assert (leaves[item + name].shape, leaves[item + name].dtype) == (want.shape, want.dtype), name


# Small cases of every layout; the others differ from them in leaves only.
NAMES = (
    "flax_orbax/steps", "orbax_array/int", "orbax_array/jax_bf16", "orbax_composite/small",
    "orbax_manager/single_args", "orbax_manager/single_legacy", "orbax_mp/manager", "orbax_mp/no_ocdbt",
    "orbax_mp/ocdbt_zarr3", "orbax_prng/handler", "orbax_prng/pytree", "orbax_prng/v1",
    "orbax_pytree_default/flax_save_args", "orbax_pytree_no_ocdbt/slashkey", "orbax_pytree_no_ocdbt/plain",
    "orbax_pytree_ocdbt/slashkey", "orbax_v1/save", "orbax_v1/save_checkpointables", "orbax_v1/zarr2",
)  # fmt: skip
LOSSES = [case for case in corpus.cases() if case.name in NAMES]


def copied(case: corpus.Case, unpacked: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The path of a copy of a case in a folder, and what was saved there."""
    path, expected, meta = corpus.read(case, unpacked)
    name = meta["ckpts"][0]
    shutil.copytree(Path(str(path).removesuffix(name)), folder, dirs_exist_ok=True)
    return folder / name, expected


@pytest.mark.slow
@pytest.mark.parametrize("case", corpus.parameters(LOSSES, oldest=False))
def test_any_file_may_be_lost(case: corpus.Case, unpacked: Path, tmp_path: Path) -> None:
    """Never other values, and no error that does not tell which file, or which directory of files, it needs."""
    path, expected = copied(case, unpacked, tmp_path)
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
    path, _ = copied(corpus.Case("flax-0.7.0_orbax-0.2.7", "orbax_array/int"), unpacked, tmp_path)
    (metadata,) = path.rglob(".zarray")
    metadata.unlink()
    with pytest.raises(IncompleteCheckpointError, match="zarray"):
        checkpoints.restore_checkpoint(path, None)


def quietly_restored(path: Path) -> Any:
    """Restores without a target. Warnings may come, and are no excuse for other values."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoints.restore_checkpoint(path, None)


def wrong(case: corpus.Case, expected: dict[str, Any], restored: Any, *, with_target: bool = False) -> dict[str, Any]:
    """What differs from the saved values; whole items that are gone are told in the log."""
    if case.name == "orbax_v1/save_checkpointables" and not with_target:
        restored = restored.get("state", restored)
    got = {path: leaf for path, leaf in corpus.flatten(restored) if not path.startswith("npkey")}
    differing = {path: f"left over: {leaf!r}" for path, leaf in got.items() if path not in expected}
    for path, entry in expected.items():
        what = corpus.difference(case, path, entry, got[path], with_target=with_target) if path in got else "missing"
        if what:
            differing[path] = what
    return differing
