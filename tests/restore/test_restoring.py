"""What comes back from a restore: kinds of leaves, devices, memory, and how callers of Flax call it."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, errors
from tests.support.interpreters import devices
from tests.support.path_kinds import GDA, gda_values
from tests.support.peers import nnx
from tests.support.samples import SAMPLES, assert_apart, fingerprint, nnx_model
from tests.support.saves import Save, run_python, use_flag


def test_numpy_and_jax_targets(save: Save, flag: bool, tmp_path: Path) -> None:
    """Without a target, and for a numpy leaf, arrays are numpy arrays in host memory.

    A jax.Array target gets a jax.Array on its device from an Orbax directory, numpy from msgpack, as in Flax."""
    save(tmp_path, {"n": np.ones(2, np.float32), "j": jnp.arange(3)}, 1)
    for target in (None, {"n": np.zeros(2), "j": np.zeros(3)}, {"n": jnp.zeros(2), "j": jnp.zeros(3, int)}):
        is_jax = flag and target is not None and isinstance(target["n"], jax.Array)
        restored = checkpoints.restore_checkpoint(tmp_path, target)
        for leaf in restored.values():
            assert isinstance(leaf, jax.Array) if is_jax else type(leaf) is np.ndarray
        assert restored["j"].tolist() == [0, 1, 2] and restored["n"].tolist() == [1, 1]


def test_abstract_targets(save: Save, flag: bool, tmp_path: Path) -> None:
    """ShapeDtypeStruct targets cast to their dtype and, with a sharding, place arrays; over a number they give one."""
    save(tmp_path, {"a": np.array([1.5, 2.5], np.float32), "b": np.arange(2, dtype=np.int32), "n": 3}, 1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restored = checkpoints.restore_checkpoint(
        tmp_path,
        {
            "a": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
            "b": jax.ShapeDtypeStruct((2,), np.int32, sharding=sharding),
            "n": jax.ShapeDtypeStruct((), np.int32),
        },
    )
    assert restored["a"].dtype == jnp.bfloat16 and restored["a"].tolist() == [1.5, 2.5]
    assert type(restored["a"]) is np.ndarray
    assert isinstance(restored["b"], jax.Array) and restored["b"].tolist() == [0, 1]
    assert type(restored["n"]) is np.ndarray and restored["n"].dtype == np.int32 and restored["n"].tolist() == 3


def test_nnx_idioms(flag: bool, tmp_path: Path) -> None:
    """The state of a module restores into that of an abstract one, and as a pure dict without a target."""
    if not hasattr(nnx, "to_pure_dict"):
        pytest.skip("this Flax has no nnx.to_pure_dict")
    state = nnx.split(nnx_model(0))[1]
    graph, abstract = nnx.split(nnx.eval_shape(lambda: nnx_model(1)))
    checkpoints.save_checkpoint(tmp_path / "state", state, 1)
    merged = nnx.merge(graph, checkpoints.restore_checkpoint(tmp_path / "state", abstract))
    assert fingerprint(nnx.split(merged)[1]) == fingerprint(state)
    checkpoints.save_checkpoint(tmp_path / "pure", nnx.to_pure_dict(state), 1)
    nnx.replace_by_pure_dict(abstract, checkpoints.restore_checkpoint(tmp_path / "pure", None))
    assert fingerprint(abstract) == fingerprint(state)


def test_python_leaves_keep_their_type(save: Save, flag: bool, tmp_path: Path) -> None:
    """Python int, float, bool and str come back as themselves, with and without a target of whatever type."""
    tree = {"i": 3, "f": 2.5, "b": True, "s": "text"}
    save(tmp_path, tree, 1)
    for target in (None, tree, {"i": 0.0, "f": np.zeros(()), "b": jnp.zeros(()), "s": ""}):
        restored = checkpoints.restore_checkpoint(tmp_path, target)
        assert {k: (type(v), v) for k, v in restored.items()} == {k: (type(v), v) for k, v in tree.items()}


@pytest.mark.parametrize("name", ["dtypes", "0-d", "empty", "scalars", "big-endian"])
def test_every_dtype_with_a_jax_target(name: str, flag: bool, tmp_path: Path) -> None:
    """Whatever the stored dtype, a jax.Array target gets the stored bits: on the device where jax can hold them."""
    tree = SAMPLES[name]()
    checkpoints.save_checkpoint(tmp_path, tree, 1)
    target = {key: jnp.zeros(value.shape) for key, value in tree.items()}
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path, target)) == fingerprint(tree)


def test_arrays_own_writable_memory(save: Save, flag: bool, tmp_path: Path) -> None:
    """Writing into a restored array changes neither another one, nor the file, the target, or the next restore."""
    tree = {str(n): np.full(n % 7 + 1, n, np.int64) for n in range(12)} | {"big": np.zeros(2**18)}
    save(tmp_path, tree, 1)
    for target, transforms in ((None, None), (tree, None), (tree, {})):
        restored = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=transforms)
        assert all(array.ctypes.data % 64 == 0 for array in restored.values())
        assert_apart(restored, tree)
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path, tree)) == fingerprint(tree)


@pytest.mark.slow
def test_restored_jax_arrays_are_theirs_alone(tmp_path: Path) -> None:
    """Arrays restored to a device survive garbage collection, donation and another restore, without warnings."""
    tree = {str(n): np.full(1000 + n, n, np.float32) for n in range(30)}
    with use_flag(True):
        checkpoints.save_checkpoint(tmp_path, tree, 1)
    target = {name: jnp.asarray(np.zeros_like(value)) for name, value in tree.items()}
    first = checkpoints.restore_checkpoint(tmp_path, target)
    second = checkpoints.restore_checkpoint(tmp_path, target)
    views = {name: np.asarray(value) for name, value in first.items()}
    del target
    gc.collect()
    bump = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    bumped = bump(second)
    jax.block_until_ready(bumped)
    gc.collect()
    noise = [np.full(1000, 7, np.float32) for _ in range(200)]
    for name, value in tree.items():
        np.testing.assert_array_equal(views[name], value)
        np.testing.assert_array_equal(first[name], value)
        np.testing.assert_array_equal(bumped[name], value + 1)
    del noise


GDA_TARGETS = [
    None,
    np.zeros((8, 4)),
    jnp.zeros((8, 4)),
    jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=jnp.zeros(1).sharding),
]


@pytest.mark.parametrize("leaf", GDA_TARGETS, ids=lambda leaf: type(leaf).__name__)
@pytest.mark.parametrize("is_whole", [False, True], ids=["tree", "leaf"])
def test_arrays_of_several_processes(is_whole: bool, leaf: Any) -> None:
    """One process reads them: to the host without a target or sharding, else as the target's sharding says.

    A single such array as the whole tree restores, which Flax itself cannot."""
    folder = "two_processes_leaf" if is_whole else "two_processes_tree"

    def array_of(tree: Any) -> Any:
        return tree if is_whole else tree["params"]["xy"]

    raw, whole = checkpoints.restore_checkpoint(GDA / folder, None), array_of(gda_values(folder))
    assert type(array_of(raw)) is np.ndarray
    np.testing.assert_array_equal(array_of(raw), whole, strict=True)
    target = leaf if is_whole else {**raw, "params": {**raw["params"], "xy": leaf}}
    restored = array_of(checkpoints.restore_checkpoint(GDA / folder, target))
    is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    assert isinstance(restored, jax.Array) == (isinstance(leaf, jax.Array) or is_abstract)
    assert restored.dtype == (jnp.bfloat16 if is_abstract else np.float32)
    np.testing.assert_array_equal(np.asarray(restored, np.float32), whole)


def test_arrays_beside_those_of_several_processes(tmp_path: Path) -> None:
    """Only the latter go to the target's device, in whatever order they come."""
    tree = {"a": np.ones(3, np.float32), "b": "//GDAPlaceholder:b", "c": np.zeros(2, np.float32)}
    (tmp_path / "checkpoint_1").write_bytes(serialization.msgpack_serialize(tree))
    files = {"driver": "file", "path": f"{tmp_path}/checkpoint_1_gda/b/"}
    metadata = {"shape": [3], "chunks": [3], "dtype": "<f4", "compressor": None}
    ts.open({"driver": "zarr", "kvstore": files, "metadata": metadata}, create=True).result()[...] = [1, 2, 3]
    restored = checkpoints.restore_checkpoint(tmp_path, {name: jnp.zeros(3) for name in tree})
    assert restored["b"].tolist() == [1, 2, 3]
    assert [isinstance(value, jax.Array) for value in restored.values()] == [False, True, False]


@pytest.mark.parametrize("is_abstract", [True, False])
def test_a_sharding_of_more_axes_than_the_array(is_abstract: bool, flag: bool, tmp_path: Path) -> None:
    """It is an error that names the leaf, for one device too; a msgpack array for a concrete target stays as stored."""
    checkpoints.save_checkpoint(tmp_path, {"a": np.array(1.5, np.float32)}, 1)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("x",)), jax.sharding.PartitionSpec("x"))
    array = jax.device_put(jnp.zeros(2), sharding)
    target = {"a": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding) if is_abstract else array}
    if flag or is_abstract:
        with pytest.raises(errors.ShapeMismatchError, match="a has the stored shape"):
            checkpoints.restore_checkpoint(tmp_path, target)
    else:
        assert checkpoints.restore_checkpoint(tmp_path, target)["a"] == 1.5


@pytest.mark.parametrize("form", ["relative", "slash", "PathLike", "link"])
def test_forms_of_paths(form: str, flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, trailing slashes, PathLikes and linked directories restore."""
    checkpoints.save_checkpoint(tmp_path / "dir", {"a": 1}, 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("dir")
    path: Any = {"relative": "dir", "slash": "./dir/", "PathLike": tmp_path / "dir", "link": "link"}[form]
    assert checkpoints.restore_checkpoint(path, {"a": 0}) == {"a": 1}
    assert checkpoints.restore_checkpoint(f"{path}/checkpoint_1", {"a": 0}) == {"a": 1}


def test_the_flag_plays_no_part(tmp_path: Path) -> None:
    """Both formats restore with either flag, by step and as the latest of both."""
    for step, value in enumerate((False, True, False)):
        with use_flag(value):
            checkpoints.save_checkpoint(tmp_path, {"s": step}, step, keep=9)
    for value in (False, True):
        with use_flag(value):
            assert [checkpoints.restore_checkpoint(tmp_path, None, s)["s"] for s in range(3)] == [0, 1, 2]
            assert checkpoints.restore_checkpoint(tmp_path, None)["s"] == 2


def test_falsy_targets(flag: bool, tmp_path: Path) -> None:
    """Falsy targets, and those whose truth is ambiguous, are targets: 0, an empty string, arrays, containers."""
    for tree, target in ((3, 0), ("x", ""), (np.ones(3), np.zeros(3)), ({}, {}), ((), ()), ([], [])):
        checkpoints.save_checkpoint(tmp_path, tree, 1, overwrite=True)
        assert fingerprint(checkpoints.restore_checkpoint(tmp_path, target)) == fingerprint(tree)


def test_structure_stored(flag: bool, tmp_path: Path) -> None:
    """Without a target lists and tuples are dicts, as in Flax; structure=stored gives back what the format records."""
    tree = {"l": [1, {"x": [2]}], "t": (3, 4), "i": {7: 5}}
    checkpoints.save_checkpoint(tmp_path, tree, 1)
    plain = {"l": {"0": 1, "1": {"x": {"0": 2}}}, "t": {"0": 3, "1": 4}, "i": {"7": 5}}
    assert checkpoints.restore_checkpoint(tmp_path, None) == plain
    with config.override(structure="stored"):
        assert checkpoints.restore_checkpoint(tmp_path, None) == (tree if flag else plain)
    assert flax_ckpt_compat.restore(tmp_path) == (tree if flag else plain)
    assert flax_ckpt_compat.restore(tmp_path, structure="flax") == plain


def test_a_background_save_is_waited_for_by_nobody_else(flag: bool, tmp_path: Path) -> None:
    """A restore of a finished checkpoint works while another save into the directory is on its way."""
    checkpoints.save_checkpoint(tmp_path, {"s": 1}, 1, keep=5)
    manager = checkpoints.AsyncManager()
    checkpoints.save_checkpoint(tmp_path, {"s": np.ones(10**6)}, 2, keep=5, async_manager=manager)
    assert checkpoints.restore_checkpoint(tmp_path, None, step=1) == {"s": 1}
    manager.wait_previous_save()
    manager.executor.shutdown()


# Sharded state on one machine: eight forced host devices, in a process of their own that runs all cases.
SCRIPT = Path(__file__).parents[1] / "support" / "sharded_cases.py"
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
# It traces the steps of whole models, and saves their many small arrays on eight devices.
SLOW = "real_states"
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == SLOW else ()) for name in CASES]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Case → traceback, empty if it passed."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_sharded"]
    asked = [item.callspec.params["name"] for item in items]
    program = "import sys; from tests.support import sharded_cases; sharded_cases.main(*sys.argv[1:])"
    out, _ = run_python(program, tmp_path_factory.mktemp("sharded"), *asked, timeout=300, **devices(8))
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    return dict(lines)


@pytest.mark.parametrize("name", NAMES)
def test_sharded(outcomes: dict[str, str], name: str) -> None:
    """What the case of this name in the script says."""
    if outcomes[name].startswith("skipped: "):
        pytest.skip(outcomes[name])
    assert outcomes[name] == ""
