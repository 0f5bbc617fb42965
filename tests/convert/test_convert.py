"""convert(): what real Flax and real Orbax read of the results, and what it keeps, refuses and reports.

And conversions that are killed at any time, and resumed."""

import filecmp
import functools
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import stat
import time
import tracemalloc
import types
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import create_autospec

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax.training import checkpoints as flax_checkpoints
from flax.training.train_state import TrainState
from flax_ckpt_compat.orbax_backend.reader import OrbaxReader

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors, rules
from flax_ckpt_compat._core.local import atomic, temporaries
from tests.both_formats.test_corpus import assert_equal
from tests.support import corpus
from tests.support.interpreters import start_python
from tests.support.layouts import assert_same
from tests.support.peers import needs
from tests.support.peers import ocp_released_v1 as v1
from tests.support.saves import names, save_items
from tests.support.trees import fingerprint

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


class Fields(NamedTuple):
    """Fields that are not in the order of the alphabet."""

    second: Any
    first: Any


def state(n: int = 0) -> TrainState:
    """A training state with an optimizer of nested tuples, whose values depend on n."""
    params = {"Dense_0": {"kernel": jnp.full((3, 4), n, jnp.float32), "bias": jnp.arange(4, dtype=jnp.bfloat16) + n}}
    return TrainState.create(apply_fn=print, params=params, tx=TX).replace(step=n)


def flax_run(directory: Path, *steps: int, use_orbax: bool = False) -> None:
    """Steps as real Flax saves them."""
    flax.config.update("flax_use_orbax_checkpointing", use_orbax)
    with nullcontext() if use_orbax else pytest.warns(DeprecationWarning):
        for step in steps:
            flax_checkpoints.save_checkpoint(directory.absolute(), state(step), step, keep=99)


def identities(directory: Path) -> dict[Path, tuple[int, ...]]:
    """Everything in a directory, with what a change of it would change."""
    found = {path: path.stat() for path in directory.rglob("*")}
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in found.items()}


def with_shardings(tree: Any) -> Any:
    """The abstract tree with shardings, as Orbax's documentation asks for it."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) if hasattr(leaf, "shape") else leaf
        ),
        tree,
    )


@pytest.mark.filterwarnings("ignore:Couldn't find sharding info")  # of older releases
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("use_orbax", [False, True])
def test_orbax_directories_restore_in_every_real_reader(tmp_path: Path, use_orbax: bool) -> None:
    """StandardCheckpointer, PyTreeCheckpointer, v1 and real Flax restore the state that Flax saved."""
    flax_run(tmp_path / "src", 3, use_orbax=use_orbax)
    (done,) = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax")
    result = tmp_path / "dst" / "checkpoint_3"
    assert (done.destination, done.status) == (str(result), "converted")
    assert [note for note in done.notes if "opt_state, opt_state/1" in note] == ([] if use_orbax else list(done.notes))
    expected = state(3)
    template = jax.tree.map(jnp.zeros_like, expected)
    assert_same(ocp.StandardCheckpointer().restore(result, expected), expected)
    assert_same(ocp.StandardCheckpointer().restore(result, with_shardings(expected)), expected)
    assert_same(ocp.PyTreeCheckpointer().restore(result, item=expected), expected)
    assert_same(v1.load(result, with_shardings(expected)), expected)
    assert_same(flax_checkpoints.restore_checkpoint(tmp_path / "dst", template.replace(step=0)), expected)


def test_manager_steps_restore_with_defaults(tmp_path: Path) -> None:
    """A real CheckpointManager lists the steps, finds the latest, and restores them with and without a target."""
    flax_run(tmp_path / "src", 1, 20)
    flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "manager")
    expected = state(20)
    with ocp.CheckpointManager(tmp_path / "dst") as manager:
        assert manager.all_steps() == [1, 20]
        assert manager.latest_step() == 20
        assert_same(manager.restore(20, args=ocp.args.StandardRestore(expected)), expected)
        restored = manager.restore(20)  # without a target, in the stored containers
        assert_same(restored["opt_state"][1][0]["mu"], expected.opt_state[1][0].mu)
        assert manager.save(21, args=ocp.args.StandardSave(state(21)))  # training goes on
    for arguments in (
        *(ocp.args.StandardRestore(target) for target in (None, with_shardings(expected))),
        *(ocp.args.PyTreeRestore(target) for target in (None, expected)),
    ):
        with ocp.CheckpointManager(tmp_path / "dst") as manager:
            assert manager.all_steps() == [1, 20, 21]
            restored = manager.restore(20, args=arguments)
            assert_same(restored["params"] if isinstance(restored, dict) else restored.params, expected.params)


def test_v1_steps_restore_with_defaults(tmp_path: Path) -> None:
    """A real v1 Checkpointer lists the steps, loads the latest and a named one, and goes on."""
    flax_run(tmp_path / "src", 1, 20)
    flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "v1")
    expected = state(20)
    with v1.training.Checkpointer(tmp_path / "dst") as checkpointer:
        assert [found.step for found in checkpointer.checkpoints] == [1, 20]
        assert_same(checkpointer.load(1)["params"], state(1).params)
        assert_same(checkpointer.load(abstract_state=with_shardings(expected)), expected)
        assert checkpointer.save(21, state(21))
    step = tmp_path / "dst" / "20"
    assert_same(v1.load_checkpointables(step)["state"]["params"], expected.params)
    assert v1.metadata(step).metadata["params"]["Dense_0"]["kernel"].shape == (3, 4)


@needs("safetensors", 0, 8, 0, why="knows fewer dtypes")
def test_safetensors_hold_arrays_and_numpy_scalars_and_note_the_rest(tmp_path: Path) -> None:
    """Real safetensors knows each dtype, shape and the bytes; what other programs do not see is named."""
    dtypes = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64"}
    dtypes |= {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float32": "F32", "int8": "I8"}
    arrays = {dtype: np.arange(1, 7).reshape(2, 3).astype(dtype) for dtype in dtypes} | {"int16": np.ones((0, 3), "i2")}
    scalars = {"scale": np.float32(2.5), "count": np.int8(3)}
    rest = {"lr": 0.5, "step": 7, "name": "run", "none": None}
    flax_ckpt_compat.save(tmp_path / "src", {"of": {"a": arrays | scalars}, **rest}, format="orbax")
    (done,) = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "safetensors")
    found = dict(safetensors.deserialize((tmp_path / "dst").read_bytes()))
    names = {**dtypes, "int16": "I16", "scale": "F32", "count": "I8"}
    assert found == {
        f"of.a.{name}": {"dtype": names[name], "shape": list(np.shape(array)), "data": bytearray(array.tobytes())}
        for name, array in (arrays | scalars).items()
    }
    (note,) = done.notes
    assert all(name in note for name in rest) and "scale" not in note
    assert "kept as JSON in the file's header" in note


LACKING = (2j, b"b", np.ones(2, np.complex128), np.ones(2, ml_dtypes.int4), jax.random.key(0))


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        *(({"x": {"y": leaf}}, "a safetensors file cannot hold x/y") for leaf in LACKING),
        ({"__metadata__": np.ones(2)}, r"NameCollisionError.*__metadata__"),  # the place of the header's free text
    ],
    ids=str,
)
def test_safetensors_refuse_what_they_cannot_hold(tmp_path: Path, tree: Any, why: str) -> None:
    """The error names the leaf, and nothing is written."""
    flax_ckpt_compat.save(tmp_path / "src" / "a", tree, format="orbax")
    with pytest.raises(errors.ConversionError, match=why):
        flax_ckpt_compat.convert(tmp_path / "src" / "a", tmp_path / "dst", "safetensors")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("dry_run", [False, True])
def test_each_failure_is_told(tmp_path: Path, dry_run: bool) -> None:
    """Of a damaged source, and of an unfinished one; a dry run opens them, too, and writes nothing."""
    flax_run(tmp_path / "src", 1)
    for step, content in ((2, b"\x81"), (3, b"")):
        (tmp_path / "src" / f"checkpoint_{step}").write_bytes(content)
    told = r"(?s)2 of 3 .*checkpoint_2.*checkpoint_3 .*the file is empty"
    with pytest.raises(errors.ConversionError, match=told) as caught:
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax", dry_run=dry_run)
    statuses = [result.status for result in caught.value.conversions]
    assert statuses == ["planned" if dry_run else "converted", "failed", "failed"]
    assert names(tmp_path / "dst") == ([] if dry_run else ["checkpoint_1"])


def test_there_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    """msgpack → orbax → msgpack gives byte-identical files, whatever the order of keys and the kinds of leaves."""
    trees: dict[str, Any] = {
        "checkpoint_1": state(1),
        "checkpoint_2": {"z": 1, "a": {"10": 1.5, "2": None, "b": {}}, "m": {"0": {}, "1": (), "2": [1, 2, [3]]}},
        "checkpoint_3": {
            "leaves": [True, -0.0, float("nan"), 2**63, "é", b"\0", 1 - 2j, np.float32(3), np.zeros((0, 2)), None],
            "arrays": {str(dtype): np.ones((2, 1), dtype) for dtype in ("?", "u1", "<f2", "<c16", ml_dtypes.bfloat16)},
            "wide": {str(n): n for n in (0, 1, 10, 2)},
        },
        "checkpoint_4": np.arange(3),
        "checkpoint_5": {},
        "checkpoint_6": {"rng": jax.random.key(7), "big": np.arange(2**18, dtype=np.float32)},
    }
    for name, tree in trees.items():
        flax_ckpt_compat.save(tmp_path / "src" / name, tree, format="msgpack")
    flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "orbax", "orbax")
    flax_ckpt_compat.convert(tmp_path / "orbax", tmp_path / "back", "msgpack")
    assert filecmp.cmpfiles(tmp_path / "src", tmp_path / "back", trees, shallow=False) == (list(trees), [], [])


@needs("orbax-checkpoint", 0, 11, 0, why="has no metadata of a user's own")
def test_a_tree_of_runs_keeps_its_places(tmp_path: Path) -> None:
    """All checkpoints below are converted, of both formats, to the same places; the source stays as it was."""
    flax_run(tmp_path / "src" / "a", 1, 2)
    flax_run(tmp_path / "src" / "b" / "deep", 7, use_orbax=True)
    with ocp.CheckpointManager(tmp_path / "src" / "c", metadata={"run": "c"}) as manager:
        manager.save(5, args=ocp.args.StandardSave(state(5)))
    before = identities(tmp_path / "src")
    done = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "msgpack", target=state())
    assert identities(tmp_path / "src") == before
    places = ["a/checkpoint_1", "a/checkpoint_2", "b/deep/checkpoint_7", "c/checkpoint_5"]
    assert [result.destination for result in done] == [str(tmp_path / "dst" / place) for place in places]
    for place, step in zip(places, (1, 2, 7, 5), strict=True):
        flax.config.update("flax_use_orbax_checkpointing", False)
        assert_same(flax_checkpoints.restore_checkpoint(tmp_path / "dst" / place, state()), state(step))
    (done, *_) = reversed(flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "guessed", "msgpack"))
    assert "optax.EmptyState, which real Flax expects as a dict; give a target: opt_state/0, opt_state/1/1" in str(done)
    flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "managed", "manager")
    with ocp.CheckpointManager(tmp_path / "managed" / "c") as manager:
        assert manager.all_steps() == [5]
        assert manager.metadata().custom_metadata == {"run": "c"}
    again = flax_ckpt_compat.convert(tmp_path / "src" / "c", tmp_path / "managed" / "c", "manager", resume=True)
    assert [result.status for result in again] == ["kept"]


def test_what_exists_is_refused_or_compared(tmp_path: Path) -> None:
    """Nothing is replaced; to resume keeps a result that equals its source, and refuses other values or formats."""
    flax_run(tmp_path / "src", 1, 2)
    flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax", step=1)
    with pytest.raises(errors.ConversionError, match=r"1 of 2 .*\n.*checkpoint_1 exists, and nothing is replaced"):
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax")
    done = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax", resume=True)
    assert [result.status for result in done] == ["kept", "kept"]
    flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "file", "msgpack")
    other: Any = (("dst", "msgpack"), ("file", "orbax"))  # who needs the format could not open them
    for (there, to), dry_run in itertools.product(other, (False, True)):
        with pytest.raises(errors.ConversionError, match="so not of"):
            flax_ckpt_compat.convert(tmp_path / "src", tmp_path / there, to, resume=True, dry_run=dry_run)
    flax_ckpt_compat.save(tmp_path / "src" / "checkpoint_2", state(3), format="msgpack", overwrite=True)
    with pytest.raises(errors.ConversionError, match="params/Dense_0/kernel has other values") as caught:
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax", resume=True)
    assert [result.status for result in caught.value.conversions] == ["kept", "failed"]


@needs("orbax-checkpoint", 0, 11, 0, why="has no metadata of a user's own")
@pytest.mark.parametrize("to", ["orbax", "manager"])
def test_to_resume_compares_custom_metadata(tmp_path: Path, to: str) -> None:
    """A result with the metadata of an older source is refused; NaN is equal to itself."""
    metadata: dict[str, Any] = {"by": "me", "loss": float("nan")}
    for by in ("me", "you"):
        shutil.rmtree(tmp_path / "src", ignore_errors=True)
        with ocp.CheckpointManager(tmp_path / "src") as manager:
            manager.save(1, args=ocp.args.PyTreeSave({"a": np.ones(2)}), custom_metadata={**metadata, "by": by})
        if by == "me":
            flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", to)
            (kept,) = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", to, resume=True)
            assert kept.status == "kept"
    with pytest.raises(errors.ConversionError, match="custom metadata is other JSON"):
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", to, resume=True)


def test_a_target_gives_the_containers(tmp_path: Path) -> None:
    """With the state as target there is no guess: a dict of '0' and '1' stays one, and a tuple is one."""
    tree = {"layers": {"0": np.ones(2), "1": np.zeros(2)}, "pair": (np.ones(1), np.zeros(1))}
    flax_ckpt_compat.save(tmp_path / "a", tree, format="msgpack")
    (done,) = flax_ckpt_compat.convert(tmp_path / "a", tmp_path / "b", "orbax", target=tree)
    assert done.notes == ()
    assert_same(flax_ckpt_compat.restore(tmp_path / "b"), tree)
    assert_same(ocp.StandardCheckpointer().restore(tmp_path / "b", tree), tree)
    fields = {"fields": Fields(np.ones(2), np.zeros(1))}
    flax_ckpt_compat.save(tmp_path / "sorted", {"fields": fields["fields"]._asdict()}, format="orbax")
    flax_ckpt_compat.convert(tmp_path / "sorted", tmp_path / "ours", "orbax", target=fields)
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", fields)
    ours, theirs = (json.loads((tmp_path / one / "_METADATA").read_text()) for one in ("ours", "theirs"))
    assert list(ours["tree_metadata"]) == list(theirs["tree_metadata"])
    other = {"layers": {"0": np.ones(2)}, "pair": (np.ones(1), np.zeros(1)), "more": 1}
    with pytest.raises(errors.ConversionError, match="not in the checkpoint: more; not in the target: layers/1"):
        flax_ckpt_compat.convert(tmp_path / "a", tmp_path / "c", "orbax", target=other)


@pytest.mark.slow
def test_small_arrays_are_read_together_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is read alone, however many there are, and of all trees together a few MiB are in memory."""
    sizes = {"a": 140, "b": 120, "c": 120, "d": 120}  # numbers of 250 KiB
    trees = {name: {f"{n:03}": np.full(250 << 10, n, np.uint8) for n in range(size)} for name, size in sizes.items()}
    save_items(tmp_path / "src", 1, **trees)
    read = create_autospec(OrbaxReader.read, side_effect=OrbaxReader.read)
    monkeypatch.setattr(OrbaxReader, "read", read)
    tracemalloc.start()
    try:
        flax_ckpt_compat.convert(tmp_path / "src" / "1", tmp_path / "dst", "manager")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80 << 20
    assert min(len(call.args[1]) for call in read.call_args_list) > 1
    assert_same(flax_ckpt_compat.restore(tmp_path / "dst" / "1"), trees)


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_one_stored_leaf_for_two(tmp_path: Path, wrong: str) -> None:
    """As of tied weights: each of the two is compared."""
    values = np.arange(5.0)
    source = flax_ckpt_compat.save(tmp_path / "src", {"a": values}, format="msgpack")
    flax_ckpt_compat.save(tmp_path / "out", {"a": values, "b": values, wrong: values + 1}, format="msgpack")
    target, given = {"a": values, "b": values}, {"b": flax_ckpt_compat.Transform(original_key="a")}
    with pytest.raises(errors.ConversionError, match=f"{wrong} has other values"):
        flax_ckpt_compat.convert(source, tmp_path / "out", "msgpack", target=target, transforms=given, resume=True)


@pytest.mark.parametrize("to", ["orbax", "msgpack", "safetensors"])
def test_transforms_give_what_restore_gives(tmp_path: Path, to: str) -> None:
    """With rules the result is what restore() returns with them: renamed, stacked and cast leaves."""
    tree = {"old": {f"layer_{n}": {"w": np.full((2, 3), n, np.float32)} for n in range(3)}, "gone": np.ones(1)}
    np.ones(4).tofile(tmp_path / "kept")
    target = {"new": {"layers": {"w": np.zeros((3, 2, 3), np.float16)}}, "kept": np.memmap(tmp_path / "kept", float)}
    flax_ckpt_compat.save(tmp_path / "a", tree, format="msgpack")
    how = [rules.rename("old", "new"), rules.stack(r"layer_(\d+)", "layers"), rules.cast("w", "float16")]
    how += [rules.from_target("kept")]
    expected = flax_ckpt_compat.restore(tmp_path / "a", target, transforms=how) | {"kept": np.ones(4)}
    assert expected["new"]["layers"]["w"].dtype == np.float16
    for kept in ({1}, np.ma.masked_array([1.0, 2.0], [False, True])):
        other = {**target, "kept": kept}
        with pytest.raises(errors.ConversionError, match=r"UnsupportedLeafError.* kept"):
            flax_ckpt_compat.convert(tmp_path / "a", tmp_path / "b", to, target=other, transforms=how)
    (done,) = flax_ckpt_compat.convert(tmp_path / "a", tmp_path / "b", to, target=target, transforms=how)
    assert "gone" in "".join(done.notes)
    if to == "safetensors":
        named = {"new.layers.w": expected["new"]["layers"]["w"], "kept": np.ones(4)}
        assert_same(safetensors.numpy.load_file(tmp_path / "b"), named)
    else:
        assert_same(flax_ckpt_compat.restore(tmp_path / "b"), expected)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("empty", "dst", "orbax"), errors.CheckpointNotFoundError),
        (("src", "link", "orbax"), errors.ArgumentError),
        (("src", "link/inside", "orbax"), errors.ArgumentError),
        (("link", "src/inside", "orbax"), errors.ArgumentError),
        (("src/checkpoint_1", "link/checkpoint_1", "orbax"), errors.ArgumentError),
    ],
)
def test_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    """Wrong arguments are named errors."""
    monkeypatch.chdir(tmp_path)
    flax_ckpt_compat.save("src/checkpoint_1", {"a": 1}, format="msgpack")
    Path("empty").mkdir()
    Path("link").symlink_to("src")
    with pytest.raises(error):
        flax_ckpt_compat.convert(*arguments)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoint_1", "empty", "link", "src"]


@pytest.mark.parametrize(
    ("step", "chosen"),
    [
        ([1.0, "3"], ["checkpoint_1", "checkpoint_3"]),
        (1.5, ["v1.5"]),  # step 1.5 of v, and 5 of v1
        (5, ["v1.5"]),
        (7, ["a_7.0"]),
        ("7.0", ["a_7.0"]),
        (9, r"no step 9 .*7.0, 1, 3, 5"),
        ([], "empty list"),
    ],
    ids=str,
)
def test_steps_choose(tmp_path: Path, step: Any, chosen: Any) -> None:
    """By their numbers, which are compared as numbers, or the end of a name."""
    for name in ("checkpoint_1", "checkpoint_3", "a_7.0", "v1.5"):
        flax_ckpt_compat.save(tmp_path / "src" / name, {"a": 1}, format="msgpack")
    convert = functools.partial(flax_ckpt_compat.convert, tmp_path / "src", tmp_path / "dst", "orbax", step=step)
    if isinstance(chosen, str):
        with pytest.raises((errors.CheckpointNotFoundError, errors.SettingError), match=chosen):
            convert()
    else:
        assert [Path(result.source).name for result in convert()] == chosen


STEPS = {"checkpoint_1": 1, "ckpt-10": 10, "v1.11": 11, "2024-05-01_2": 2, "exp3e_3": 3, "a_7.0": 7, "12": 12}
TWICE = ("checkpoint_8", "other_8")
NO_STEPS = ("pi0", "2024-05-01", "v1json2", "run-2024-05-01", "epoch10", "run_2024_05_01", "12-30")


def test_names_with_a_step_and_without(tmp_path: Path) -> None:
    """A dash is no sign, digits of a prefix are no part of a step, and models and dates are none; the advice works.

    Steps that are no whole number, and two for one place, are refused."""
    for name in (*STEPS, *NO_STEPS, "checkpoint_0.5", *TWICE):
        flax_ckpt_compat.save(tmp_path / "src" / name, {"a": 1}, format="msgpack")
    with pytest.raises(errors.ConversionError) as caught:
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "manager")
    for done in caught.value.conversions:
        name = Path(done.source).name
        if name in STEPS:
            assert (done.status, Path(done.destination).name) == ("converted", str(STEPS[name])), name
        elif name == "checkpoint_0.5" or name in TWICE:
            why = "would be converted to" if name in TWICE else "checkpoint_0.5: its step is 0.5"
            assert re.match(f"ArgumentError: .*{why}", str(done.error)), name
        else:
            assert "its name has no step" in str(done.error) and "(step=5, --step 5)" in str(done.error), name
    one = tmp_path / "src" / "pi0"
    with pytest.raises(errors.ConversionError, match="its name has no step"):
        flax_ckpt_compat.convert(one, tmp_path / "one", "manager")
    for step in ("best", [5, 6]):
        with pytest.raises(errors.ArgumentError, match="is one checkpoint, so step is the number"):
            flax_ckpt_compat.convert(one, tmp_path / "one", "manager", step=step)
    flax_ckpt_compat.convert(one, tmp_path / "one", "manager", step=5)
    with ocp.CheckpointManager(tmp_path / "one") as manager:
        assert manager.all_steps() == [5]


def _processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


@pytest.mark.parametrize(
    "make",
    [lambda: ThreadPoolExecutor(3), pytest.param(_processes, marks=pytest.mark.slow)],
    ids=["threads", "processes"],
)
def test_any_executor_runs_it(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Results come in the order of the sources, and failures of one checkpoint do not stop the others."""
    for step in range(6):
        flax_ckpt_compat.save(tmp_path / "src", {"a": np.full(3, step)}, step=step, format="msgpack")
    (tmp_path / "src" / "checkpoint_3").write_bytes(b"\x81\xa1a")
    with make() as executor, pytest.raises(errors.ConversionError, match="1 of 6") as caught:
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax", executor=executor)
    statuses = [result.status for result in caught.value.conversions]
    assert statuses == ["converted"] * 3 + ["failed"] + ["converted"] * 2
    assert (flax_ckpt_compat.restore(tmp_path / "dst", step=5)["a"] == 5).all()


def test_progress(tmp_path: Path) -> None:
    """The callback takes each result when it is on the disk; what it raises ends the conversion."""
    for step in range(3):
        flax_ckpt_compat.save(tmp_path / "src", {"a": step}, step=step, format="msgpack")
    (tmp_path / "src" / "checkpoint_0").write_bytes(b"\x81\xa1a")
    seen: list[tuple[str, int]] = []

    def progress(result: flax_ckpt_compat.Conversion) -> None:
        seen.append((result.status, len(list((tmp_path / "dst").glob("checkpoint_*")))))
        if len(seen) >= 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax", progress=progress)
    assert seen == [("failed", 0), ("converted", 1)]
    assert not (tmp_path / "dst" / "checkpoint_2").exists()
    jobs = [Future[Any]() for _ in range(3)]
    jobs[0].set_exception(OSError("the worker died"))
    waiting = iter(jobs)
    executor: Any = types.SimpleNamespace(submit=lambda *_: next(waiting))
    with pytest.raises(InterruptedError):
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "orbax", executor=executor, progress=progress)
    assert [job.cancelled() for job in jobs] == [False, True, True]


def flipped(file: Path) -> None:
    """Changes the last bit of a file."""
    file.write_bytes(file.read_bytes()[:-1] + b"\1")


def of_other_dtype(file: Path) -> None:
    """Writes the same bytes with another dtype."""
    tree = flax.serialization.msgpack_restore(file.read_bytes())
    file.write_bytes(flax.serialization.to_bytes({**tree, "w": tree["w"].view(np.int32)}))


def saved_again(folder: str, n: int = 2) -> Callable[[Any], Any]:
    """Another process saves the step, of which a number is read at once, and the array again."""
    tree = {"n": n, "v": np.zeros(10), "w": np.zeros(100_000, np.float32)}
    return lambda _: flax_ckpt_compat.save(folder, tree, step=1, format="orbax", overwrite=True)


@pytest.mark.parametrize(
    ("after", "act", "error"),
    [
        ("write", flipped, "dst/checkpoint_1 does not hold .*: w has other values"),
        ("write", of_other_dtype, "w is int32.*, expected float32"),
        ("write", saved_again("src"), "was replaced while it was read"),
        ("compare", saved_again("src"), "was replaced while it was read"),
        ("compare", saved_again("dst"), "another process has saved a checkpoint of this name meanwhile"),
    ],
)
def test_what_changes_meanwhile(
    after: str, act: Callable[[Any], Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was written, of the source, or of the destination: nothing gets the name, and what has it stays."""
    from flax_ckpt_compat._convert import write_output

    monkeypatch.chdir(tmp_path)
    saved_again("src", 1)(None)
    real = getattr(write_output, after)

    def then_act(first: Any, *arguments: Any) -> None:
        real(first, *arguments)
        act(Path(str(first)))

    monkeypatch.setattr(write_output, after, then_act)
    with pytest.raises(errors.ConversionError, match=rf"(?s)1 of 1.*{error}"):
        flax_ckpt_compat.convert("src", "dst", "msgpack")
    left = [path.name for path in Path("dst").iterdir()]
    assert left == (["checkpoint_1"] if "another process" in error else [])
    assert not left or flax_ckpt_compat.restore("dst")["n"] == 2


def test_the_only_tree_beside_json_keeps_its_name(tmp_path: Path) -> None:
    """A program that restores its items by name does so from a converted manager; JSON is compared as arrays are."""
    save_items(tmp_path / "src", 5, state={"a": np.ones(2)}, notes=ocp.args.JsonSave({"n": 1}))
    flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "manager")
    with ocp.CheckpointManager(tmp_path / "dst") as manager:
        wanted = ocp.args.Composite(state=ocp.args.PyTreeRestore(), notes=ocp.args.JsonRestore())
        restored = manager.restore(5, args=wanted)
    assert (restored["state"]["a"].tolist(), restored["notes"]) == ([1, 1], {"n": 1})
    (kept,) = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "manager", resume=True)
    assert kept.status == "kept"
    (file,) = (tmp_path / "src" / "5" / "notes").glob("metadata*")
    for text, error in ((b'{"n": 2}', "notes/metadata has other bytes"), (b'{"n"', "CorruptCheckpointError")):
        file.write_bytes(text)
        with pytest.raises(errors.ConversionError, match=error):
            flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", "manager", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["orbax", "msgpack", "manager", "v1", "safetensors"])
@pytest.mark.parametrize("kind", ["ocdbt", "folders", "zarr3"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: bytes(len(data)), None])
def test_a_damaged_source_is_named(tmp_path: Path, to: Any, kind: str, damage: Callable[[bytes], bytes] | None) -> None:
    """The error is about the source and its leaf, and not about the place of the result."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=kind == "ocdbt", use_zarr3=kind == "zarr3")
    with ocp.Checkpointer(handler) as checkpointer:
        values = np.random.default_rng(0).normal(size=(200, 200))
        checkpointer.save(tmp_path / "src" / "1", args=ocp.args.PyTreeSave({"a": {"b": values}}))
    file = max((one for one in (tmp_path / "src").rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
    with pytest.raises(errors.ConversionError) as caught:
        flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", to)
    (result,) = caught.value.conversions
    assert str(result.error).startswith(("CorruptCheckpointError: ", "ChecksumError: "))
    assert result.source in str(result.error) and "a.b" in str(result.error).replace("a/b", "a.b")
    assert "dst" not in str(result.error) and "check the disk" not in str(result.error)
    assert not list((tmp_path / "dst").glob("*"))


@needs("orbax-checkpoint", 0, 11, 0, why="has no metadata of a user's own")
@pytest.mark.parametrize("source", ["tree", "key"])
@pytest.mark.parametrize("to", ["orbax", "manager", "v1", "msgpack", "safetensors"])
def test_each_conversion_locks_and_syncs_what_it_writes(
    source: str, to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in another container tells by its lock that its writer is alive; a power loss takes no names of it."""
    synced, fsync, seen, publish = dict[int, list[str]](), os.fsync, list[bool](), atomic.publish

    def syncing(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            synced[status.st_ino] = sorted(os.listdir(descriptor))
        fsync(descriptor)

    def publishing(temporary: str, final: str, *, new: bool = False) -> None:
        match = temporaries.parse(os.path.basename(temporary))
        seen.append(match is not None and temporaries.writer_of(match, temporary) == "alive")
        publish(temporary, final, new=new)

    tree = ocp.args.StandardSave({"a": np.ones(300_000)})
    items = ocp.args.Composite(item=tree if source == "tree" else ocp.args.ArraySave(np.ones(3)))
    with ocp.CheckpointManager(tmp_path / "src") as manager:
        manager.save(3, args=items, custom_metadata={"lr": 0.1})
    temporaries._forget_all()
    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(atomic, "publish", publishing)
    try:
        (result,) = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", to)
    except errors.ConversionError:
        assert source == "key" and not temporaries._held  # which has no place in a file
        return
    assert seen and all(seen) and not temporaries._held
    path = Path(result.destination)
    folders = [folder for folder in (path, *path.rglob("*")) if folder.is_dir()]
    assert len(folders) > 1 or path.is_file()
    assert {str(folder): synced.get(folder.stat().st_ino) for folder in folders} == {
        str(folder): sorted(os.listdir(folder)) for folder in folders
    }


# Two leaves with one stored name, and checkpoints that are no single tree.
SPECIAL = ("collide", "json", "save_checkpointables", "orbax_prng/handler")
CASES = [case for case in corpus.cases() if not any(word in str(case) for word in SPECIAL)]
NEWEST = max(case.flax for case in CASES)
QUICK = ("legacy_msgpack", "gda", "orbax_manager", "orbax_v1")


def parameters() -> list[object]:
    """All cases; slow are all but the first of some writers in the newest release."""
    chosen = {case.family: case for case in reversed(CASES) if case.flax == NEWEST and case.family in QUICK}.values()
    return [pytest.param(case, id=str(case), marks=() if case in chosen else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_conversions_restore_to_what_was_saved(
    case: corpus.Case, unpacked: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To Orbax's format, and from there to msgpack; all that old releases wrote is theirs."""
    path, expected, _ = corpus.read(case, unpacked)
    with caplog.at_level(logging.ERROR, "flax_ckpt_compat"):
        (done,) = flax_ckpt_compat.convert(path, tmp_path / "orbax", "orbax")
        assert not [note for note in done.notes if "other files" in note]
        flax_ckpt_compat.convert(tmp_path / "orbax", tmp_path / "file", "msgpack")
        for result in ("orbax", "file"):
            assert_equal(case, expected, checkpoints.restore_checkpoint(tmp_path / result, None), with_target=False)


def save_mixed(directory: Path, nbytes: int, count: int) -> None:
    """Saves checkpoints of so many bytes each in three runs and both formats, of leaves of all sizes and dtypes."""
    for n in range(count):
        rng = np.random.default_rng(n)
        tree = {
            "small": {str(i): rng.normal(size=(3, i)).astype(np.float32) for i in range(20)},
            "big": rng.integers(0, 255, nbytes // 2, np.uint8),
            "bf16": rng.normal(size=nbytes // 8).astype(ml_dtypes.bfloat16),
            "f64": [rng.normal(size=nbytes // 32), (n, None, "text")],
        }
        format: Any = "orbax" if n % 2 else "msgpack"
        flax_ckpt_compat.save(directory / f"run_{n % 3}", tree, step=n, format=format, overwrite=True)


# Converts, and kills this process before its n-th call into the system: source, destination, layout, n.
JOB = """
import os
import signal
import sys

import flax_ckpt_compat
from tests.support.interrupting import count_calls, interrupted

source, destination, to, at = sys.argv[1:]


def convert() -> None:
    flax_ckpt_compat.convert(source, destination, to, resume=True)


if at == "count":
    print(count_calls(convert))
else:
    interrupted(convert, int(at), lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
COUNT = 20


def check(source: Path, destination: Path, *, complete: bool) -> None:
    """Whatever has a final name is a whole copy of its source."""
    for run in range(3):
        there = {found.step for found in flax_ckpt_compat.iter_checkpoints(destination / f"run_{run}")}
        steps = {found.step for found in flax_ckpt_compat.iter_checkpoints(source / f"run_{run}")}
        assert there == steps if complete else there <= steps
        for step in there:
            expected, found = (
                flax_ckpt_compat.restore(folder / f"run_{run}", step=step, structure="flax")
                for folder in (source, destination)
            )
            assert fingerprint(found) == fingerprint(expected)


@pytest.mark.parametrize("to", ["orbax", pytest.param("msgpack", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kills", "count"), [(2, 4), pytest.param(40, COUNT, marks=pytest.mark.slow)])
def test_killed_before_any_call_and_resumed(tmp_path: Path, to: str, kills: int, count: int) -> None:
    """After a kill -9 before any call into the system, results are whole, and the rest is converted later."""
    save_mixed(tmp_path / "src", 4096, count)
    counting = start_python(JOB, tmp_path / "src", tmp_path / "counted", to, "count")
    calls = int(counting.communicate()[0])
    assert calls > 100 * count
    for at in sorted(random.Random(kills).sample(range(1, calls // 2), kills), reverse=True):
        process = start_python(JOB, tmp_path / "src", tmp_path / "dst", to, at)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        check(tmp_path / "src", tmp_path / "dst", complete=False)
    done = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", to, resume=True)  # type: ignore[arg-type]
    assert len(done) == count
    assert {result.status for result in done} <= {"kept", "converted"}
    check(tmp_path / "src", tmp_path / "dst", complete=True)
    assert [path.name for path in (tmp_path / "dst").rglob(".*")] == []  # nothing is left of the killed


COMMAND = """
import sys
from flax_ckpt_compat.cli import main
main(["convert", *sys.argv[1:], "--to", "orbax", "--resume", "--json"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_by_the_user(tmp_path: Path, workers: int) -> None:
    """Ctrl-C ends it at once, with exit code 130; no temporaries are left."""
    save_mixed(tmp_path / "src", 20 << 20, 8)
    process = start_python(COMMAND, tmp_path / "src", tmp_path / "dst", "--workers", workers, fresh=True)
    while not (tmp_path / "dst").exists() or not any((tmp_path / "dst").rglob(".*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "Interrupted." and "of 8 converted; go on with --resume" in errors
    assert [path.name for path in (tmp_path / "dst").rglob(".*")] == []
    check(tmp_path / "src", tmp_path / "dst", complete=False)
