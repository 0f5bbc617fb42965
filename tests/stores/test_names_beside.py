"""Objects beside a checkpoint: of other programs, late ones, arrays that several processes wrote; and one within it."""

import logging
import types
from typing import Any

import pytest
from click.testing import CliRunner
from fsspec import asyn

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors, restore, save
from flax_ckpt_compat._core.object_store.clouds import AzClient
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat.cli import main
from tests.support import s3
from tests.support.path_kinds import GDA, gda_values, normal
from tests.support.s3 import Bucket
from tests.support.saves import tree, use_flag
from tests.support.store_places import BY_TURNS, AnyBucket

FORMATS: tuple[Any, ...] = ("msgpack", "orbax")
STORES = pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])


@pytest.mark.slow
@STORES
def test_objects_for_folders(any_bucket: AnyBucket, format: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Consoles, Hadoop and gcsfuse create them: they hide no checkpoint, and none is left of an evicted one."""
    root = f"{any_bucket.url}/run"
    for name in ("", "checkpoint_1/", "checkpoint_2/", "checkpoint_2/d/", "checkpoint_3/"):
        any_bucket.put(f"run/{name}", b"")
    for step in (1, 2):
        flax_ckpt_compat.save(root, tree(step), step=step, format=format, overwrite=True)
        assert checkpoints.available_steps(root) == list(range(1, step + 1))
        assert checkpoints.restore_checkpoint(root, None)["n"] == step
    flax_ckpt_compat.save(root, tree(3), step=3, format=format, keep=1)
    assert checkpoints.available_steps(root) == [3]
    assert "incomplete" not in caplog.text


@pytest.mark.parametrize("is_there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_object_of_the_name_of_a_directory(is_there: bool, bucket: Bucket) -> None:
    """An empty one, as tools create for a folder, hides no directory of checkpoints, and none is replaced.

    Who may not ask for one sees the directory, too.
    """
    root = f"{bucket.url}/run"
    for folder in (root, f"{root}/sub"):
        save(folder, tree(1), step=1, format="orbax")
    for name in ("run", "run/sub") if is_there else ():
        bucket.put(name, b"")
    denied = "" if is_there else f"/{bucket.name}/run"
    with bucket.proxy.failing(lambda method, path: "403" if method == "HEAD" and path == denied else ""):
        for arguments in (["ls", root], ["ls", f"{root}/sub"], ["ls", "-r", root], ["clean", root]):
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, (arguments, result.output)
            assert result.stdout.count(" checkpoint_1\n") == {"ls": 1, "-r": 2}.get(arguments[-2], 0)
    there = bucket.keys()
    for format in FORMATS[: 1 + is_there]:
        for overwrite in (False, True):
            with pytest.raises(errors.InvalidCheckpointError):
                save(root, tree(1), format=format, overwrite=overwrite)
    assert bucket.keys() == there


def test_a_blob_that_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounts of Azure with folders answer so for one, which is no file, as it is in no list."""
    found = types.SimpleNamespace(size=0, etag='"0x1"', metadata={"Hdi_isfolder": "true"})

    async def ask(*_: Any) -> Any:
        return found

    monkeypatch.setattr(AzClient, "_ask", ask)
    monkeypatch.setattr(AzClient, "_store", lambda *_: types.SimpleNamespace(loop=asyn.get_loop()))
    assert AzClient().find("az://container/run") is None
    found.metadata = {}
    assert AzClient().find("az://container/run") == Stat(0, "0x1")


@pytest.mark.parametrize("name", ["d/" + "1" * 32, "notes.txt"])
def test_a_folder_of_the_name_of_a_msgpack_checkpoint(any_bucket: AnyBucket, name: str) -> None:
    """A data file of a dead writer that the store wrote late, or a user's file, does not hide it."""
    root = f"{any_bucket.url}/run"
    for step in (1, 2):
        flax_ckpt_compat.save(root, tree(step), step=step, format="msgpack")
    any_bucket.put(f"run/checkpoint_2/{name}", b"late")
    assert checkpoints.available_steps(root) == [1, 2]
    assert checkpoints.latest_checkpoint(root) == f"{root}/checkpoint_2"
    assert checkpoints.restore_checkpoint(root, None)["n"] == 2
    flax_ckpt_compat.save(root, tree(3), step=3, format="msgpack", keep=1)
    assert any_bucket.keys("run/") == ["run/checkpoint_3"]


@STORES
def test_what_a_store_does_not_let_go(any_bucket: AnyBucket, format: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where deletions are refused, as by a retention policy, what a dead writer left a day ago stops no save."""
    root = f"{any_bucket.url}/run"
    any_bucket.put(f"run/checkpoint_1/_begun.5.{'1' * 32}", b"")
    any_bucket.put("run/checkpoint_1/d/x", b"")
    with (
        any_bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "checkpoint_1" in path else ""),
        caplog.at_level(logging.WARNING),
    ):
        flax_ckpt_compat.save(root, tree(2), step=2, format=format)
    assert f"Cannot remove what an interrupted save left at {root}/checkpoint_1" in caplog.text
    assert checkpoints.restore_checkpoint(root, None)["n"] == 2


CASES = [("two_processes_leaf", "checkpoint_7"), ("two_processes_tree", "checkpoint_3")]


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_arrays_beside_a_msgpack_file(folder: str, name: str, bucket: Bucket) -> None:
    """One process reads from a store what two processes of real Flax wrote, in the folder beside the file."""
    root = bucket.upload(GDA / folder, folder)
    with bucket.proxy.failing(s3.sometimes(0.1, seed=3)):
        found = checkpoints.restore_checkpoint(f"{root}/{name}", None)
    assert normal(found) == normal(gda_values(folder))


@STORES
def test_none_is_lost_with_another(any_bucket: AnyBucket, format: Any) -> None:
    """As on a disk: see `tests.save.test_places`."""
    root = f"{any_bucket.url}/run"
    save(root, tree(1), step=1, format="orbax")
    with pytest.raises(errors.InvalidCheckpointError, match=f"{root}/checkpoint_1 is a checkpoint.* such as {root}$"):
        save(f"{root}/checkpoint_1/sub", tree(2), step=2, format=format)
    save(f"{root}/checkpoint_5", tree(7), step=7, format=format)
    with (
        use_flag(format == "orbax"),
        pytest.raises(errors.InvalidCheckpointError, match="only checkpoints are replaced"),
    ):
        checkpoints.save_checkpoint(root, tree(5), 5, overwrite=True)
    assert restore(f"{root}/checkpoint_5")["n"] == 7


def test_the_innermost_is_named(bucket: Bucket) -> None:
    """A copy of a checkpoint in another one: what is saved below it would be removed with it first, as on a disk."""
    save(f"{bucket.url}/run/outer", tree(1), format="orbax")
    for key in bucket.keys("run/outer/"):
        bucket.put(key.replace("outer/", "outer/inner/", 1), bucket.get(key))
    with pytest.raises(errors.InvalidCheckpointError, match=f"{bucket.url}/run/outer/inner is a checkpoint"):
        save(f"{bucket.url}/run/outer/inner/sub", tree(2), step=2)


def test_a_bucket_and_a_marker_alone_are_no_checkpoints(bucket: Bucket) -> None:
    """A bucket is never replaced or evicted, whatever lies at its top; a lone marker holds nothing to lose."""
    save(f"{bucket.url}/run/outer", tree(1), format="orbax")
    for key in bucket.keys("run/outer/"):
        bucket.put(key.removeprefix("run/outer/"), bucket.get(key))
    bucket.put("marked/_CHECKPOINT_METADATA", b"{}")
    for folder in ("sub", "marked/sub"):
        save(f"{bucket.url}/{folder}", tree(7), step=7)
        assert restore(f"{bucket.url}/{folder}")["n"] == 7
