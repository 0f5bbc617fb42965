"""open_checkpoint: what it shows, reads, and leaves unread; iter_checkpoints: every checkpoint of a directory."""

import datetime
import inspect
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

from flax_ckpt_compat import checkpoints, config, errors, iter_checkpoints, open_checkpoint
from tests.support.samples import SAMPLES, fingerprint
from tests.support.saves import use_flag

TREE: dict[str, Any] = {
    "params": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": jnp.zeros(3, jnp.bfloat16)},
    "opt": [{"count": np.int32(4)}, (np.ones(2), None)],
    "epoch": 3,
    "name": "run",
    "empty": {},
}
LEAVES = {
    "params/kernel": ("array", (2, 3), "float32", 24),
    "params/bias": ("array", (3,), "bfloat16", 6),
    "opt/0/count": ("numpy scalar", (), "int32", 4),
    "opt/1/0": ("array", (2,), "float64", 16),
    "epoch": ("int", (), None, None),
    "name": ("str", (), None, None),
}


@pytest.fixture
def saved(flag: bool, tmp_path: Path) -> Path:
    """TREE at step 7, in either format."""
    checkpoints.save_checkpoint(tmp_path, TREE, 7)
    return tmp_path


def test_leaves_tell_what_is_stored(saved: Path, flag: bool) -> None:
    """Each leaf has its kind, shape, dtype and bytes; None and empty dicts are not leaves."""
    with open_checkpoint(saved) as view:
        leaves = view.leaves()
        assert leaves.keys() == LEAVES.keys()
        for path, (kind, shape, dtype, nbytes) in LEAVES.items():
            leaf = leaves[path]
            assert "/".join(leaf.path) == path
            assert (leaf.kind.value, leaf.shape) == (kind, shape)
            assert leaf.dtype is None if dtype is None else leaf.dtype == jnp.dtype(dtype)
            assert nbytes is None or leaf.nbytes == nbytes
        assert leaves["params/kernel"].name == ("params.kernel" if flag else "params/kernel")


def test_format_step_and_path(saved: Path, flag: bool) -> None:
    """A view knows its format, step and path, however the checkpoint was named."""
    for path, step in ((saved, None), (saved, 7), (saved / "checkpoint_7", None), (str(saved) + "/", np.int32(7))):
        with open_checkpoint(path, step) as view:
            assert (view.format, view.step) == ("orbax" if flag else "msgpack", 7)
            assert view.path == str(saved / "checkpoint_7")


def test_tree_keeps_containers(saved: Path, flag: bool) -> None:
    """The tree of an Orbax directory has its lists and tuples, that of a msgpack file what the file has: maps."""
    with open_checkpoint(saved) as view:
        opt = view.tree["opt"]
        assert (type(opt), type(opt[1])) == (list, tuple) if flag else type(opt) is dict
        assert (opt[1][1] if flag else opt["1"]["1"]) is None
        assert view.tree["empty"] == {} and view.tree["params"]["kernel"].shape == (2, 3)


@pytest.mark.slow  # by default, test_corpus.py opens what releases wrote
@pytest.mark.parametrize("sample", SAMPLES)
def test_read_is_restore_without_a_target(sample: str, flag: bool, tmp_path: Path) -> None:
    """read() gives just what restore_checkpoint(…, None) gives, and reading leaf by leaf the same leaves."""
    checkpoints.save_checkpoint(tmp_path, SAMPLES[sample](), 1)
    expected = checkpoints.restore_checkpoint(tmp_path, None)
    with open_checkpoint(tmp_path) as view:
        assert fingerprint(view.read()) == fingerprint(expected)
        for path, leaf in view.leaves().items():
            value, want = view.read(leaf.path), expected
            for name in leaf.path:
                value, want = value[name], want[name]
            assert fingerprint(value) == fingerprint(want), path


def test_read_some_leaves(saved: Path) -> None:
    """A leaf or a subtree, as text or as a tuple, alone or in a list, comes in its place and without the others."""
    with open_checkpoint(saved) as view:
        whole = view.read()
        for paths in ("params/kernel", ("params", "kernel"), ["params/kernel"]):
            only = view.read(paths)
            assert fingerprint(only) == fingerprint({"params": {"kernel": whole["params"]["kernel"]}})
        assert fingerprint(view.read("params")) == fingerprint({"params": whole["params"]})
        some = view.read(["epoch", ("opt", 1), "empty", "params/kernel", "params"])
        assert some.keys() == {"params", "opt", "epoch", "empty"} and some["opt"].keys() == {"1"}
        whole["opt"].pop("0")
        assert fingerprint(some) == fingerprint({name: whole[name] for name in some})
        whole = view.read()
        assert view.read([]) == {}
        assert fingerprint(view.read("")) == fingerprint(whole)


def test_paths_that_are_not_there(saved: Path) -> None:
    """Paths that no leaf or subtree has are an error that names each of them and what is near."""
    with open_checkpoint(saved) as view:
        with pytest.raises(errors.MissingLeavesError, match=r"params/kernal: params/kernel") as caught:
            view.read(["epoch", "params/kernal", ("opt", 5)])
        assert caught.value.missing == ("params/kernal", "opt/5")


def test_names_with_slashes(tmp_path: Path) -> None:
    """Where two paths look the same, leaves() refuses to drop one, and tuples tell them apart."""
    (tmp_path / "file").write_bytes(serialization.msgpack_serialize({"a/b": 1, "a": {"b": 2}}))
    with open_checkpoint(tmp_path / "file") as view:
        with pytest.raises(errors.NameCollisionError, match="'a/b'"):
            view.leaves()
        assert view.read([("a", "b")]) == {"a": {"b": 2}}
        assert view.read([("a/b",)]) == {"a/b": 1}
        assert view.read("a/b") == {"a/b": 1, "a": {"b": 2}}


def test_settings_hold(saved: Path, flag: bool) -> None:
    """The setting ``structure="stored"`` gives lists and tuples here too."""
    with open_checkpoint(saved) as view, config.override(structure="stored"):
        assert type(view.read("opt")["opt"]) is (list if flag else dict)
        assert view.read("opt/1/0")["opt"].keys() == {"1"}


def bytes_read() -> int:
    """How many bytes this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the bytes in /proc/self/io")
def test_opening_reads_no_array_data(flag: bool, tmp_path: Path) -> None:
    """Of 32 MiB of arrays, opening reads no hundredth; one leaf of eight costs about its own bytes."""
    rng = np.random.default_rng(0)
    tree = {f"w{i}": rng.random(2**19) for i in range(8)}
    checkpoints.save_checkpoint(tmp_path / "small", {"a": np.ones(2)}, 1)
    with open_checkpoint(tmp_path / "small") as view:  # imports what there is to import
        view.read()
    checkpoints.save_checkpoint(tmp_path / "big", tree, 1)
    start = bytes_read()
    with open_checkpoint(tmp_path / "big") as view:
        assert {leaf.nbytes for leaf in view.leaves().values()} == {2**22}
        opened = bytes_read()
        assert opened - start < 2**25 // 100
        np.testing.assert_array_equal(view.read("w3")["w3"], tree["w3"])
        assert bytes_read() - opened < 1.1 * 2**22


def test_closed(saved: Path) -> None:
    """Values outlive the view that they came from; a closed view reads no more; leaves show what people ask of them."""
    with open_checkpoint(saved) as view:
        values = view.read()
        shown = repr(view.leaves()["params/kernel"])
    assert "shape=" in shown and "where" not in shown and "reader" not in shown
    with pytest.raises(errors.StorageError, match="closed"):
        view.read()
    np.testing.assert_array_equal(values["params"]["kernel"], TREE["params"]["kernel"])
    assert "step 7" in repr(view) and "6 leaves" in repr(view)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the bytes in /proc/self/io")
def test_a_notebook_shows_a_tree(flag: bool, tmp_path: Path) -> None:
    """Every leaf with its type and size, names escaped; its array is not read, and the files may be closed."""
    tree = {"a": {"<b>": np.ones((256, 1024), np.float32), '"Q"': "text"}, "none": None}
    checkpoints.save_checkpoint(tmp_path / "<i>", tree, 1)
    with open_checkpoint(tmp_path / "<i>") as view:
        view._repr_mimebundle_()  # imports what there is to import
        start = bytes_read()
        shown = view._repr_mimebundle_()
        assert bytes_read() - start < 2**20 // 10
    assert shown == view._repr_mimebundle_()
    assert f"<i>/checkpoint_1 ({view.format}): 2 leaves, 1.05 MB\n" in shown["text/plain"]
    assert re.search("<b> +float32.256,1024. +1 +1.05 MB\n", shown["text/plain"])
    assert "&lt;b&gt;" in shown["text/html"] and "<b>" not in shown["text/html"] and "<i>" not in shown["text/html"]


@pytest.fixture
def managed(tmp_path: Path) -> Path:
    """The root of a real CheckpointManager with a tree, a JSON item and metrics at steps 3 and 12."""
    if "custom_metadata" not in inspect.signature(ocp.args.PyTreeSave).parameters:
        pytest.skip("this orbax-checkpoint takes no metadata of the caller's")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
        with ocp.CheckpointManager(tmp_path / "root", options=options, item_names=("state", "ema", "notes")) as manager:
            for step in (3, 12):
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardSave({"w": jnp.full(2, step), "l": [jnp.ones(1)]}),
                        ema=ocp.args.PyTreeSave({"w": jnp.zeros(2)}, custom_metadata={"decay": 0.5}),
                        notes=ocp.args.JsonSave({"tags": ["a", "b"], "n": 1, "none": None}),
                    ),
                    metrics={"loss": 0.25},
                    custom_metadata={"who": "me"},
                )
    return tmp_path / "root"


def test_several_items(managed: Path) -> None:
    """A step of several items is a dict of them; JSON items are read as they are."""
    with open_checkpoint(managed) as view:
        assert (view.step, view.format) == (12, "orbax")
        assert view.tree.keys() == {"state", "ema", "notes", "metrics"}
        assert view.leaves()["state/l/0"].shape == (1,)
        assert view.tree["notes"]["tags"][1].kind.value == "str"
        assert view.read(["notes", "metrics"]) == {
            "notes": {"tags": ["a", "b"], "n": 1, "none": None},
            "metrics": {"loss": 0.25},
        }
        assert view.read("state/w")["state"]["w"].tolist() == [12, 12]
        assert fingerprint(view.read()) == fingerprint(checkpoints.restore_checkpoint(managed, None))
    with open_checkpoint(managed, step=3) as view:
        assert view.step == 3 and view.read("state/w")["state"]["w"].tolist() == [3, 3]
    with open_checkpoint(managed / "3") as view:
        assert view.step == 3
    with open_checkpoint(managed / "3" / "notes") as view:
        assert view.read("tags/1") == {"tags": {"1": "b"}}


def test_metadata_of_orbax(managed: Path) -> None:
    """Times, items, and the caller's own metadata of a real Orbax step; it does not say which release wrote it."""
    with open_checkpoint(managed, step=3) as view:
        metadata = view.metadata
    assert metadata.started is not None and metadata.committed is not None
    now = datetime.datetime.now(datetime.UTC)
    assert now - datetime.timedelta(hours=1) < metadata.started <= metadata.committed <= now
    assert metadata.custom == {"who": "me"} and metadata.custom_of_trees == {"ema": {"decay": 0.5}}
    assert set(metadata.items) == {"state", "ema", "notes", "metrics"} and metadata.writer is None


def test_metadata_of_ours(saved: Path, flag: bool) -> None:
    """Our own directories are known as ours and show none of our notes as the caller's; a msgpack file says nothing."""
    with open_checkpoint(saved) as view:
        metadata = view.metadata
    assert metadata.writer == ("flax_ckpt_compat" if flag else None)
    assert (metadata.started is not None, metadata.committed is not None) == (flag, flag)
    assert (metadata.custom, metadata.custom_of_trees, metadata.items) == ({}, {}, ())


@pytest.mark.parametrize("time", ["null", '"x"', "true", "NaN", "Infinity", "1.5", "1e400", "9" * 30])
def test_strange_notes(time: str, tmp_path: Path) -> None:
    """Notes of other types count as absent, as for Orbax; the values are still there."""
    with use_flag(True):
        path = Path(checkpoints.save_checkpoint(tmp_path, TREE, 1))
    (path / "_CHECKPOINT_METADATA").write_text(f'{{"init_timestamp_nsecs": {time}, "custom_metadata": 3}}')
    with open_checkpoint(path) as view:
        assert (view.metadata.started, view.metadata.custom) == (None, {})
        assert view.read("epoch") == {"epoch": 3}


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_notes(text: str, tmp_path: Path) -> None:
    """Nothing tells what a checkpoint had whose metadata does not decode: it is damaged."""
    with use_flag(True):
        path = Path(checkpoints.save_checkpoint(tmp_path, TREE, 1))
    (path / "_CHECKPOINT_METADATA").write_text(text)
    with pytest.raises(errors.CorruptCheckpointError, match="_CHECKPOINT_METADATA"):
        open_checkpoint(path)


def test_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    """There is nothing to list."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert [list(iter_checkpoints(tmp_path / name)) for name in ("empty", "absent", "file")] == [[], [], []]


def test_open_waits_for_real_orbax(tmp_path: Path) -> None:
    """A save that a real AsyncCheckpointer has not committed yet is waited for, as a restore does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        checkpoints.save_checkpoint(tmp_path, {"w": np.ones(10**6)}, 4, orbax_checkpointer=checkpointer)
        with open_checkpoint(tmp_path) as view:
            assert view.step == 4 and view.leaves()["w"].shape == (10**6,)
        checkpointer.close()


def test_a_checkpoint_that_is_replaced_after_it_was_opened(tmp_path: Path) -> None:
    """Of a directory no more is read, and the error does not call it damaged; a file is read on as it was."""
    for flag in (False, True):
        root = tmp_path / str(flag)
        with use_flag(flag):
            checkpoints.save_checkpoint(root, {"w": np.full(50_000, 1.0), "n": 1}, 1)
            with open_checkpoint(root) as view:
                checkpoints.save_checkpoint(root, {"w": np.full(50_000, 2.0), "n": 2}, 1, overwrite=True)
                for path in ("w", "n"):
                    if flag:
                        with pytest.raises(errors.ReplacedError, match="was replaced while it was read"):
                            view.read(path)
                    else:
                        assert np.all(view.read(path)[path] == 1)


def test_bytes_on_disk(flag: bool, tmp_path: Path) -> None:
    """The bytes are those of all files, with the arrays of a ``_gda`` folder."""
    path = Path(checkpoints.save_checkpoint(tmp_path, {"w": np.random.default_rng(0).random(1000)}, 1))
    (tmp_path / "checkpoint_1_gda").mkdir()
    (tmp_path / "checkpoint_1_gda" / "0.0").write_bytes(bytes(123))
    (record,) = iter_checkpoints(tmp_path)
    files = [file for file in (path, *path.rglob("*")) if file.is_file()]
    assert record.nbytes == sum(file.stat().st_size for file in files) + 123
