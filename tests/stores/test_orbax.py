"""Orbax's format in a store: real Orbax reads what we put there, and we read there what real Orbax wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat.errors import ChecksumError, CorruptCheckpointError, IncompleteCheckpointError, StorageError
from tests.both_formats.test_corpus import assert_equal, restore
from tests.support import corpus
from tests.support.gs import GsBucket
from tests.support.orbax_trees import change_metadata, handles, load
from tests.support.orbax_trees import save as save_locally
from tests.support.s3 import Bucket

NEVER_MERGED = corpus.Case("flax-0.7.5_orbax-0.4.4", "orbax_pytree_no_ocdbt/plain")
NESTED = "flax-0.7.4_orbax-0.4.1"
MANY_FILES = tuple(f"no_ocdbt/{name}" for name in ("aggregate", "flax_save_args", "full", "zarr3"))


def one_of_each_kind() -> list[corpus.Case]:
    """The first case of each release and family that has no hundreds of files; of one with nested databases, all."""
    found: dict[tuple[str, ...], corpus.Case] = {}
    for case in corpus.cases():
        if not case.orbax or case.family == "orbax_json" or case.name.endswith(MANY_FILES):
            continue
        if (case.release, case.family) != (NEVER_MERGED.release, NEVER_MERGED.family):
            one = case.name if case.release == NESTED else ""
            found.setdefault((case.release, case.family, one), case)
    return list(found.values())


def eras() -> list[Any]:
    """The newest release of each family, and nested databases; what a store has to do with the others is the same."""
    families: dict[str, list[corpus.Case]] = {}
    nested = next(case for case in one_of_each_kind() if case.release == NESTED)
    for case in sorted(one_of_each_kind(), key=lambda case: (case.flax, case.orbax)):
        families.setdefault(case.family, []).append(case)
    return [
        pytest.param(case, id=str(case), marks=() if case in (one[-1], nested) else pytest.mark.slow)
        for one in families.values()
        for case in one
    ]


@pytest.mark.parametrize("case", eras())
def test_every_era(case: corpus.Case, unpacked: Path, bucket: Bucket) -> None:
    """What a release of Orbax wrote restores from a store to what was saved."""
    path, expected, meta = corpus.read(case, unpacked)
    root = corpus.unpack(case.release, unpacked) / case.name / "ckpt"
    url = bucket.upload(root, "run") + "/" + path.relative_to(root).as_posix()
    restored = restore(case, url)  # type: ignore[arg-type]  # a URL is not a Path
    if case.name == "orbax_v1/save_checkpointables":
        restored = restored["state"]
    if case.name == "orbax_prng/handler":
        restored.pop("npkey")
    if meta["target"] != "json":
        assert_equal(case, expected, restored, with_target=False)


def test_what_only_empty_directories_tell(unpacked: Path, bucket: Bucket) -> None:
    """Orbax 0.4.4 without OCDBT leaves what only its empty directories tell from an unfinished save: it is refused."""
    path, _, _ = corpus.read(NEVER_MERGED, unpacked)
    assert restore(NEVER_MERGED, path)
    with pytest.raises(IncompleteCheckpointError, match=r"manifest\.ocdbt is missing"):
        restore(NEVER_MERGED, bucket.upload(path, "run/c"))  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_one_leaf_reads_one_leaf(compression: str | None, bucket: Bucket, tmp_path: Path) -> None:
    """Opening and planning read no array data, and one array costs no more bytes than it has, plus 2 %."""
    rng = np.random.default_rng(0)
    tree = {f"layer_{i}": rng.integers(0, 256, 500_000, np.uint8) for i in range(8)}
    save_locally(tmp_path / "c", tree, compression)
    url = bucket.upload(tmp_path / "c", "run/checkpoint_1")
    target = {name: np.zeros(500_000, np.uint8) for name in tree}
    bucket.proxy.log.clear()
    assert flax_ckpt_compat.plan_restore(url, target).nbytes == 4_000_000
    opened = handles(url)
    assert sum(asked.sent for asked in bucket.proxy.log if asked.is_get) < 20_000
    bucket.proxy.log.clear()
    assert np.array_equal(opened["layer_5"].read(), tree["layer_5"])
    assert sum(asked.sent for asked in bucket.proxy.log) < 510_000


def test_a_part_reads_that_part(bucket: Bucket, tmp_path: Path) -> None:
    """A box of an array costs about its own bytes, and is what numpy cuts out."""
    array = np.random.default_rng(1).random((1000, 500))
    save_locally(tmp_path / "c", {"a": array})
    leaf = handles(bucket.upload(tmp_path / "c", "run/checkpoint_1"))["a"]
    bucket.proxy.log.clear()
    for box in ((slice(900, 910), slice(0, 500)), (slice(3, 40), slice(100, 107))):
        (found,) = leaf.reader.read([leaf.part(box)])
        assert np.array_equal(found, array[box])
    assert sum(asked.sent for asked in bucket.proxy.log) < 50 * 500 * 8 + 2000


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_damage_is_told_from_refusal(compression: str | None, bucket: Bucket, tmp_path: Path) -> None:
    """A lost or cut data object is a damaged leaf, by name; a store that fails all the time is none."""
    save_locally(tmp_path / "c", {"a": np.arange(60_000), "b": np.arange(3)}, compression)
    url = bucket.upload(tmp_path / "c", "run/checkpoint_1")
    opened = handles(url)
    data = max(bucket.keys("run/checkpoint_1/d/"), key=lambda key: len(bucket.get(key)))
    content = bucket.get(data)
    with bucket.proxy.failing(lambda method, path: "403"), pytest.raises(StorageError, match="AccessDenied"):
        opened["a"].read()
    bucket.put(data, content[:1000])
    with pytest.raises(CorruptCheckpointError, match=r"'a'.*(has 1000 bytes|ends too early)"):
        opened["a"].read()
    bucket.delete(data)
    with pytest.raises(CorruptCheckpointError, match=r"'a'.*is missing"):
        opened["a"].read()
    assert opened["b"].read().tolist() == [0, 1, 2]


@pytest.mark.slow
def test_flipped_bits_have_the_wrong_checksum(any_bucket: Bucket | GsBucket) -> None:
    """The file of checksums is an object, too: whole arrays, slices of one request, and the structure are verified."""
    array = np.random.default_rng(0).standard_normal((1024, 700)).astype(np.float32)  # three blocks
    tree = {"a": array, "b": np.arange(300.0)}
    url = flax_ckpt_compat.save(f"{any_bucket.url}/run", tree, step=1, format="orbax")
    data = max(any_bucket.keys("run/checkpoint_1/d/"), key=lambda key: len(any_bucket.get(key)))
    contents = {data: any_bucket.get(data), "run/checkpoint_1/_METADATA": any_bucket.get("run/checkpoint_1/_METADATA")}
    places = [(data, contents[data].index(array.tobytes()) + at) for at in (0, 1 << 20, array.nbytes - 1)]
    for name, at in [*places, ("run/checkpoint_1/_METADATA", 40)]:
        flipped = bytearray(contents[name])
        flipped[at] ^= 16
        any_bucket.put(name, bytes(flipped))
        with pytest.raises(ChecksumError):
            flax_ckpt_compat.restore(url)
        any_bucket.put(name, contents[name])
    assert np.array_equal(flax_ckpt_compat.restore(url)["a"], array)
    assert flax_ckpt_compat.verify(url).verified


def test_nothing_outside_is_read(bucket: Bucket, tmp_path: Path) -> None:
    """A leaf whose name leads out of the checkpoint is refused, in a store too."""
    save_locally(tmp_path / "c", {"a": np.arange(600)})
    change_metadata(tmp_path / "c", use_ocdbt=False)
    file = tmp_path / "c" / "_METADATA"
    file.write_text(file.read_text().replace('"key": "a"', '"key": "../../secret/a"'))
    bucket.put("secret/a/.zarray", b"{}")
    url = bucket.upload(tmp_path / "c", "run/checkpoint_1")
    bucket.proxy.log.clear()
    with pytest.raises(CorruptCheckpointError, match="outside"):
        load(url)
    assert not [asked for asked in bucket.proxy.log if "secret" in asked.path]
