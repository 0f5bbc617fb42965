"""Everything that needs eight devices, in one process: ``FOLDER CASE…``; prints one line of JSON per case."""

import contextlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, rules
from flax_ckpt_compat._core.array_boxes import normalize_index
from flax_ckpt_compat._core.errors import ChecksumError, CorruptCheckpointError, ShapeMismatchError
from flax_ckpt_compat.transforms import RestoreTransform, Transform
from tests.support.disks import counted
from tests.support.logs import warnings_logged
from tests.support.orbax_trees import handles
from tests.support.peers import ORBAX_HAS_TYPED_KEYS, ocp_v1, pytree_handler
from tests.support.real_states import STATES

CASES: dict[str, Callable[[Path], None]] = {}
# Format chapter 2.4, without the split of replicas: a chunk is the shard of one device.
CHUNKS = {
    "both": (P("x", "y"), [2, 4]),
    "rows": (P("x", None), [2, 8]),
    "columns": (P(None, "y"), [8, 4]),
    "merged": (P(("x", "y")), [1, 8]),
    "replicated": (P(), [8, 8]),
}


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Registers a case under its function's name."""
    CASES[function.__name__] = function
    return function


def mesh() -> Any:
    """Four by two."""
    return jax.make_mesh((4, 2), ("x", "y"))


def other_mesh() -> Any:
    """Two by four, the devices the other way round."""
    return jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("a", "b"))


def values(dtype: Any = np.float32, shape: tuple[int, ...] = (8, 8)) -> Any:
    """Distinct values."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def small_tree() -> dict[str, Any]:
    """One array per way to split it."""
    return {
        name: jax.device_put(values() + i, NamedSharding(mesh(), spec))
        for i, (name, (spec, _)) in enumerate(CHUNKS.items())
    }


def large_tree() -> dict[str, Any]:
    """Arrays above the sizes from which other code writes and reads them, and dtypes that zarr lacks."""
    split = {"big": P("x", "y"), "wide": P(None, "y"), "third": P(None, None, "x")}
    shapes = {"big": (512, 256), "wide": (64, 4096), "third": (3, 40, 512)}
    tree = {n: jax.device_put(values(np.float32, shapes[n]), NamedSharding(mesh(), split[n])) for n in split}
    tree["bf16"] = jax.device_put(values(jnp.bfloat16, (256, 512)), NamedSharding(mesh(), P("y", "x")))
    tree["uint4"] = jax.device_put(values(np.int32, (8, 8)).astype(jnp.uint4), NamedSharding(mesh(), P("x")))
    tree["flags"] = jax.device_put(values(bool, (8, 2)), NamedSharding(mesh(), P("x")))
    tree["one"] = jnp.arange(3)
    tree["keys"] = jax.device_put(jax.random.split(jax.random.key(7), 8), NamedSharding(mesh(), P("x")))
    return tree


def tree_for_orbax() -> dict[str, Any]:
    """What the installed Orbax can hold of both trees."""
    lacking = {"uint4"} if ORBAX_HAS_TYPED_KEYS else {"uint4", "keys"}
    return {"small": small_tree(), "large": {k: v for k, v in large_tree().items() if k not in lacking}}


def bits(leaf: Any) -> bytes:
    """The bytes of a leaf, of a key its data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def same(got: Any, want: Any) -> None:
    """The same bits in the same structure."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        assert a.shape == b.shape, path
        assert bits(a) == bits(b), path


def save(folder: Path, tree: Any) -> str:
    """Saves step 0 in Orbax's format and returns the checkpoint's path."""
    return checkpoints.save_checkpoint(folder, tree, 0)


def abstract(tree: Any, sharding: Callable[[Any], Any]) -> Any:
    """The tree's leaves without their values, with other shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), tree)


def restores(path: Any, target: Any, want: Any) -> Any:
    """Restore into a target, from which come the shardings, under a guard against transfers that nobody asked for."""
    with jax.transfer_guard("disallow"):
        restored = checkpoints.restore_checkpoint(path, target)
    same(restored, want)
    for got, leaf in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert got.sharding.is_equivalent_to(leaf.sharding, got.ndim), (path, got.sharding, leaf.sharding)
    return restored


def chunk_keys(path: str) -> dict[str, list[str]]:
    """Stored name → keys of its chunks, as TensorStore lists them."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": path + "/"}}).result()
    found: dict[str, list[str]] = {}
    for key in store.list().result():
        name, _, chunk = key.decode().rpartition("/c/" if b"/c/" in key else "/")
        found.setdefault(name, []).extend([] if chunk in (".zarray", "zarr.json") else [chunk])
    return found


@case
def each_shard_is_written_once(folder: Path) -> None:
    """As many chunks as distinct shards, of their shape, and both metadata files say so."""
    path = save(folder, small_tree())
    keys = chunk_keys(path)
    metadata = json.loads(Path(path, "_METADATA").read_text())["tree_metadata"]
    listed = json.loads(Path(path, "array_metadatas/process_0").read_text())["array_metadatas"]
    by_name = {one["array_metadata"]["param_name"]: one["array_metadata"] for one in listed}
    for name, (_, chunk) in CHUNKS.items():
        assert sorted(keys[name]) == sorted(f"{i}.{j}" for i in range(8 // chunk[0]) for j in range(8 // chunk[1])), (
            name
        )
        assert metadata[f"('{name}',)"]["value_metadata"]["write_shape"] == chunk, name
        assert by_name[name]["write_shape"] == by_name[name]["chunk_shape"] == chunk, name


@case
def real_orbax_restores_ours(folder: Path) -> None:
    """With the saved shardings where no target says otherwise, and onto another mesh with one; in v1 too."""
    tree = tree_for_orbax()
    path = save(folder, tree)
    restored = ocp.PyTreeCheckpointer().restore(path)
    same(restored, tree)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, want.ndim)
    same(ocp_v1.load(path), tree)
    target = abstract({"small": tree["small"]}, lambda _: NamedSharding(other_mesh(), P("b", "a")))
    target["large"] = abstract(tree["large"], lambda x: x.sharding)
    loaded = ocp_v1.load(path, target)
    same(loaded, tree)
    assert loaded["small"]["rows"].sharding == NamedSharding(other_mesh(), P("b", "a"))


@case
def we_restore_real_orbax(folder: Path) -> None:
    """Every layout that real Orbax writes of sharded arrays, onto the mesh of before and another one."""
    tree = tree_for_orbax()
    options: dict[str, Any] = {"zarr2": {}, "zarr3": {"use_zarr3": True}, "files": {"use_ocdbt": False}}
    for name, chosen in {**options, "plain": {"use_compression": False}}.items():
        handler = pytree_handler(**chosen)
        ocp.Checkpointer(handler).save(folder / name, args=ocp.args.PyTreeSave(tree))
    ocp_v1.save(folder / "v1", tree)
    for name in (*options, "plain", "v1"):
        for target in (tree, abstract(tree, moved_sharding)):
            restores(folder / name, target, tree)


def moved_sharding(leaf: Any) -> Any:
    """A sharding on the other mesh that fits the leaf."""
    spec = P(
        *["a" if length % 2 == 0 else None for length in leaf.shape[:1]], *(["b"] if leaf.shape[1:2] == (8,) else [])
    )
    return NamedSharding(other_mesh(), spec)


@case
def onto_any_sharding(folder: Path) -> None:
    """The mesh of before, another, one device, all replicated, some axes replicated: the same bits each time.

    With a codec, too, no chunk reaches over two shards, and several boxes of one chunk are right."""
    tree = {**small_tree(), **large_tree()}
    path = save(folder / "plain", tree)
    with config.override(compression="zstd"):
        compressed = save(folder / "zstd", tree)
    assert len(chunk_keys(compressed)["big"]) == 8
    kinds: list[Callable[[Any], Any]] = [
        lambda x: x.sharding,
        moved_sharding,
        lambda x: SingleDeviceSharding(jax.devices()[5]),
        lambda x: NamedSharding(other_mesh(), P()),
        lambda x: NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("z",)), P()),
    ]
    for target in (tree, *(abstract(tree, sharding) for sharding in kinds)):
        restores(path, target, tree)
    for target in (tree, abstract(tree, moved_sharding)):
        restores(compressed, target, tree)


@case
def many_leaves_of_small_chunks(folder: Path) -> None:
    """Leaves that are stored alike are assembled together, on any sharding, and a chunk that was damaged is named."""
    split = NamedSharding(mesh(), P("x", "y"))
    tree = {f"leaf_{n:02}": jax.device_put(values(np.int32) * n, split) for n in range(70)}
    targets = [
        NamedSharding(mesh(), P()),
        NamedSharding(mesh(), P("x")),
        NamedSharding(other_mesh(), P("a", "b")),
        SingleDeviceSharding(jax.devices()[3]),
    ]
    for number, compression in enumerate([None, "crc32c"]):
        with config.override(compression=compression):
            path = checkpoints.save_checkpoint(folder, tree, number)
        for target in targets:
            restores(path, abstract(tree, lambda _, on=target: on), tree)
        same(checkpoints.restore_checkpoint(path, jax.device_get(tree)), jax.device_get(tree))
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/", "path": "leaf_30/c/"}).result()
    store["2/1"] = bytes([store["2/1"][0] ^ 1]) + store["2/1"][1:]
    for target in targets:
        with pytest.raises(ChecksumError, match="leaf_30/c/2/1"):
            checkpoints.restore_checkpoint(path, abstract(tree, lambda _, on=target: on))
    store["2/1"] = None
    with pytest.raises(CorruptCheckpointError, match=r"leaf_30/c/2/1.*missing"):
        checkpoints.restore_checkpoint(path, abstract(tree, lambda _: targets[0]))


@case
def in_the_background(folder: Path) -> None:
    """The values of the call are kept though the arrays were deleted right after it, with the same layout."""
    for flag in (True, False):
        flax.config.update("flax_use_orbax_checkpointing", flag)
        tree = {**small_tree(), **large_tree()}
        kept = jax.tree.map(lambda x: x.copy(), tree)
        manager = checkpoints.AsyncManager()
        path = checkpoints.save_checkpoint(folder / str(flag), tree, 0, async_manager=manager)
        for leaf in jax.tree.leaves(tree):
            leaf.delete()
        manager.wait_previous_save()
        same(checkpoints.restore_checkpoint(path, kept), kept)
    assert len(chunk_keys(str(folder / "True" / "checkpoint_0"))["both"]) == 8


@case
def msgpack_gathers(folder: Path) -> None:
    """With Flax's flag off the file is Flax's, of whole arrays in shards and replicas, and nothing more than that."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    array = np.arange(3 * 2**20, dtype=np.float32).reshape(1024, 8, -1)
    specs = {"all": P(), "half": P("y"), "last": P(None, None, ("x", "y")), "xy": P("x", "y")}
    tree = {n: x for n, x in {**small_tree(), **large_tree()}.items() if n not in ("keys", "uint4")}
    tree |= {name: jax.device_put(array, NamedSharding(mesh(), spec)) for name, spec in specs.items()}
    path = save(folder, tree)
    assert Path(path).read_bytes() == flax.serialization.to_bytes(tree)
    spread = {name: leaf for name, leaf in tree.items() if len(leaf.sharding.device_set) > 1}
    restores(path, spread, spread)
    restored = checkpoints.restore_checkpoint(path, tree)
    same(restored, tree)
    assert {name for name, leaf in restored.items() if isinstance(leaf, jax.Array)} == spread.keys()


@case
def one_device_reads_its_share(folder: Path) -> None:
    """The part of one device of eight costs an eighth of the bytes; a mesh with replicas reads each byte once."""
    spec = NamedSharding(mesh(), P(("x", "y")))
    array = jax.device_put(np.random.default_rng(0).random((1024, 64)), spec)
    path = save(folder, {"a": array})
    handle = handles(path)["a"]
    index = normalize_index(spec.devices_indices_map(array.shape)[jax.devices()[3]], array.shape)
    with counted() as count:
        (part,) = handle.reader.read([handle.part(index)])
    assert count() == array.nbytes // 8
    assert np.array_equal(part, np.asarray(array)[index])
    for target in (P("x"), P("y"), P(None, "y"), P("x", "y")):
        wanted = abstract({"a": array}, lambda x, target=target: NamedSharding(mesh(), target))  # type: ignore[misc]
        with counted() as count:
            same(checkpoints.restore_checkpoint(path, wanted), {"a": array})
        assert array.nbytes <= count() < array.nbytes + 4096, target


@case
def arrays_of_several_processes(folder: Path) -> None:
    """What two processes of real Flax saved beside a msgpack file goes straight onto eight devices of one."""
    path = Path(__file__).parents[1] / "data" / "gda" / "two_processes_tree" / "checkpoint_3"
    plain = checkpoints.restore_checkpoint(path, None)
    arrays = {n: x for n, x in plain["params"].items() if isinstance(x, np.ndarray) and x.ndim}
    assert arrays
    for axis in ("x", "y"):
        divided = {name for name, x in arrays.items() if x.shape[0] % mesh().shape[axis] == 0}
        assert divided
        places = {name: NamedSharding(mesh(), P(axis if name in divided else None)) for name in arrays}
        target = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name, x in arrays.items()}
        restores(path, {"params": target}, {"params": arrays})


@case
def restored_arrays_are_their_own(folder: Path) -> None:
    """Donating one restored array, replicas and all, changes no other one."""
    array = jax.device_put(values(np.float32, (64, 64)), NamedSharding(mesh(), P("x")))
    path = save(folder, {"a": array, "b": array})
    restored = checkpoints.restore_checkpoint(path, {"a": array, "b": array})
    add = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = add(restored["a"])
        changed = add(changed)
    same(restored["b"], array)
    for shard in changed.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), np.asarray(array)[shard.index] * 4 + 3)


@case
def real_states(folder: Path) -> None:
    """Linen, NNX and optimizer states, sharded where they can be, saved and restored onto another mesh."""
    for flag in (True, False):
        flax.config.update("flax_use_orbax_checkpointing", flag)
        for name in ("train state", "nnx optimizer", "optax multi_transform"):
            state = jax.tree.map(lambda x: jax.device_put(x, state_sharding(mesh(), jnp.asarray(x))), STATES[name]())
            path = checkpoints.save_checkpoint(folder / str(flag) / name.replace(" ", "_"), state, 1)
            for target in (state, abstract(state, lambda x: state_sharding(other_mesh(), x))):
                restores(path, target, state)


def both_formats(folder: Path, tree: Any) -> list[str]:
    """The paths of a msgpack file and a directory of Orbax's format of the same tree."""
    return [
        flax_ckpt_compat.save(folder / format, tree, format=format)  # type: ignore[arg-type]
        for format in ("msgpack", "orbax")
    ]


def raised(call: Callable[[], Any]) -> type[Exception] | None:
    """The class of the error that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@case
def explicit_shardings_on_both_formats(folder: Path) -> None:
    """Abstract leaves with a sharding and arrays over several devices place arrays, numbers and keys of any format."""
    key, spec = jax.random.split(jax.random.key(3), 8), NamedSharding(mesh(), P("x"))
    tree = {"a": values(), "n": 7, "s": np.float32(1.5), "k": key}
    shapes = {"a": ((8, 8), np.float32), "n": ((), np.int32), "s": ((), np.float32), "k": ((8,), key.dtype)}
    places = (spec, SingleDeviceSharding(jax.devices()[3]), NamedSharding(other_mesh(), P()))
    for number, on in enumerate(places):
        target = {
            name: jax.ShapeDtypeStruct(*what, sharding=on if what[0] else NamedSharding(mesh(), P()))
            for name, what in shapes.items()
        }
        for path in both_formats(folder / str(number), tree):
            for restored in (checkpoints.restore_checkpoint(path, target), flax_ckpt_compat.restore(path, target)):
                same(restored, {**tree, "n": jnp.int32(7), "s": jnp.float32(1.5), "a": jnp.asarray(values())})
                for name, leaf in restored.items():
                    assert leaf.sharding.is_equivalent_to(target[name].sharding, leaf.ndim), name
    for path in both_formats(folder, {"a": values()}):
        restored = checkpoints.restore_checkpoint(path, {"a": jax.device_put(values() * 0, spec)})
        assert restored["a"].sharding == spec and bits(restored["a"]) == bits(values())
        one_device = checkpoints.restore_checkpoint(path, {"a": jnp.zeros((8, 8))})["a"]
        assert isinstance(one_device, jax.Array) == path.endswith("orbax")


@case
def shardings_of_an_explicit_mesh(folder: Path) -> None:
    """jax.eval_shape under jax.set_mesh: the mesh in context resolves what it says; elsewhere it says nothing."""
    if not hasattr(jax, "set_mesh"):
        pytest.skip("this jax has no explicit meshes")
    tree = {"a": values(), "z": values() + 1, "k": jax.random.split(jax.random.key(0), 8), "s": 3}
    on = jax.make_mesh((4, 2), ("x", "y"))  # of explicit axes where that is jax's default

    def init() -> Any:
        key = jax.random.split(jax.random.key(0), 8)
        return {
            "a": jax.device_put(jnp.zeros((8, 8)), P("x", "y")),
            "z": jnp.zeros((8, 8)),
            "k": key,
            "s": jnp.zeros(()),
        }

    with jax.set_mesh(on):
        target = jax.eval_shape(init)
    is_explicit = isinstance(getattr(target["a"].sharding, "mesh", None), jax.sharding.AbstractMesh)
    for path in both_formats(folder, tree):
        with jax.set_mesh(on):
            assert flax_ckpt_compat.plan_restore(path, target).raises is None
            restored = flax_ckpt_compat.restore(path, target)
            assert not is_explicit or restored["a"].sharding.is_equivalent_to(NamedSharding(on, P("x", "y")), 2)
        for context in (contextlib.nullcontext(), jax.set_mesh(jax.make_mesh((8,), ("other",)))):
            with context:
                assert flax_ckpt_compat.plan_restore(path, target).raises is None
                for outside in (
                    flax_ckpt_compat.restore(path, target),
                    checkpoints.restore_checkpoint(path, target),
                    checkpoints.restore_checkpoint(path, target, orbax_transforms={}),
                ):
                    assert not is_explicit or type(outside["a"]) is np.ndarray
                    assert bits(outside["a"]) == bits(restored["a"]) == bits(tree["a"])
                    assert bits(outside["k"]) == bits(restored["k"]) == bits(tree["k"])


@case
def what_no_sharding_holds(folder: Path) -> None:
    """Shapes and keys that do not fit, of too few axes as well, are a named error, planned and restored alike."""
    keys = jax.random.split(jax.random.key(0), 6)
    x, yx = NamedSharding(mesh(), P("x")), NamedSharding(mesh(), P(None, "x"))
    one = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)), P(None, "x"))

    def leaf(shape: tuple[int, ...], dtype: Any, on: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=on)

    tree = {"six": np.arange(6.0), "zero": np.ones(()), "keys": keys, "key": keys[0], "n": 3}
    targets: list[Any] = [
        {"six": leaf((6,), np.float32, x)},
        {"six": leaf((4, 4), np.float32, yx)},
        {"zero": leaf((8,), np.float32, x)},
        {"n": leaf((8,), np.float32, x)},
        {"keys": leaf((6,), keys.dtype, x)},
        {"key": leaf((8,), keys.dtype, x)},
        {"six": leaf((2, 2), np.float32, one)},
        {"six": jax.device_put(np.zeros((2, 2)), one)},
        {"six": jax.device_put(np.zeros((4, 4)), yx)},
        {"key": jax.device_put(jax.random.split(jax.random.key(1), 8), x)},
    ]
    for path in both_formats(folder, tree):
        for target in targets:
            found = raised(lambda: flax_ckpt_compat.restore(path, target))  # noqa: B023
            assert found is ShapeMismatchError, (target, found)
            assert flax_ckpt_compat.plan_restore(path, target).raises == "ShapeMismatchError", target
            loose = {"shape_mismatch": "ignore", "kind_mismatch": "ignore"}
            found = raised(lambda: checkpoints.restore_checkpoint(path, target))  # noqa: B023
            # What is not a wish of Flax's own format stays on the host, as in Flax; all else cannot be.
            is_array = isinstance(next(iter(target.values())), jax.Array)
            assert found is (None if is_array and path.endswith("msgpack") else ShapeMismatchError), (target, found)
            assert flax_ckpt_compat.plan_restore(path, target, **loose).raises == (found and found.__name__), target


@case
def renamed_and_computed_leaves(folder: Path) -> None:
    """They get the target's sharding, of either format; what it cannot hold is a named error."""

    def leaf(shape: tuple[int, ...], *spec: Any, dtype: Any = np.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), P(*spec)))

    def by(function: Callable[[Any], Any]) -> Any:
        return {"new": Transform("layer_1/w", value_fn=function)}

    value = values(shape=(16, 4))
    layers = {f"layer_{n}": {"w": jax.device_put(value + n, NamedSharding(mesh(), P("x")))} for n in range(4)}
    stacked, stack = np.stack([value + n for n in range(4)]), rules.stack(r"layer_(.)", "all")
    several = RestoreTransform(
        multi_value_fn=lambda key, tree, args: tree["layer_0"]["w"] + tree["layer_3"]["w"],
        multi_value_fn_input_args={"layer_[03]/w": None},
    )
    whole, doubled = leaf((16, 4), "x", "y"), (value + 1) * 2
    asked: list[tuple[Any, Any, Any]] = [
        ({"new": {"w": leaf((16, 4), "y", "x")}}, [rules.rename("layer_1", "new")], value + 1),
        ({"all": {"w": leaf((4, 16, 4), "x", "y")}}, [stack], stacked),
        ({"l5": {"w": leaf((4, 4), "x", "y")}}, [stack, rules.unstack("all", "l{}", axis=1)], stacked[:, 5]),
        (
            {"a": leaf((16, 2), "x"), "b": leaf((16, 2), None, "y")},
            [rules.move("layer_2/w", "w"), rules.split("w", ["a", "b"])],
            [value[:, :2] + 2, value[:, 2:] + 2],
        ),
        (
            {"h": {"w": leaf((16, 4), "x", dtype=jnp.bfloat16)}},
            [rules.rename("layer_0", "h"), rules.cast("w", "bfloat16")],
            value.astype(jnp.bfloat16),
        ),
        ({"new": whole}, by(lambda x: x * 2), doubled),
        ({"new": whole}, by(lambda x: np.asarray(x) * 2), doubled),
        ({"new": whole}, by(lambda x: jnp.asarray(np.asarray(x)) * 2), doubled),
        ({"new": leaf((4,), "x")}, by(lambda x: x[0]), value[0] + 1),
        ({"new": leaf((8, 4), "x", "y")}, by(lambda x: x[:8]), (value + 1)[:8]),
        ({"new": leaf((8, 4), "x", "y")}, by(lambda x: jnp.asarray(x)[:8]), (value + 1)[:8]),
        ({"new": leaf((8, 4), "x", "y")}, by(lambda x: np.asarray(x)[:8]), (value + 1)[:8]),
        ({"new": whole}, {"new": several}, value * 2 + 3),
    ]
    unlike: list[Any] = [
        [rules.rename("odd", "new")],
        {"new": Transform("odd")},
        {"new": Transform("odd", value_fn=lambda x: np.asarray(x))},
        {"new": Transform("odd", value_fn=lambda x: jnp.asarray(np.asarray(x)))},
        [rules.rename("odd", "new"), rules.reshape("new", (3, 1))],
    ]
    for path in both_formats(folder, {**layers, "odd": np.ones(3, np.float32)}):
        for target, given, expected in asked:
            restored = flax_ckpt_compat.restore(path, target, transforms=given)
            for wish, got, want in zip(*map(jax.tree.leaves, (target, restored, expected)), strict=True):
                assert got.sharding.is_equivalent_to(wish.sharding, got.ndim), (given, got.sharding)
                assert got.dtype == wish.dtype and bits(got) == bits(want), given
        for given in unlike:
            with pytest.raises(ShapeMismatchError, match=r"(new|odd).* does not fit the target's"):
                flax_ckpt_compat.restore(path, {"new": whole}, transforms=given, shape_mismatch="ignore")


@case
def typed_keys_under_a_guard(folder: Path) -> None:
    """Typed keys are restored, sharded or not, where even explicit transfers are forbidden."""
    keys = jax.random.split(jax.random.key(0), 8)
    spread = jax.device_put(keys, NamedSharding(mesh(), P("x")))
    for path in both_formats(folder, {"k": keys}):
        with jax.transfer_guard("disallow_explicit"):
            restored = [
                checkpoints.restore_checkpoint(path, target)["k"] for target in ({"k": keys}, {"k": spread}, None)
            ]
        assert all(bits(key) == bits(keys) for key in restored)
        assert restored[1].sharding.is_equivalent_to(spread.sharding, 1)


@case
def lost_values_of_shards(folder: Path) -> None:
    """Casts that lose values are told for sharded reads as for whole ones; 64 bits without x64 stay whole, and told."""
    tree = {"big": np.array([2**40] * 8), "nan": np.full(8, np.nan), "ok": np.arange(8.0), "imag": np.full(8, 1j)}
    wanted = {"big": np.int32, "nan": np.int32, "ok": np.float32, "imag": np.float32}
    spread = NamedSharding(mesh(), P("x"))
    targets = [
        {name: np.zeros(8, dtype) for name, dtype in wanted.items()},
        {name: jax.device_put(np.zeros(8, dtype), spread) for name, dtype in wanted.items()},
        {name: jax.ShapeDtypeStruct((8,), dtype, sharding=spread) for name, dtype in wanted.items()},
    ]
    for path in both_formats(folder, tree):
        for target in targets:
            with warnings_logged() as lines:
                restored = flax_ckpt_compat.restore(path, target, dtype="target")
            (lost,) = [line for line in lines if "does not hold all values" in line]
            assert lost.endswith("big, nan, imag")
            assert {name: leaf.dtype for name, leaf in restored.items()} == wanted
        with warnings_logged() as lines:
            restored = flax_ckpt_compat.restore(path, {"big": jax.ShapeDtypeStruct((8,), np.int64, sharding=spread)})
        assert type(restored["big"]) is np.ndarray and restored["big"].dtype == np.int64
        assert ["whole arrays stay in host memory" in line and "big (int64)" in line for line in lines] == [True]


def state_sharding(on: Any, leaf: Any) -> Any:
    """The last axis over the first axis of the mesh, where it divides."""
    axis = on.axis_names[0]
    fits = leaf.ndim and leaf.shape[-1] % on.shape[axis] == 0
    return NamedSharding(on, P(*[None] * (leaf.ndim - 1), axis) if fits else P())


def main(folder: str, *names: str) -> None:
    """Runs these cases, each in a folder of its own."""
    warnings.filterwarnings("error", module="flax_ckpt_compat")
    for name in names:
        flax.config.update("flax_use_orbax_checkpointing", True)
        place = Path(folder, name)
        place.mkdir()
        try:
            CASES[name](place)
            outcome = ""
        except pytest.skip.Exception as skipped:
            outcome = f"skipped: {skipped}"
        except Exception:
            outcome = traceback.format_exc()
        print(json.dumps([name, outcome]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
