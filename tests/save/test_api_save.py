"""save(): where it writes, what it never replaces or removes, and who reads what it wrote."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints
from flax.training import train_state
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, config, errors, restore, save
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._discovery.formats import backend_for
from tests.support.profiles import examples
from tests.support.saves import around, names, new_folder, tree, use_flag

FORMATS = ("msgpack", "orbax")


def state() -> Any:
    """A TrainState after one step of training."""
    fresh = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones((2, 3))}, tx=optax.adam(0.1))
    return fresh.apply_gradients(grads={"w": jnp.full((2, 3), 0.5)})


def content(path: Path) -> Any:
    """Every byte below a path."""
    if path.is_file():
        return path.read_bytes()
    return {str(file.relative_to(path)): file.is_file() and file.read_bytes() for file in sorted(path.rglob("*"))}


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("asked", [None, *FORMATS])
def test_the_format_is_the_one_asked_for(tmp_path: Path, flag: bool, asked: Any) -> None:
    """An explicit format wins over Flax's flag; without one the flag decides."""
    with use_flag(flag):
        path = save(tmp_path / "here", tree(1), format=asked)
    assert path == str(tmp_path / "here")
    assert os.path.isdir(path) == (flag if asked is None else asked == "orbax")
    np.testing.assert_array_equal(restore(path)["w"], tree(1)["w"])


def test_real_flax_reads_steps(tmp_path: Path, format: Any) -> None:
    """Real Flax finds the latest step and restores it into a state, whatever its flag."""
    for step in (1, 20, 3):
        save(tmp_path, state().replace(step=step), step=step, format=format, overwrite=True)
    assert flax_checkpoints.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_20")
    for flag in (False, True):
        with use_flag(flag):
            restored = flax_checkpoints.restore_checkpoint(tmp_path, state())
        assert restored.step == 20
        np.testing.assert_array_equal(restored.opt_state[0].mu["w"], state().opt_state[0].mu["w"])


def test_paths_are_as_given(tmp_path: Path, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, with a final slash, as text or Path: the parents are made and nothing else lies beside it."""
    monkeypatch.chdir(tmp_path)
    assert save("model", tree(1), format=format) == "model"
    assert save(Path("new/deep/model"), tree(2), format=format) == "new/deep/model"
    assert save("new/./other/", tree(3), format=format) == "new/other"
    assert save("steps", tree(4), step="best", prefix="run/m_", format=format) == "steps/run/m_best"
    assert names("new/deep") == ["model"] and names("new") == ["deep", "other"]
    found = [restore(path)["n"] for path in ("model", "new/deep/model", "new/other", "steps/run/m_best")]
    assert found == [1, 2, 3, 4]
    assert restore("steps", step="best", prefix="run/m_")["n"] == 4


# A path without a name, or with one that Flax or Orbax would not take for a finished checkpoint.
NO_NAMES = ("", ".", "..", "a/..", "/", "a\0b", "x_gda", "x.orbax-checkpoint-tmp")
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"path": path}, errors.ArgumentError, "path|name") for path in NO_NAMES),
    *(({"step": 1, "keep": keep}, errors.ArgumentError, "keep") for keep in (-1, 0.5, "two", float("nan"))),
    ({"keep": 1}, errors.ArgumentError, "pass step="),  # there is nothing to count
    ({"keep_every_n_steps": 1}, errors.ArgumentError, "pass step="),
    ({"format": "Orbax"}, errors.SettingError, "'msgpack' or 'orbax'"),
    ({"format": "zarr"}, errors.SettingError, "'msgpack' or 'orbax'"),
    ({"format": "orbax", "compression": "zst"}, errors.SettingError, "'crc32c', 'zstd'"),
    ({"format": "msgpack", "compression": "zstd"}, errors.SettingError, "format='orbax'"),
]


@pytest.mark.parametrize(("given", "error", "told"), REFUSED)
def test_arguments_that_mean_nothing_are_refused(
    tmp_path: Path, given: Any, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the choices, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(error, match=told):
            save(**{"path": "model", "tree": tree(1), "overwrite": overwrite, **given})
    assert names(tmp_path) == []


def test_a_checkpoint_is_replaced_on_request_only(tmp_path: Path) -> None:
    """At a path: refused without overwrite, and with it replaced, by either format, whole; of a link, not what it leads
    to."""
    path = tmp_path / "model"
    for n, format in enumerate(["msgpack", "orbax", "orbax", "msgpack", "msgpack"]):
        if n:
            before = content(path)
            with pytest.raises(errors.InvalidCheckpointError, match="overwrite=True"):
                save(path, tree(-1), format=format)  # type: ignore[arg-type]
            assert content(path) == before
        save(path, tree(n), format=format, overwrite=n > 0)  # type: ignore[arg-type]
        assert restore(path)["n"] == n
        assert names(tmp_path) == ["model"]
        link = tmp_path / "link"
        link.symlink_to("model")
        save(link, tree(-2), format=format, overwrite=True)  # type: ignore[arg-type]
        assert (restore(path)["n"], restore(link)["n"]) == (n, -2)
        shutil.rmtree(link) if link.is_dir() else link.unlink()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_empty_may_be_replaced(tmp_path: Path, format: Any, kind: str) -> None:
    """A file of no bytes or a directory of no names holds nothing to lose."""
    path = tmp_path / "model"
    path.touch() if kind == "file" else path.mkdir()
    save(path, tree(1), format=format)
    assert restore(path)["n"] == 1


def _checkpoint_with(name: str) -> Callable[[Path], Any]:
    def make(path: Path) -> None:
        save(path, tree(1), format="orbax")
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("mine")

    return make


def _manager(path: Path) -> None:
    with ocp.CheckpointManager(path) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree(1)))


def _damaged_step(path: Path) -> None:
    _manager(path.parent / "run")
    (path.parent / "run/1").rename(path)
    (path / "_CHECKPOINT_METADATA").write_text("{")


def _items(path: Path) -> None:
    for name in ("default", "params"):
        save(path / name, tree(1), format="orbax")


# Beside the rows of tests/data/path_kinds.toml.
FOREIGN: dict[str, Callable[[Path], Any]] = {
    "image of a disk": lambda path: path.write_bytes(bytes(2**15) + b"CD001"),
    "step with a damaged record": _damaged_step,
    "pipe": os.mkfifo,
    "directory of items": _items,
    "directory of a checkpoint": lambda path: save(path / "checkpoint", tree(1), format="msgpack"),
    "manager": _manager,
    "checkpoint with notes": _checkpoint_with("notes.txt"),
    "checkpoint in a store of zarr": _checkpoint_with("zarr.json"),
    "checkpoint with a step": _checkpoint_with("checkpoint_7/weights"),
    "checkpoint with a folder": _checkpoint_with("plots/loss.png"),
    "zarr": lambda path: [(path / "a").mkdir(parents=True), (path / "a" / ".zarray").write_text("{}")],
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("step", [None, 5])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, kind: str, step: Any) -> None:
    """Files and directories of something else stay as they are, overwrite or not, at a path and at a step."""
    path = tmp_path / ("model" if step is None else "checkpoint_5")
    FOREIGN[kind](path)
    before, there = content(tmp_path), names(tmp_path)
    for overwrite in (False, True):
        for format in FORMATS:
            with pytest.raises(errors.InvalidCheckpointError) as caught:
                save(path if step is None else tmp_path, tree(2), step=step, overwrite=overwrite, format=format)  # type: ignore[arg-type]
            assert str(path) in str(caught.value) and "remove it yourself" in str(caught.value)
            assert ("step=" in str(caught.value)) == (step is None and path.is_dir())
    assert names(tmp_path) == there
    if kind != "pipe":
        assert content(tmp_path) == before


@pytest.mark.parametrize("way", ["path", "step", "save_checkpoint"])
def test_a_foreign_thing_that_comes_meanwhile_stays(
    way: str, tmp_path: Path, format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What appears at the path while a background save writes is not replaced, and the save says so."""
    path, manager, backend = tmp_path / "checkpoint_1", checkpoints.AsyncManager(), backend_for(Format(format))
    around(monkeypatch, backend, "write", then=lambda *_: [path.mkdir(), (path / "config.json").write_text("{}")])
    if way == "save_checkpoint":
        with use_flag(format == "orbax"):
            checkpoints.save_checkpoint(tmp_path, tree(1), 1, overwrite=True, async_manager=manager)
    elif way == "step":
        save(tmp_path, tree(1), step=1, format=format, overwrite=True, async_manager=manager)
    else:
        save(path, tree(1), format=format, overwrite=True, async_manager=manager)
    with pytest.raises(errors.InvalidCheckpointError):
        manager.wait_previous_save()
    assert content(tmp_path) == {"checkpoint_1": False, "checkpoint_1/config.json": b"{}"}


operations = st.lists(
    st.tuples(st.integers(0, 6), st.booleans(), st.sampled_from([None, 0, 1, 2, 3]), st.sampled_from([None, 3])),
    max_size=8,
)


@settings(max_examples=examples(40))
@given(operations=operations)
def test_retention_is_what_is_written_down(operations: list[tuple[int, bool, int | None, int | None]]) -> None:
    """Steps older than the newest need overwrite; of the rest the newest ``keep``, the spaced and the saved stay."""
    with new_folder() as folder:
        there: dict[int, int] = {}
        for n, (step, overwrite, keep, every) in enumerate(operations):
            if there and step <= max(there) and not overwrite:
                with pytest.raises(errors.InvalidCheckpointError):
                    save(folder, tree(n), step=step, keep=keep, keep_every_n_steps=every, format="msgpack")
                continue
            save(
                folder, tree(n), step=step, overwrite=overwrite, keep=keep, keep_every_n_steps=every, format=FORMATS[0]
            )  # type: ignore[arg-type]
            there[step] = n
            spaced: list[int] = []
            for old in sorted(there)[:-keep] if keep else []:
                if every and old and (not spaced or old - spaced[-1] >= every):
                    spaced.append(old)
                elif old != step:
                    del there[old]
            found = {int(step): restore(folder, step=step)["n"] for step in checkpoints.available_steps(folder)}
            assert found == there


def test_newer_steps_and_other_names_stay(tmp_path: Path, format: Any) -> None:
    """overwrite replaces its own step and nothing newer, however it is spelled, nor does the message without it promise
    so, as that of save_checkpoint; nobody else's names are touched."""
    for step in (1, 2, "7.0", 9):
        save(tmp_path, tree(2), step=step, format=format)
    for name in ("best", "notes_8"):
        save(tmp_path / name, tree(3), format=format)
    with pytest.raises(errors.InvalidCheckpointError, match=r"checkpoint_9 is newer; pass .* anyway\.$") as caught:
        save(tmp_path, tree(1), step=8, format=format)
    assert "remove" not in str(caught.value)
    save(tmp_path, tree(5), step=7, overwrite=True, format=format)
    save(tmp_path, tree(5), step=1, overwrite=True, keep=2, format=format)
    assert names(tmp_path) == ["best", "checkpoint_1", "checkpoint_7", "checkpoint_9", "notes_8"]
    assert restore(tmp_path, step=1)["n"] == restore(tmp_path, step=7)["n"] == 5


def _codec(path: str) -> Any:
    with ocp.PyTreeCheckpointer(use_ocdbt=True) as checkpointer:
        np.testing.assert_array_equal(checkpointer.restore(path)["w"], np.zeros(200_000))
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file()) < 400_000


def test_compression_of_the_call_beats_the_setting(tmp_path: Path) -> None:
    """Given to the call, None included, it wins; not given, the setting decides, and a msgpack file ignores that."""
    zeros = {"w": np.zeros(200_000)}
    assert not _codec(save(tmp_path / "a", zeros, format="orbax"))
    assert _codec(save(tmp_path / "b", zeros, format="orbax", compression="zstd"))
    with config.override(compression="zstd"):
        assert _codec(save(tmp_path / "c", zeros, format="orbax"))
        assert not _codec(save(tmp_path / "d", zeros, format="orbax", compression=None))
        save(tmp_path / "e", zeros, format="msgpack")
