"""What the processes of a team do in the tests: they make trees, save them, restore them and compare them.

The values of every leaf are arithmetic (`VALUES`), so that each process can check its part of each array by itself,
bit for bit, and no test needs another save to compare with.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import Progress, checkpoints, config
from flax_ckpt_compat._core import progress
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._save import coordination
from flax_ckpt_compat._trees import prng_keys
from tests.support.saves import around
from tests.support.saves import names as names

# As in the processes of a team, whose random keys are compared with this one's; jax's default since 0.5.
jax.config.update("jax_threefry_partitionable", True)


def count(shape: tuple[int, ...], dtype: Any) -> Any:
    """Values that tell where they belong."""
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


# Name → values, and how they are split; no split means that the array is whole in every process.
VALUES: dict[str, tuple[Any, P]] = {
    "both": (count((8, 16), np.float32), P("x", "y")),
    "rows": (count((16, 3), np.float64 if jax.config.jax_enable_x64 else np.float32) + 0.5, P("x")),
    "columns": (count((3, 8), np.int32), P(None, "y")),
    "merged": (count((16,), np.int16), P(("x", "y"))),
    "replicated": (count((5, 2), np.float32), P()),
    "zero_d": (np.array(2.5, np.float32), P()),
    "bf16": (count((8, 8), jnp.bfloat16), P("y", "x")),
    "uint4": (count((16,), np.uint8).astype(jnp.uint4), P("x")),
    "fp8": (count((8, 4), np.float32).astype(jnp.float8_e4m3fn), P("x")),
    "flags": (count((8, 2), np.uint8) % 3 == 0, P("x")),
    "complex": (count((8,), np.float32) * np.complex64(1 - 2j), P("x")),
    "empty": (np.zeros((0, 8), np.float32), P(None, "y")),
    "zeros": (np.zeros((16, 4), np.float32), P("x")),
    "large": (np.random.default_rng(0).random((256, 512)).astype(np.float32), P("x", "y")),
    "wide": (np.random.default_rng(1).random((4, 40_000)).astype(np.float32), P(None, ("x", "y"))),
}
KEYS = 8
# Dtypes that zarr itself does not know.
ODD = ("uint4", "fp8")


def mesh(kind: str = "plain") -> Mesh:
    """All devices of the job in two dimensions, x and y.

    Args:
        kind: ``plain`` (a process's devices are neighbours along y), ``turned`` (y spans the processes) or ``flat``
            (x has all devices, the last one first).
    """
    devices = np.array(jax.devices())
    shapes = {"plain": devices.reshape(-1, min(2, len(devices))), "flat": devices[::-1].reshape(-1, 1)}
    shapes["turned"] = shapes["plain"].T
    return Mesh(shapes[kind], ("x", "y"))


def put(values: Any, sharding: Any) -> Any:
    """An array of which this process makes its own shards only, which may be none."""
    if not sharding.addressable_devices:
        return prng_keys.without_shards(values.shape, values.dtype, sharding)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def split_tree(kind: str = "plain", *, orbax: bool = True, blank: bool = False) -> dict[str, Any]:
    """The arrays of `VALUES`, and typed keys, split over the devices.

    Args:
        kind: of the mesh.
        orbax: with dtypes that zarr itself does not know.
        blank: ones, and keys of another seed, instead.
    """
    where = mesh(kind)
    tree: dict[str, Any] = {}
    for name, (values, spec) in VALUES.items():
        if orbax or name not in ODD:
            tree[name] = put(np.ones_like(values) if blank else values, NamedSharding(where, spec))
    seed = 1 if blank else 7
    tree["keys"] = split_keys(NamedSharding(where, P("x")), seed)
    tree["same_keys"] = split_keys(NamedSharding(where, P()), seed)
    return tree


@functools.cache
def split_keys(sharding: Any, seed: int) -> Any:
    """Typed keys, of which every process has a part."""
    return jax.jit(lambda: jax.random.split(jax.random.key(seed), KEYS), out_shardings=sharding)()


def plain_leaves(index: int = 0) -> dict[str, Any]:
    """What is not an array over processes; a process's own values where ``index`` is given."""
    return {
        "local": jnp.arange(3) + index,
        "numpy": np.arange(6.0).reshape(2, 3) + index,
        "scalar": np.float32(index),
        "int": 7 + index,
        "float": 0.125 + index,
        "bool": index == 0,
        "text": f"process {index}",
        "none": None,
        "list": [1 + index, {"x": np.int8([index])}],
        "key": jax.random.key(3 + index),
    }


def mixed(kind: str = "plain", *, orbax: bool = True, blank: bool = False) -> dict[str, Any]:
    """Split arrays at two depths beside all else, which differs from process to process; see `split_tree`."""
    split = split_tree(kind, orbax=orbax, blank=blank)
    return {
        "split": split,
        "deep": [{"again": split["both"]}, ()],
        "plain": plain_leaves(99 if blank else jax.process_index()),
    }


def small(step: float = 0) -> dict[str, Any]:
    """A tree that tells which save it is from."""
    sharding = NamedSharding(mesh(), P("x"))
    return {"n": step, "w": put(np.full((8, 4), step, np.float32), sharding), "v": np.full(3, step)}


def use(orbax: bool) -> None:
    """Sets Flax's flag."""
    flax.config.update("flax_use_orbax_checkpointing", orbax)


def save_mixed(folder: str, orbax: bool, kind: str = "plain", **options: Any) -> str:
    """Saves `mixed` as step 1."""
    use(orbax)
    return checkpoints.save_checkpoint_multiprocess(folder, mixed(kind, orbax=orbax), 1, **options)


def save_small(folder: str, orbax: bool, step: float, options: dict[str, Any] | None = None, wait: float = 60) -> str:
    """Saves `small` with this step."""
    use(orbax)
    with config.override(coordination_timeout=wait):
        return checkpoints.save_checkpoint_multiprocess(folder, small(step), step, **(options or {}))


def save_and_spoil(folder: str, step: float, manager: Any, **options: Any) -> None:
    """Saves `small` in the background, from memory that is overwritten at once."""
    tree = small(step)
    checkpoints.save_checkpoint_multiprocess(folder, tree, step, async_manager=manager, **options)
    jax.jit(lambda w: w * 0 - 1, donate_argnums=0)(tree["w"]).block_until_ready()
    tree["v"][:] = -1


def restore_mixed(folder: str, orbax: bool, kind: str, abstract: bool = False) -> None:
    """Restores `mixed` split in this way, and checks every bit that this process holds."""
    target = mixed(kind, orbax=orbax, blank=True)
    asked = jax.tree.map(as_abstract, target) if abstract else target
    check_mixed(checkpoints.restore_checkpoint(folder, asked), target)


def as_abstract(leaf: Any) -> Any:
    """An array's shape, dtype and sharding; anything else as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def check_mixed(got: Any, target: Any) -> None:
    """Every bit that this process holds is the one that was saved, and is where the target says."""
    assert jax.tree.structure(got) == jax.tree.structure(target)
    for name, leaf in [*got["split"].items(), ("both", got["deep"][0]["again"])]:
        wanted = target["split"][name]
        if isinstance(leaf, np.ndarray):  # what a msgpack file held whole comes as numpy, as in Flax, to one process
            assert jax.process_count() == 1, name
            leaf = put(leaf, wanted.sharding)
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), name
        if name.endswith("keys"):
            leaf = jax.random.key_data(leaf)
            check_shards(name, leaf, np.asarray(jax.random.key_data(jax.random.split(jax.random.key(7), KEYS))))
        else:
            check_shards(name, leaf, VALUES[name][0])
    check_plain(got["plain"], plain_leaves(0))


def check_shards(name: str, leaf: Any, values: Any) -> None:
    """The shards of an array that this process sees are parts of these values."""
    assert leaf.dtype == values.dtype, name
    assert leaf.shape == values.shape, name
    assert leaf.addressable_shards, name
    for shard in leaf.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(values[shard.index]).tobytes(), (name, shard)


def check_plain(got: Any, wanted: Any) -> None:
    """The same leaves, of the same types where Flax keeps these."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if isinstance(b, int | float | str):
            assert a == b, path
            continue
        assert np.asarray(a).dtype == np.asarray(b).dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), str(path))


def restore_small(folder: str, step: float | None = None) -> float:
    """Restores `small`, checks that it is of one save, and says of which."""
    got = checkpoints.restore_checkpoint(folder, small(-1), step)
    check_shards("w", got["w"], np.full((8, 4), got["n"], np.float32))
    np.testing.assert_array_equal(got["v"], np.full(3, got["n"]))
    return float(got["n"])


def odd_tree(shape: str, index: int) -> Any:
    """A bare array over all processes, or a tree without one."""
    if shape == "bare":
        return put(VALUES["large"][0], NamedSharding(mesh(), P("x")))
    return {"plain": plain_leaves(index), "same": put(VALUES["rows"][0], NamedSharding(mesh(), P()))}


def save_and_restore_odd(folder: str, orbax: bool, shape: str) -> None:
    """Saves it as step 1, restores and checks it."""
    use(orbax)
    checkpoints.save_checkpoint_multiprocess(folder, odd_tree(shape, jax.process_index()), 1)
    got = checkpoints.restore_checkpoint(folder, jax.tree.map(lambda x: x, odd_tree(shape, 99)))
    if shape == "bare":
        check_shards("bare", got, VALUES["large"][0])
    else:
        check_plain(got["plain"], plain_leaves(0))
        np.testing.assert_array_equal(np.asarray(got["same"]), VALUES["rows"][0])


def large() -> Any:
    """Values that no codec makes smaller."""
    return np.random.default_rng(5).random((1024, 4096), np.float32)


def save_large(folder: str, orbax: bool) -> str:
    """Saves 16 MB over all processes."""
    use(orbax)
    tree = {"large": put(large(), NamedSharding(mesh("plain"), P(("x", "y"))))}
    return checkpoints.save_checkpoint_multiprocess(folder, tree, 1)


def restore_large(folder: str) -> None:
    """Restores it onto all processes."""
    sharding = NamedSharding(mesh("plain"), P(("x", "y")))
    got = checkpoints.restore_checkpoint(
        folder, {"large": jax.ShapeDtypeStruct((1024, 4096), np.float32, sharding=sharding)}
    )
    check_shards("large", got["large"], large())


_numbers = itertools.count()


def barrier(name: str) -> None:
    """Waits for the other processes, without devices."""
    from jax._src import distributed

    client: Any = distributed.global_state.client
    client.wait_at_barrier(f"{name} {next(_numbers)}", 20_000)


def before(orbax: bool, method: str, first: Callable[[], Any]) -> AbstractContextManager[None]:
    """Calls something before each call of a method of the format's backend, in this process."""
    return before_each(backend_for(Format.ORBAX if orbax else Format.MSGPACK), method, first)


@contextmanager
def before_each(holder: Any, name: str, first: Callable[[], Any]) -> Iterator[None]:
    """Calls something before each call of a function that a module, class or object has, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        around(patch, holder, name, lambda *_: first())
        yield


def steps_and_arrays(orbax: bool, *steps: int) -> list[str]:
    """The names of checkpoints, and of the folders of arrays that msgpack files have."""
    return sorted(f"checkpoint_{step}{end}" for step in steps for end in (("",) if orbax else ("", "_gda")))


def reports(folder: str, orbax: bool) -> list[tuple[int, list[int]]]:
    """Saves an array that is split over all processes, and one of numpy, and restores both whole.

    Returns:
        Of each of the two calls the bytes in all, and those of each report.
    """
    use(orbax)
    split, own = put(large(), NamedSharding(mesh(), P(("x", "y")))), np.ones(3)
    target = {"split": jax.ShapeDtypeStruct(split.shape, np.float32, sharding=NamedSharding(mesh(), P())), "own": own}
    found = []
    for call in (
        lambda: checkpoints.save_checkpoint_multiprocess(folder, {"split": split, "own": own}, 2),
        lambda: checkpoints.restore_checkpoint(folder, target, 2),
    ):
        done: list[Progress] = []
        with pytest.MonkeyPatch().context() as patch, config.override(progress=done.append):
            patch.setattr(progress, "_EVERY_SECONDS", 0.0)
            call()
        assert done[-1].finished
        found.append((done[-1].total, [one.done for one in done]))
    return found


# Of the rules of saving, and of what goes wrong


def save_with(folder: str, orbax: bool, changes: list[dict[str, Any]], wait: float = 3) -> str:
    """Saves `small` as step 5, each process with changes of its own to that call.

    Args:
        changes: by process; arguments of the save, and ``orbax`` (the flag), ``compression`` (the setting) or ``more``
            (leaves of the tree).
        wait: the setting ``coordination_timeout``.
    """
    mine = {"step": 5, **changes[jax.process_index()]}
    use(mine.pop("orbax", orbax))
    more = {name: MORE[name]() for name in mine.pop("more", ())}
    folder = folder + mine.pop("below", "")
    settings = {"coordination_timeout": wait, "compression": mine.pop("compression", None)}
    settings |= {"checksums": mine.pop("checksums")} if "checksums" in mine else {}
    with config.override(**settings):
        return checkpoints.save_checkpoint_multiprocess(folder, {**small(5), **more}, **mine)


MORE: dict[str, Callable[[], Any]] = {
    "spread": lambda: put(np.ones((8, 4), np.float32), NamedSharding(mesh(), P("x"))),
    "unknown": object,
    "plain": lambda: np.ones(3),
}


def save_alone(folder: str, orbax: bool, step: int, overwrite: bool = False, spread: bool = False) -> str:
    """What scripts do that save from process 0 only, also an array that this process sees a part of."""
    use(orbax)
    tree = small(step) if spread else {"n": step, "v": np.full(3, step), "local": jnp.arange(4)}
    return checkpoints.save_checkpoint(folder, tree, step, overwrite=overwrite)


def save_without_a_temporary(folder: str, orbax: bool, step: int, failing: int) -> str:
    """Saves where one process can make no name for its temporary, as in another user's folder."""
    from unittest import mock

    from flax_ckpt_compat._core.storage import Location

    use(orbax)
    error = OSError("not this user's own") if jax.process_index() == failing else None
    real = Location.temporary_path
    with (
        mock.patch.object(Location, "temporary_path", autospec=True, side_effect=error or real),
        config.override(coordination_timeout=30.0),
    ):
        return checkpoints.save_checkpoint_multiprocess(folder, small(step), step)


def save_a_leaf(folder: str, orbax: bool, step: int, failing: int) -> str:
    """Saves where one process has a leaf that cannot be saved."""
    changes = [{"step": step, "more": ["unknown" if index == failing else "plain"]} for index in range(4)]
    return save_with(folder, orbax, changes, 30.0)


def save_full_disk(folder: str, orbax: bool, step: int, full: int) -> str:
    """Saves 16 MB where one process may not write files above a megabyte, as on a full disk."""
    import resource
    import signal

    use(orbax)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tree = {"large": put(large(), NamedSharding(mesh("plain"), P(("x", "y"))))}
    if jax.process_index() == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with config.override(coordination_timeout=10.0):
            return checkpoints.save_checkpoint_multiprocess(folder, tree, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_in_threads(folder: str, orbax: bool, step: int) -> list[str]:
    """Saves to three prefixes at once, in another order in each process."""
    from concurrent.futures import ThreadPoolExecutor

    use(orbax)
    prefixes = ["a_", "b_", "c_"] if jax.process_index() else ["c_", "b_", "a_"]
    tree = small(step)

    def save(prefix: str) -> str:
        return checkpoints.save_checkpoint_multiprocess(folder, tree, step, prefix)

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(save, prefix) for prefix in prefixes]
        return sorted(future.result(60) for future in futures)


def save_beside_another_job(folder: str, orbax: bool, job: str, jobs: int) -> str:
    """Saves step 1, and commits only when all jobs have written.

    Returns:
        The name of the error's class, or an empty text.
    """
    use(orbax)

    def wait() -> None:
        Path(folder, f"other_{job}").touch()
        deadline = time.monotonic() + 20
        while sum(name.startswith("other_") for name in names(folder)) < jobs and time.monotonic() < deadline:
            time.sleep(0.005)

    try:
        with before(orbax, "finish_multiprocess", wait):
            checkpoints.save_checkpoint_multiprocess(folder, small(len(job)), 1)
    except Exception as raised:
        return type(raised).__name__
    return ""


def save_while_another_hangs(folder: str, orbax: bool, stage: str, wait: float) -> str:
    """Process 1 fails before a barrier that process 3 does not reach until process 0 has given up.

    Args:
        stage: the barrier: ``begin`` or ``commit``.
        wait: the setting ``coordination_timeout``; once one has failed, the others wait for half a second.
    """
    use(orbax)
    method = "prepare" if stage == "begin" else "write_process_part"
    index, given_up = jax.process_index(), Path(folder, "given_up")

    def fail_or_hang() -> None:
        if index == 1:
            raise OSError("the disk broke")
        deadline = time.monotonic() + 20
        while index == 3 and not given_up.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    try:
        with pytest.MonkeyPatch.context() as patch, config.override(coordination_timeout=wait):
            patch.setattr(coordination, "_GRACE_SECONDS", 0.5)
            with before(orbax, method, fail_or_hang):
                return checkpoints.save_checkpoint_multiprocess(folder, small(1), 1)
    finally:
        if index == 0:
            given_up.touch()
