"""Pipes, links, sizes that lie, files that may not be opened: a reader neither hangs, nor leaves the checkpoint."""

import json
import os
import shutil
import signal
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import VerifiedCheckpoint, checkpoints, config, errors, save, verify
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat.errors import PermissionDeniedError
from tests.support.saves import as_nobody


@pytest.fixture(autouse=True)
def never_hangs() -> Iterator[None]:
    """A reader that waits for a pipe is interrupted."""

    def stop(*_: object) -> None:
        raise TimeoutError("the reader hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 30)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


TREE = {"a": np.arange(6000.0), "b": np.arange(3, dtype=np.int32), "s": "text"}


def _write_orbax(path: Path, use_ocdbt: bool, use_zarr3: bool) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    ocp.Checkpointer(handler).save(path, {**TREE, "a": jnp.asarray(TREE["a"])})


def _write_gda(path: Path) -> None:
    """Write as real Flax does: a file, and arrays with zstd beside it (format.md, measured)."""
    import tensorstore as ts

    metadata = {"chunks": [3000], "compressor": {"id": "zstd", "level": 1}, "dtype": "<f8", "shape": [6000]}
    for name in ("a", "b"):
        store = ts.open(
            {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}_gda/{name}/"}, "metadata": metadata},
            create=True,
        ).result()
        store.write(np.arange(6000.0)).result()
    path.write_bytes(msgpack.packb({name: f"//GDAPlaceholder:{name}" for name in ("a", "b")}))


WRITERS: dict[str, Callable[[Path], None]] = {
    "ocdbt": lambda path: _write_orbax(path, True, False),
    "files": lambda path: _write_orbax(path, False, False),
    "files of zarr 3": lambda path: _write_orbax(path, False, True),
    "gda": _write_gda,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of each layout."""
    folder = tmp_path_factory.mktemp("written")
    for name, write in WRITERS.items():
        write(folder / name)
    return folder


def copied(written: Path, layout: str, path: Path) -> Path:
    """A copy of one of them."""
    if (written / layout).is_dir():
        return Path(shutil.copytree(written / layout, path))
    shutil.copytree(written / f"{layout}_gda", f"{path}_gda")
    return Path(shutil.copy(written / layout, path))


@pytest.fixture(params=WRITERS)
def checkpoint(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Path:
    """A copy of each of them."""
    return copied(written, request.param, tmp_path / request.param)


def files_of(checkpoint: Path) -> list[Path]:
    """All files below a checkpoint's folder, or its folder of arrays."""
    folder = checkpoint if checkpoint.is_dir() else Path(f"{checkpoint}_gda")
    return sorted(file for file in folder.rglob("*") if file.is_file())


def read_all(checkpoint: Path) -> None:
    """Restore, and read every leaf; anything but a named error fails."""
    flax_ckpt_compat.restore(checkpoint)
    with flax_ckpt_compat.open_checkpoint(checkpoint) as opened:
        opened.read()


def _pipe(file: Path) -> None:
    os.mkfifo(file)


def _socket(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # a socket's path is at most 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(file.name)
    finally:
        os.chdir(here)


def _device(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_pipe, _socket, _device])
def test_no_file_may_be_a_pipe_a_socket_or_a_device(checkpoint: Path, make: Callable[[Path], None]) -> None:
    """Each file in turn: the restore ends, with a named error unless it does not need the file."""
    failed = []
    for file in files_of(checkpoint):
        content = file.read_bytes()
        file.unlink()
        make(file)
        try:
            read_all(checkpoint)
        except errors.CheckpointError as error:
            failed.append(file.name)
            assert str(checkpoint) in str(error)
        file.unlink()
        file.write_bytes(content)
    assert len(failed) >= 4
    read_all(checkpoint)


def test_links_may_not_lead_out_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """A link to a file elsewhere is refused, also if it holds the very bytes; the error says how to trust it."""
    refused, expected = [], flax_ckpt_compat.restore(checkpoint)
    for file in files_of(checkpoint):
        moved = tmp_path / "elsewhere"
        file.rename(moved)
        file.symlink_to(moved)
        try:
            read_all(checkpoint)
        except errors.StorageError as error:
            refused.append(file.name)
            (verified,) = flax_ckpt_compat.verify(checkpoint).checkpoints
            assert verified.state == "unreadable"  # which is no damage
            assert "outside its directory" in str(error)
            assert "cp -rL" in str(error) and "config.update(links='follow')" in str(error)
        with config.override(links="follow"):
            np.testing.assert_equal(flax_ckpt_compat.restore(checkpoint), expected)
        file.unlink()
        moved.rename(file)
    assert len(refused) >= 4
    needed = {"_METADATA", "manifest.ocdbt", ".zarray", "zarr.json", "0", "1"}
    assert {file.name for file in files_of(checkpoint)} & needed <= {*refused}


def test_folders_may_not_lead_out_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """The same for a folder of chunks."""
    expected = flax_ckpt_compat.restore(checkpoint)
    folder = next(file.parent for file in files_of(checkpoint) if file.parent.name in ("a", "d"))
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.StorageError, match="outside its directory"):
        read_all(checkpoint)
    with config.override(links="follow"):
        np.testing.assert_equal(flax_ckpt_compat.restore(checkpoint), expected)


def test_links_of_the_user_work(checkpoint: Path, tmp_path: Path) -> None:
    """A linked directory of checkpoints, a linked step, and links inside the checkpoint's own directory."""
    expected = flax_ckpt_compat.restore(checkpoint)
    inside = files_of(checkpoint)[-1]
    inside.rename(inside.with_name("moved"))
    inside.symlink_to("moved")
    (tmp_path / "run").mkdir()
    for part in ("", "_gda"):
        if Path(f"{checkpoint}{part}").exists():
            (tmp_path / "run" / f"checkpoint_7{part}").symlink_to(f"{checkpoint}{part}")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    np.testing.assert_equal(flax_ckpt_compat.restore(tmp_path / "link"), expected)


def test_downloads_of_hugging_faces_hub_work(checkpoint: Path, tmp_path: Path) -> None:
    """Its cache is a folder of links to files beside it, by their hash (huggingface_hub 0.20 to 1.0, its guide)."""
    expected = flax_ckpt_compat.restore(checkpoint)
    hub = tmp_path / "models--someone--some"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots").mkdir()
    revision = hub / "snapshots" / ("0" * 40)
    revision.mkdir()
    for part in ("", "_gda"):
        if Path(f"{checkpoint}{part}").exists():
            Path(f"{checkpoint}{part}").rename(revision / f"ckpt{part}")
    for number, file in enumerate(sorted(file for file in revision.rglob("*") if file.is_file())):
        blob = hub / "blobs" / str(number)
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    np.testing.assert_equal(flax_ckpt_compat.restore(revision / "ckpt"), expected)


LONG_PATHS = {
    "long key": msgpack.packb({"k" * 1_000_000: {str(number): 1 for number in range(2000)}}),
    "many arrays": msgpack.packb({
        **{str(number): msgpack.ExtType(1, msgpack.packb([[1], "int8", b"1"])) for number in range(20)},
        "k" * 1_000_000: {str(number): 1 for number in range(2000)},
    }),
    "deep": b"\x81\xa1a" * 400 + msgpack.packb([1] * 300_000),
}  # fmt: skip


@pytest.mark.parametrize("case", ["long key", "many arrays", pytest.param("deep", marks=pytest.mark.slow)])
def test_key_paths_far_longer_than_the_file_are_refused(case: str, tmp_path: Path) -> None:
    """A megabyte of names takes no gigabyte of memory: 2.0 GB before for the long key, 1.0 GB for the deep one."""
    (tmp_path / "c").write_bytes(LONG_PATHS[case])
    tracemalloc.start()
    try:
        with pytest.raises(errors.CorruptCheckpointError, match="key paths far longer than the file"):
            flax_ckpt_compat.open_checkpoint(tmp_path / "c")
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_long_lists_of_numbers_restore(tmp_path: Path) -> None:
    """Paths of real trees are no such thing, however many their leaves."""
    tree = {"config": {"data": {"ids": list(range(3000))}}, "n" * 500: {str(number): number for number in range(3000)}}
    (tmp_path / "c").write_bytes(msgpack.packb(tree))
    assert flax_ckpt_compat.restore(tmp_path / "c")["n" * 500] == tree["n" * 500]


def _edit(file: Path, **changes: Any) -> None:
    """Change members of a JSON object."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _declare(path: Path, **changes: Any) -> None:
    """Change the metadata of the array ``a``, and forget its chunks; old releases left out chunks of zeros."""
    _edit(path / "a" / ".zarray", fill_value=0, **changes)
    (path / "a" / "0").unlink()
    tree = json.loads((path / "_METADATA").read_text())
    del tree["store_array_data_equal_to_fill_value"]
    (path / "_METADATA").write_text(json.dumps(tree))


def _add_entry(path: Path, key: str, depth: int = 1, value_type: str = "np.ndarray") -> None:
    """Add a leaf to the tree's metadata."""
    tree = json.loads((path / "_METADATA").read_text())["tree_metadata"]
    value = {"value_type": value_type, "skip_deserialize": value_type == "None"}
    tree["x"] = {"key_metadata": [{"key": key, "key_type": 2}] * depth, "value_metadata": value}
    _edit(path / "_METADATA", tree_metadata=tree)


def _of_gda(**changes: Any) -> Callable[[Path], None]:
    return lambda path: _edit(Path(f"{path}_gda", "b", ".zarray"), **changes)


DAMAGED = (errors.CorruptCheckpointError, errors.IncompleteCheckpointError)
# Layout, what is changed, and what the error says.
LIES: list[tuple[str, Callable[[Path], None], Any, str | None]] = [
    # A few kilobytes cannot ask for the full declared size.
    ("files", partial(_declare, shape=[2**40], chunks=[2**40]), DAMAGED[0], "but the checkpoint has"),
    ("files", partial(_declare, shape=[2**30], chunks=[1]), DAMAGED[0], "chunks are missing"),
    # Arrays of several processes are as large as their files, before memory is asked for.
    ("gda", _of_gda(shape=[2**40]), DAMAGED, r"gda/b|'b'"),
    ("gda", _of_gda(shape=[2**40], chunks=[2**39]), DAMAGED, r"gda/b|'b'"),
    ("gda", _of_gda(chunks=[1]), DAMAGED, r"gda/b|'b'"),
    ("gda", _of_gda(dimension_separator="/"), DAMAGED, r"gda/b|'b'"),
    # Half a surrogate pair, 70,000 characters, a zero, a way out: names that no file can have.
    *(
        (layout, partial(_add_entry, key=key), DAMAGED, None)
        for layout in ("ocdbt", "files", "files of zarr 3")
        for key in ("\ud800", "x" * 70_000, "\0", "..")
    ),
    # The time grew with the square of levels: 100,000 took a minute before.
    ("ocdbt", partial(_add_entry, key="a", depth=20_000, value_type="None"), errors.DepthError, None),
    ("files", partial(_add_entry, key="a", depth=20_000, value_type="None"), errors.DepthError, None),
    # Found by mutation: a list of codecs without one.
    ("files of zarr 3", lambda path: _edit(path / "a" / "zarr.json", codecs=[]), DAMAGED[0], r"zarr\.json"),
]


@pytest.mark.parametrize(("layout", "change", "error", "told"), LIES)
def test_metadata_that_lies_is_a_named_error(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, change: Any, error: Any, told: Any
) -> None:
    """It says where, at once, and is not a book."""
    monkeypatch.setattr("flax_ckpt_compat.orbax_backend.read_arrays._MAX_MISSING", 1000)
    path = copied(written, layout, tmp_path / "c")
    change(path)
    with pytest.raises(error, match=told) as caught:
        flax_ckpt_compat.restore(path)
    assert len(str(caught.value)) < 5000 and str(path) in str(caught.value)
    if isinstance(change, partial) and change.func is _declare:
        assert caught.value.leaf == "a"
    assert layout != "gda" or caught.value.leaf == "b" or "missing" in str(caught.value)


def test_arrays_of_only_the_fill_value_restore(written: Path, tmp_path: Path) -> None:
    """Of a release that left out their chunks: 80 MB of zeros, of a checkpoint of 6 kB."""
    _declare(copied(written, "files", tmp_path / "c"), shape=[10_000_000], chunks=[10_000_000])
    found = flax_ckpt_compat.restore(tmp_path / "c")["a"]
    assert (found.shape, np.count_nonzero(found)) == ((10_000_000,), 0)


def test_links_in_circles_have_no_size(checkpoint: Path) -> None:
    """The sizes that a list of checkpoints shows are those of the other files."""
    file, *others = files_of(checkpoint)
    file.unlink()
    file.symlink_to(file)
    folder = checkpoint if checkpoint.is_dir() else f"{checkpoint}_gda"
    assert location_of(folder).total_size() == sum(other.stat().st_size for other in others)


OURS: dict[str, Callable[[Path], Any]] = {
    "ours": lambda path: save(path, TREE, format="orbax"),
    "ours with zstd": lambda path: save(path, TREE, format="orbax", compression="zstd"),
    "ours in msgpack": lambda path: save(path, TREE, format="msgpack"),
}


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS | OURS)
def test_no_file_is_damaged_that_cannot_be_opened(open_path: Path, writer: str) -> None:
    """Each file and each directory of each layout, one at a time."""
    folder = open_path / "run"
    folder.mkdir()
    (WRITERS | OURS)[writer](folder / "checkpoint_1")
    for path in folder.rglob("*"):
        path.chmod(0o755)
    checkpoints.restore_checkpoint(folder, None)
    verify(folder / "checkpoint_1")  # loads all modules, where root alone may read them
    refused = 0
    for path in sorted(folder.rglob("*")):
        path.chmod(0)
        error: Exception | None = None
        report: VerifiedCheckpoint | None = None
        with as_nobody():
            try:
                checkpoints.restore_checkpoint(folder, None)
            except Exception as raised:
                error = raised
            with suppress(PermissionDeniedError):
                (report,) = verify(folder / "checkpoint_1").checkpoints
        path.chmod(0o755)
        assert error is None or isinstance(error, PermissionDeniedError), (path, error)
        assert report is None or report.state in ("ok", "unverified", "unreadable"), (path, report)
        assert error is None or report is None or report.state == "unreadable", (path, report)
        refused += error is not None
    assert refused
