"""How many requests look-ups, restores and saves send, and how many of them wait for one another.

A round is a request that begins after the one before it has ended; on a store far away each takes some 0.2 s.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import serialization
from flax_ckpt_compat.legacy import read_bytes
from safetensors.numpy import save_file

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.errors import CheckpointError, StorageError
from flax_ckpt_compat._core.object_store import client, gs
from flax_ckpt_compat._core.object_store.storage import OpenedObject
from tests.support.s3 import Asked, Bucket, rounds
from tests.support.saves import use_flag
from tests.support.store_places import BY_TURNS, AnyBucket
from tests.support.trees import fingerprint

# Seconds of latency, of one try after another; rounds are exact if a request takes longer than what is between two.
_LATENCIES = (0.03, 0.1, 0.3)


def within(most: int, bucket: AnyBucket, action: Callable[[], Any]) -> tuple[Any, list[Asked]]:
    """What an action returns, and its requests, of at most so many rounds; tried again: a busy machine adds some."""
    for latency in _LATENCIES:
        with counting(bucket, latency) as log:
            result = action()
        if rounds(log) <= most:
            return result, log
    raise AssertionError(f"{rounds(log)} rounds, at most {most} were expected: {log}")


@contextmanager
def counting(bucket: AnyBucket, latency: float = _LATENCIES[0]) -> Iterator[list[Asked]]:
    """The requests within it, each with the latency of a store that is not next door."""
    bucket.proxy.log.clear()
    bucket.proxy.latency = latency
    try:
        yield bucket.proxy.log
    finally:
        bucket.proxy.latency = 0.0


def save_copies(bucket: AnyBucket, format: Any, number: int) -> str:
    """The root of a number of steps with the same content, put there one object at a time."""
    key = flax_ckpt_compat.save(f"{bucket.url}/one/c", {"w": np.arange(4.0)}, format=format)[len(bucket.url) + 1 :]
    contents = {name[len(key) :]: bucket.get(name) for name in bucket.keys(key)}
    for step in range(number):
        for name, content in contents.items():
            bucket.put(f"run/checkpoint_{step}{name}", content)
    return f"{bucket.url}/run"


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
@pytest.mark.parametrize("number", [1, 50])
def test_the_latest_of_many_steps(format: Any, number: int, any_bucket: AnyBucket) -> None:
    """A list, of some pages, and one byte of the latest; all steps take a byte of each file, asked for at once."""
    root = save_copies(any_bucket, format, number)
    latest, _ = within(3, any_bucket, lambda: checkpoints.latest_checkpoint(root))
    assert latest == f"{root}/checkpoint_{number - 1}"
    found, log = within(5 + number // 10, any_bucket, lambda: checkpoints.available_steps(root))
    assert found == list(range(number))
    assert len(log) <= number + 3
    restored, _ = within(6, any_bucket, lambda: checkpoints.restore_checkpoint(root, {"w": np.zeros(4)}))
    np.testing.assert_array_equal(restored["w"], np.arange(4.0))


@pytest.mark.parametrize(("any_bucket", "most"), [("s3", 17), ("gs", 16)], indirect=["any_bucket"])
def test_a_save_that_evicts_four(any_bucket: AnyBucket, most: int) -> None:
    """The list that the commit made tells what is there of each: 20 and 25 requests were sent before."""
    root = save_copies(any_bucket, "msgpack", 4)
    with use_flag(False), counting(any_bucket) as log:
        checkpoints.save_checkpoint(root, {"w": np.zeros(4)}, 9, keep=1)
    assert len(log) <= most
    assert checkpoints.available_steps(root) == [9]


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_a_restore_of_5000_leaves(format: Any, any_bucket: AnyBucket) -> None:
    """Eight rounds and few requests, however many leaves there are."""
    tree = {f"a{i:04}": np.full(100, i, np.float32) for i in range(5000)}
    url = flax_ckpt_compat.save(f"{any_bucket.url}/run/c", tree, format=format)
    restored, log = within(8, any_bucket, lambda: flax_ckpt_compat.restore(url, tree))
    assert len(log) <= 12
    for name in ("a0000", "a2500", "a4999"):
        np.testing.assert_array_equal(restored[name], tree[name])


def layers(number: int) -> dict[str, Any]:
    """Layers of the same shapes: arrays that are skipped, and small ones between them."""
    shapes = {"kernel": 150_000, "bias": 10, "table": 90_000, "scale": 3_000}
    return {f"layer_{i}": {name: np.full(size, i, np.float32) for name, size in shapes.items()} for i in range(number)}


# The trees are made when they are asked for: every process of a run collects this file.
LARGE_ARRAYS: dict[str, tuple[Callable[[], Any], int]] = {
    "same": (lambda: {f"a{i}": np.full(150_000, i, np.float32) for i in range(40)}, 9),
    "repeated": (lambda: {"params": layers(9), "mu": layers(9), "step": 3}, 12),
    "distinct": (lambda: {f"a{i}": np.full(100_000 + 3_000 * i, i, np.float32) for i in range(40)}, 12),
}


# What is planned is the same in both stores.
IN_ONE_STORE = [
    pytest.param(store, name, marks=() if store == "s3" and name != "repeated" else pytest.mark.slow)
    for name in LARGE_ARRAYS
    for store in ("s3", "gs")
]


def _numpy_files(folder: Path, tree: dict[str, Any]) -> dict[str, tuple[Path, int]]:
    """Files of other programs with these arrays, and the most rounds that a restore of each may take."""
    save_file(tree, folder / "a.safetensors")
    np.savez(folder / "a.npz", **tree)
    np.savez_compressed(folder / "packed.npz", **tree)
    return {name: (folder / name, most) for name, most in (("a.safetensors", 9), ("a.npz", 12), ("packed.npz", 12))}


@pytest.mark.parametrize("any_bucket", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True)
def test_a_restore_of_files_of_other_programs(any_bucket: AnyBucket, tmp_path: Path) -> None:
    """Their arrays are read in few rounds: each took a request of its own, after the one before it."""
    rng = np.random.default_rng(0)
    tree = {f"a{i:02}": rng.normal(size=40_000 + i).astype(np.float32) for i in range(30)}
    for name, (file, most) in _numpy_files(tmp_path, tree).items():
        any_bucket.put(f"models/{name}", file.read_bytes())
        url = f"{any_bucket.url}/models/{name}"
        restored, log = within(most, any_bucket, functools.partial(flax_ckpt_compat.restore, url))
        assert len(log) <= 45, name
        assert restored.keys() == tree.keys()
        for key, array in tree.items():
            np.testing.assert_array_equal(restored[key], array)


@pytest.mark.parametrize(("any_bucket", "name"), IN_ONE_STORE, indirect=["any_bucket"])
def test_a_restore_of_many_large_arrays_of_a_msgpack_file(name: str, any_bucket: AnyBucket) -> None:
    """Rounds do not grow with the number of arrays, each of which tells where the next one begins."""
    make, most = LARGE_ARRAYS[name]
    tree = make()
    data = serialization.msgpack_serialize(tree)
    any_bucket.put("run/c", data)
    restored, log = within(most, any_bucket, lambda: flax_ckpt_compat.restore(f"{any_bucket.url}/run/c", tree))
    assert fingerprint(restored) == fingerprint(serialization.msgpack_restore(data))
    assert sum(asked.sent for asked in log) < 2 * len(data)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_what_is_read_ahead_is_what_is_there(seed: int, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that repeat, nearly repeat and do not, in small windows: right and wrong guesses give the file's."""
    random = np.random.default_rng(seed)
    monkeypatch.setattr(read_bytes.StoredObject, "window_sizes", read_bytes.WindowSizes(64, 0, 2048, 8192, 1000))
    monkeypatch.setattr(read_bytes, "_CACHE_LIMIT", int(random.choice([65_536, 200_000, 2**26])))
    sizes = random.integers(0, 4000, 5)
    tree: dict[str, Any] = {}
    for number in range(150):
        size = sizes[number % 5] if random.random() < 0.9 else random.integers(0, 40_000)
        tree["n" * int(random.integers(1, 40)) + str(number)] = random.integers(0, 255, size).astype(np.float32)
    data = serialization.msgpack_serialize(tree)
    bucket.put("run/c", data)
    restored = flax_ckpt_compat.restore(f"{bucket.url}/run/c", None)
    assert fingerprint(restored) == fingerprint(serialization.msgpack_restore(data))


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 300_000, 5_000_000])
def test_sizes_without_the_json_api(nbytes: int, any_bucket: AnyBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that begins inside the object and ends beyond tells the size; a few rounds find where."""
    monkeypatch.setattr(gs.GS, "stored_size", lambda self, url: None)
    any_bucket.put("object", bytes(nbytes))
    url = f"{any_bucket.url}/object"
    assert within(8, any_bucket, lambda: client.size(url))[0] == nbytes  # 36 of single bytes, halving
    assert client.probed_size(url) == nbytes


@pytest.mark.parametrize("places", [(0, 3), pytest.param(range(7), marks=pytest.mark.slow)], ids=["two", "all"])
def test_no_size_is_invented(places: Sequence[int], any_bucket: AnyBucket) -> None:
    """An object that is removed or replaced while its size is looked up has none, or that of one moment."""
    url, sizes = f"{any_bucket.url}/object", (3_000_000, 70_000)
    for at in places:
        for replacement in (None, bytes(sizes[1])):
            any_bucket.put("object", bytes(sizes[0]))

            def change(replacement: bytes | None = replacement) -> None:
                if replacement is None:
                    any_bucket.delete("object")
                else:
                    any_bucket.put("object", replacement)

            with before_request(any_bucket, at, change):
                try:
                    assert client.probed_size(url) in sizes
                except FileNotFoundError:
                    assert replacement is None
                except StorageError as error:
                    assert "was replaced while its size was looked up" in str(error)


def test_a_small_object_that_grows_while_it_is_opened(any_bucket: AnyBucket) -> None:
    """It is all of what it was, or all of what it became."""
    any_bucket.put("object", b"a" * 10)
    with before_request(any_bucket, 1, lambda: any_bucket.put("object", b"b" * 20)):
        opened = OpenedObject(f"{any_bucket.url}/object")
    assert (opened.head, opened.size) in ((b"a" * 10, 10), (b"b" * 20, 20))


@contextmanager
def before_request(bucket: AnyBucket, number: int, change: Any) -> Iterator[None]:
    """Within it, something changes between two requests: before the one of this number, from 0."""
    asked = iter(range(10_000))

    def rule(method: str, path: str) -> str:
        if next(asked) == number:
            change()
        return ""

    with bucket.proxy.failing(rule):
        yield


@pytest.mark.parametrize("format", ["msgpack", pytest.param("orbax", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("any_bucket", "number", "more"),
    [
        ("s3", 50, 0),
        ("gs", 50, 7),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("s3", 50, 7), ("gs", 50, 0), *itertools.product(("s3", "gs"), (40_000,), (0, 7)))
        ),
    ],
    indirect=["any_bucket"],
)
def test_no_restore_mixes_two_saves(format: Any, number: int, more: int, any_bucket: AnyBucket) -> None:
    """A checkpoint that is replaced before any one request of a restore gives the old or the new values, or an error.

    The new one is saved whole between two requests, of the same size or another.
    """
    url = f"{any_bucket.url}/run/checkpoint_1"
    old, new = (
        {"a": np.full(size, value), "b": np.full(3, value)} for size, value in ((number, 0), (number + more, 1))
    )
    for at in range(10):
        flax_ckpt_compat.save(url, old, format=format, overwrite=True)
        with before_request(any_bucket, at, lambda: flax_ckpt_compat.save(url, new, format=format, overwrite=True)):
            try:
                restored = flax_ckpt_compat.restore(f"{any_bucket.url}/run")
            except CheckpointError:
                continue
        assert fingerprint(restored) in (fingerprint(old), fingerprint(new))


STATE = {
    f"layer_{i}": {"kernel": np.full((64, 1024), i, np.float32), "bias": np.full(10, i, np.float32)} for i in range(4)
}
STATE_BYTES = 4 * (64 * 1024 + 10) * 4
OPERATIONS: dict[str, Callable[[str, Any], Any]] = {
    "save": lambda root, format: flax_ckpt_compat.save(root, STATE, step=3, format=format),
    "save, keep=2": lambda root, format: flax_ckpt_compat.save(root, STATE, step=3, keep=2, format=format),
    "overwrite": lambda root, format: flax_ckpt_compat.save(root, STATE, step=2, overwrite=True, format=format),
    "latest_checkpoint": lambda root, format: checkpoints.latest_checkpoint(root),
    "available_steps": lambda root, format: checkpoints.available_steps(root),
    "restore": lambda root, format: checkpoints.restore_checkpoint(root, STATE),
}
# In a folder with steps 1 and 2: rounds, requests, and bytes in requests and answers ÷ bytes of the state.
COSTS: dict[tuple[str, str], dict[str, tuple[int, int, float]]] = {
    ("s3", "msgpack"): {
        "save": (7, 9, 1.05),
        "save, keep=2": (9, 11, 1.05),
        "overwrite": (15, 16, 2.1),
        "latest_checkpoint": (2, 2, 0.02),
        "available_steps": (2, 3, 0.02),
        "restore": (7, 8, 1.35),
    },
    ("s3", "orbax"): {
        "save": (11, 19, 1.05),
        "save, keep=2": (15, 33, 1.05),  # five versions are asked for, which deletions of the extra s3 name
        "overwrite": (17, 38, 1.05),
        "latest_checkpoint": (1, 1, 0.02),
        "available_steps": (1, 1, 0.02),
        "restore": (5, 7, 1.05),
    },
    ("gs", "msgpack"): {
        "save": (7, 9, 1.05),
        "save, keep=2": (9, 11, 1.05),
        "overwrite": (15, 16, 2.1),
        "latest_checkpoint": (2, 2, 0.02),
        "available_steps": (2, 3, 0.02),
        "restore": (8, 8, 1.85),
    },
    ("gs", "orbax"): {
        "save": (10, 15, 1.1),
        "save, keep=2": (14, 29, 1.1),
        "overwrite": (16, 34, 1.15),
        "latest_checkpoint": (1, 1, 0.02),
        "available_steps": (1, 1, 0.02),
        "restore": (5, 7, 1.05),
    },
}


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_what_each_operation_costs(format: Any, any_bucket: AnyBucket) -> None:
    """At most what was counted when the limit was set: the counts are the same on every machine."""
    flax_ckpt_compat.save(
        f"{any_bucket.url}/warm/c", STATE, format=format
    )  # the parents of the root are looked at once
    roots, above = (f"{any_bucket.url}/run{number}" for number in itertools.count()), {}
    for name, most in COSTS[any_bucket.url[:2], format].items():
        for latency in _LATENCIES:
            root = next(roots)
            for step in (1, 2):
                flax_ckpt_compat.save(root, STATE, step=step, format=format)
            with counting(any_bucket, latency) as log:
                OPERATIONS[name](root, format)
            moved = sum(asked.sent + asked.received for asked in log) / STATE_BYTES
            found = (rounds(log), len(log), round(moved, 2))
            if found[0] <= most[0]:
                break
        if any(one > limit for one, limit in zip(found, most, strict=True)):
            above[name] = found
    assert not above


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_the_first_save_in_a_bucket(format: Any, any_bucket: AnyBucket) -> None:
    """It takes up to 15 rounds: others and those that prove that nothing is there."""
    roots = (f"{any_bucket.url}/run{number}" for number in itertools.count())
    within(15, any_bucket, lambda: flax_ckpt_compat.save(next(roots), STATE, step=1, format=format))
