"""Checkpoints of real releases from flax 0.1.0 and orbax-checkpoint 0.1.8 on: each restores to what was saved."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

from flax_ckpt_compat import checkpoints
from tests.support import corpus
from tests.support.logs import warnings_logged

COLLIDING = ("a/b.c", "a.b/c")
CASES = corpus.cases()


def read_case(case: corpus.Case, unpacked: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The path to restore, the expected entries, and what is known about the case."""
    directory = corpus.unpack(case.release, unpacked) / case.name
    meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    expected = json.loads((directory / "expected.json").read_text(encoding="utf-8"))
    return directory / "ckpt" / meta["ckpts"][0], expected, meta


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
    got = dict(corpus.flatten(restored))
    assert got.keys() == expected.keys()
    wrong = {path: corpus.difference(case, path, entry, got[path], with_target=with_target)
             for path, entry in expected.items()}  # fmt: skip
    if "collide" in case.name and case.orbax:
        # One value was lost when it was saved, whichever; restore warned about it.
        assert None in [wrong.pop(path) for path in COLLIDING]
        assert len({got[path].tobytes() for path in COLLIDING}) == 1
    assert not {path: what for path, what in wrong.items() if what}


@pytest.mark.slow
@pytest.mark.parametrize("archive", sorted(corpus.ARCHIVES.glob("*.tar.gz")), ids=lambda archive: archive.name)
def test_all_cases_are_listed(archive: Path) -> None:
    """What is not in cases.txt would never be tested."""
    assert corpus.cases_in(archive) == [case for case in CASES if archive.name == f"{case.release}.tar.gz"]


@pytest.mark.slow
@pytest.mark.parametrize("case", corpus.parameters(CASES))
def test_without_target(case: corpus.Case, unpacked: Path) -> None:
    """Value, dtype, shape and type of every leaf are the saved ones."""
    path, expected, meta = read_case(case, unpacked)
    restored = restore(case, path)
    if meta["target"] == "json":
        assert restored == meta["json_item"]
        return
    if case.name == "orbax_v1/save_checkpointables":
        assert restored.keys() == {"metadata", "state"}
        restored = restored["state"]
    if case.name == "orbax_prng/handler":
        assert restored.pop("npkey")["0"] == "MT19937"
    assert_equal(case, expected, restored, with_target=False)


@pytest.mark.parametrize("case", corpus.parameters(case for case in CASES if case.family != "orbax_json"))
def test_with_target(case: corpus.Case, unpacked: Path) -> None:
    """The same with a target of the saved types and other values."""
    path, expected, _ = read_case(case, unpacked)
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
    path, expected, meta = read_case(case, unpacked)
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
    path, expected, _ = read_case(case, unpacked)
    saved = {name: corpus.expected_value(expected[f"params/Dense_0/{name}"]) for name in ("bias", "kernel")}
    zeros = {"Dense_0": jax.tree.map(jnp.zeros_like, saved)}
    target = TrainState.create(apply_fn=None, params=zeros, tx=optax.adamw(1e-3))
    restored = restore(case, path, target)
    assert type(restored) is TrainState and jax.tree.structure(restored) == jax.tree.structure(target)
    stored = serialization.to_state_dict(restored)
    wrong = {name: corpus.difference(case, name, expected[name], leaf, with_target=True)
             for name, leaf in corpus.flatten(stored)}  # fmt: skip
    assert wrong.keys() == expected.keys() and not any(wrong.values())
