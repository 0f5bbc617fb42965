"""What the processes of a team do together with arrays that are spread over them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_ckpt_compat._core.array_boxes import normalize_index
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, ProcessInfo, ProcessSave, WriteOptions
from flax_ckpt_compat._core.tree import HostCopy, KeyData, Shard
from tests.support.disks import counted
from tests.support.orbax_trees import BACKEND, branches, handles
from tests.support.spread import whole

# Of every array that all processes hold together: how it lies on a mesh of the axes x and y.
SPECS = {
    "both": PartitionSpec("x", "y"),
    "rows": PartitionSpec("x", None),
    "columns": PartitionSpec(None, "y"),
    "merged": PartitionSpec(("y", "x")),
    "replicated": PartitionSpec(),
    "zero_d": PartitionSpec(),
    "large": PartitionSpec("x", "y"),
    "tall": PartitionSpec("y"),
    "zeros": PartitionSpec(("x", "y")),
    "bf16": PartitionSpec("y", "x"),
    "int4": PartitionSpec("x"),
    "flags": PartitionSpec("x"),
    "layers/0.w é": PartitionSpec("x"),
}
# What real Orbax cannot hold, or not as what it is.
OUR_SPECS = {"empty": PartitionSpec("x"), "fp8": PartitionSpec("x", "y")}


def values(ours: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of `SPECS`, as numpy has them."""
    square = np.arange(64, dtype=np.float32).reshape(8, 8)
    found: dict[str, Any] = {
        name: square + 100 * at for at, name in enumerate(["both", "rows", "columns", "merged", "replicated"])
    }
    found |= {
        "zero_d": np.array(2.5, np.float32),
        "large": np.random.default_rng(0).random((512, 1024)).astype(np.float32),
        "tall": np.arange(160_000, dtype=np.int32).reshape(400, 400),
        "zeros": np.zeros((64, 3), np.float16),
        "bf16": (square / 3).astype(ml_dtypes.bfloat16),
        "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
        "flags": np.arange(12) % 3 == 0,
        "layers/0.w é": np.arange(8, dtype=np.complex64),
    }
    if ours:
        found |= {"empty": np.zeros((0, 4), np.float32), "fp8": square.astype(ml_dtypes.float8_e4m3)}
    return found


def key_data() -> np.ndarray[Any, Any]:
    """Of eight PRNG keys."""
    return np.arange(16, dtype=np.uint32).reshape(8, 2)


def plain() -> dict[str, Any]:
    """What no array of jax is, and what is empty."""
    host = {"np": np.arange(70.0).reshape(7, 10), "step": 7, "rate": 1e-3, "name": "héllo", "none": None}
    return {**host, "list": [1, {"deep": np.arange(3)}], "no": {}}


def mesh_of(shape: tuple[int, int]) -> Mesh:
    """A mesh of all devices."""
    return jax.make_mesh(shape, ("x", "y"))


def spread(value: np.ndarray[Any, Any], mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """The global array, of which each process holds its shards."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def arrays(mesh: Mesh, ours: bool = True) -> dict[str, jax.Array]:
    """The arrays of `values` as global ones."""
    specs = SPECS | OUR_SPECS
    return {name: spread(value, mesh, specs[name]) for name, value in values(ours).items()}


def our_tree(mesh: Mesh, copied: bool) -> dict[str, Any]:
    """All of it, with keys taken apart; ``copied`` as a save in the background has it."""
    tree: dict[str, Any] = {**arrays(mesh), "keys": spread(key_data(), mesh, PartitionSpec("x"))}
    if copied:
        tree = {name: _copied(array) for name, array in tree.items()}
    tree["keys"] = KeyData("threefry2x32", tree["keys"])
    here = jax.sharding.Mesh(np.array(jax.local_devices()), ("z",))
    return {**tree, **plain(), "here": jax.device_put(np.arange(8), NamedSharding(here, PartitionSpec("z")))}


def _copied(array: jax.Array) -> HostCopy:
    if array.is_fully_replicated:
        return whole(np.array(array), array.sharding)
    shards = (
        Shard(normalize_index(s.index, array.shape), np.array(s.data))
        for s in array.addressable_shards
        if not s.replica_id
    )
    return HostCopy(array.shape, np.dtype(array.dtype), tuple(shards), array.sharding)


def save(path: str, node: Any, compression: str | None = None, *, end: bool = True) -> None:
    """All processes write a neutral tree with ours; without ``end`` nobody merges."""
    share, options = ProcessInfo(jax.process_index(), jax.process_count()), WriteOptions(compression)
    prepared = BACKEND.prepare(node, share)
    if share.index == 0:
        BACKEND.begin_multiprocess(ProcessSave(path, prepared, options, share))
    multihost_utils.sync_global_devices("begun")
    BACKEND.write_process_part(ProcessSave(path, prepared, options, share))
    multihost_utils.sync_global_devices("written")
    if share.index == 0 and end:
        BACKEND.finish_multiprocess(ProcessSave(path, prepared, options, share))
    multihost_utils.sync_global_devices("ended")


def save_ours(path: str, compression: str | None, copied: bool, shape: tuple[int, int]) -> None:
    """Saves all kinds of leaves."""
    save(path, branches(our_tree(mesh_of(shape), copied)), compression)


def save_then_lose(path: str, shape: tuple[int, int], lost: str) -> str:
    """What the end of a save raised in process 0 after it had lost a file or directory, or what ``*`` stands for."""
    node = branches(our_tree(mesh_of(shape), False))
    save(path, node, end=False)
    if jax.process_index():
        return ""
    for one in list(Path(path).glob(lost)):
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    return _end(path, node)


def save_then_cut(path: str, shape: tuple[int, int]) -> str:
    """What the end of a save raised in process 0 after the largest file of process 1, one of several, had been cut."""
    from flax_ckpt_compat.orbax_backend import ocdbt_writer

    node = branches(our_tree(mesh_of(shape), False))
    with mock.patch.object(ocdbt_writer, "BATCH_BYTES", 1 << 18):
        save(path, node, end=False)
    if jax.process_index():
        return ""
    largest = max(Path(path, "ocdbt.process_1", "d").iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(largest, 100)
    return _end(path, node)


def _end(path: str, node: Any) -> str:
    share = ProcessInfo(0, jax.process_count())
    try:
        BACKEND.finish_multiprocess(ProcessSave(path, BACKEND.prepare(node, share), WriteOptions(), share))
    except Exception as error:
        return f"{type(error).__name__}: {error} leaf={getattr(error, 'leaf', None)}"
    return "saved"


def save_different(path: str, shape: tuple[int, int], name: str) -> str:
    """Process 1 saves something else under one name; what the end raised in process 0."""
    mesh = mesh_of(shape)
    tree = arrays(mesh)
    if jax.process_index():
        tree[name] = spread(values()[name].astype(np.int32), mesh, SPECS[name])
    if name == "bf16":  # stored as uint8 in both processes
        dtype = ml_dtypes.uint4 if jax.process_index() else ml_dtypes.float8_e4m3
        tree[name] = spread(values()[name].astype(np.float32).astype(dtype), mesh, SPECS[name])
    try:
        save(path, branches(tree))
    except Exception as error:
        multihost_utils.sync_global_devices("ended")
        return f"{type(error).__name__}: {error}"
    return "saved"


def write_elsewhere(path: str, shape: tuple[int, int]) -> str:
    """What `write_process_part` raises where process 0 made no directory."""
    share = ProcessInfo(jax.process_index(), jax.process_count())
    try:
        prepared = BACKEND.prepare(branches(arrays(mesh_of(shape))), share)
        BACKEND.write_process_part(ProcessSave(path, prepared, WriteOptions(), share))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "written"


def prepare_alone(shape: tuple[int, int], copied: bool) -> str:
    """What a save by this process alone says to a spread array."""
    try:
        BACKEND.prepare(branches(our_tree(mesh_of(shape), copied)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "prepared"


def save_real(path: str, shape: tuple[int, int], options: dict[str, bool]) -> None:
    """Real Orbax saves what it can hold."""
    import orbax.checkpoint as ocp

    mesh = mesh_of(shape)
    keys = jax.random.wrap_key_data(spread(key_data(), mesh, PartitionSpec("x")))
    tree = {**arrays(mesh, ours=False), "keys": keys, **plain()}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(path, args=ocp.args.PyTreeSave(tree))


def wrong_shards(array: jax.Array, expected: np.ndarray[Any, Any]) -> list[str]:
    """The shards here that are not bit for bit what numpy has."""
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype), (array, expected)
    shards = ((str(s.index), np.asarray(s.data), expected[s.index]) for s in array.addressable_shards)
    return [index for index, found, wanted in shards if found.tobytes() != np.ascontiguousarray(wanted).tobytes()]


def check_real(path: str, shape: tuple[int, int] | None, names: list[str]) -> dict[str, Any]:
    """Restores with real Orbax, onto a mesh or as saved, and compares the shards of this process.

    Returns:
        Everything that is wrong, by name.
    """
    import orbax.checkpoint as ocp

    expected, args = values(), None
    if shape is not None:
        mesh, specs = mesh_of(shape), SPECS | OUR_SPECS
        tree = ocp.PyTreeCheckpointer().metadata(path).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(), tree)
        for name in expected.keys() & tree.keys():
            args[name] = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, specs[name]))
        args["keys"] = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, PartitionSpec("x")))
        args["here"] = ocp.RestoreArgs(restore_type=np.ndarray)
    restored = ocp.PyTreeCheckpointer().restore(path, restore_args=args)
    if shape is None:
        saved = arrays(mesh_of((2, 2)))
        assert all(restored[name].sharding.is_equivalent_to(saved[name].sharding, saved[name].ndim) for name in names)
    return _compared(restored, names)


def check_real_v1(path: str, names: list[str]) -> dict[str, Any]:
    """The same with Orbax's v1, as saved."""
    from tests.support.peers import ocp_v1

    return _compared(ocp_v1.load(path), names)


def _compared(restored: dict[str, Any], names: list[str]) -> dict[str, Any]:
    expected = values()
    wrong: dict[str, Any] = {name: wrong_shards(restored[name], expected[name]) for name in names}
    data = jax.random.key_data(restored["keys"])
    wrong["keys"] = wrong_shards(data, key_data())
    wrong["plain"] = [] if _same_plain(restored) else [repr({name: restored[name] for name in plain()})]
    return {name: found for name, found in wrong.items() if found}


def _same_plain(restored: dict[str, Any]) -> bool:
    found = {name: jax.tree.map(np.asarray, restored[name]) for name in plain()}
    return str(found) == str({name: jax.tree.map(np.asarray, value) for name, value in plain().items()})


def check_ours(path: str, shape: tuple[int, int], names: list[str]) -> dict[str, Any]:
    """Reads the shards of this process with ours, the boxes that a mesh asks for.

    Returns:
        Everything that is wrong, by name; and under ``bytes`` how many were read of files, and how many were wanted.
    """
    mesh, specs, expected, found = mesh_of(shape), SPECS | OUR_SPECS, values(), handles(path)
    wrong: dict[str, Any] = {}
    asked: list[tuple[str, LeafHandle | ArraySlice, tuple[slice, ...]]] = []
    for name in names:
        sharding = NamedSharding(mesh, specs[name])
        indices = sharding.addressable_devices_indices_map(expected[name].shape).values()
        boxes = {str(box): box for box in (normalize_index(index, expected[name].shape) for index in indices)}
        asked += [(name, ArraySlice(found[name], box), box) for box in boxes.values()]
    with counted() as read:
        parts = found[names[0]].reader.read([part for _, part, _ in asked])
    for (name, _, box), part in zip(asked, parts, strict=True):
        wanted = np.array(expected[name][box], order="C")
        if (part.dtype, part.shape, part.tobytes()) != (wanted.dtype, wanted.shape, wanted.tobytes()):
            wrong[name] = f"{box}: {part}"
    wrong["bytes"] = [read(), sum(part.nbytes for part in parts)]
    return wrong


def save_uneven(path: str) -> str:
    """What a spread array without a grid of shards meets; there is none in jax, so a sharding plays one."""
    mesh = mesh_of((jax.device_count(), 1))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    array = spread(np.arange(8.0, dtype=np.float32), mesh, PartitionSpec("x"))
    shards = tuple(Shard(normalize_index(s.index, (8,)), np.asarray(s.data)) for s in array.addressable_shards)
    try:
        save(path, branches({"a": HostCopy((7,), np.dtype(np.float32), shards, sharding)}))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def save_plain(path: str, tree: dict[str, Any]) -> None:
    """Saves what all processes have alike."""
    save(path, branches(tree))


def random_values(seed: int) -> dict[str, tuple[np.ndarray[Any, Any], PartitionSpec]]:
    """Many arrays of any shape and dtype, each with a split that a mesh of two by two can make of it."""
    random = np.random.default_rng(seed)
    dtypes = [np.float32, np.int8, np.uint16, np.bool_, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3]
    found = {}
    for number in range(40):
        axes = [[], ["x"], ["y"], ["x", "y"], ["y", "x"]][random.integers(5)]
        sides: list[list[str]] = [[] for _ in range(random.integers(1, 4))]
        for axis in axes:
            sides[random.integers(len(sides))].append(axis)
        scale = int(random.choice([1, 3, 40]))
        shape = tuple(int(random.integers(0 if number % 9 == 0 else 1, 2 + scale)) * 2 ** len(side) for side in sides)
        value = random.integers(-8, 8, shape).astype(dtypes[random.integers(len(dtypes))])
        found[f"a{number}"] = value, PartitionSpec(*(tuple(side) or None for side in sides))
    return found


def save_random(path: str, seed: int, compression: str | None) -> None:
    """Saves them, on a mesh in which the processes' devices are mixed."""
    order = np.random.default_rng(seed).permutation(jax.device_count())
    mesh = Mesh(np.array(jax.devices())[order].reshape(2, 2), ("x", "y"))
    tree = {name: spread(value, mesh, spec) for name, (value, spec) in random_values(seed).items()}
    save(path, branches(tree), compression)
