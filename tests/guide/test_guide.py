"""The guide: its steps are complete, its tables are what real readers see, its errors are the library's.

That its Python runs is tested in ``guide/test_readme.py``, for every page.
"""

import ast
import logging
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints

import flax_ckpt_compat
import legacy
import orbax_backend
from flax_ckpt_compat import checkpoints, errors, open_checkpoint
from tests.support import corpus
from tests.support.peers import ocp_v1, pytree_handler, skip_without_typed_keys
from tests.support.samples import fingerprint
from tests.support.saves import use_flag

GUIDE = Path(__file__).parents[2] / "migration_guide"
NAMES = {"np": np, "jnp": jnp, "jax": jax, "ml_dtypes": ml_dtypes}
READERS: dict[str, Callable[[str], Any]] = {
    "PyTreeCheckpointer": lambda path: ocp.PyTreeCheckpointer().restore(path),
    "StandardCheckpointer": lambda path: ocp.StandardCheckpointer().restore(path),
    "v1 load": lambda path: ocp_v1.load(path),
}


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table that follows a heading, without their backquotes."""
    text = (GUIDE / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def value_of(cell: str) -> Any:
    """The value that a cell spells; the test is skipped where the installed ml_dtypes lacks its dtype."""
    try:
        return eval(cell, dict(NAMES))
    except AttributeError as error:
        pytest.skip(str(error))


def test_which_files_are_read() -> None:
    """Every page says the same, and the corpus has files of the oldest releases that it names."""
    cases = corpus.cases()
    oldest = min(case.flax for case in cases)[:2], min(case.orbax for case in cases if case.orbax)[:2]
    claim = "every release of Flax from {}.{} and of Orbax from {}.{}".format(*oldest[0], *oldest[1])
    for page in (GUIDE.parent / "README.md", GUIDE / "index.md", GUIDE / "stability.md"):
        assert claim in " ".join(page.read_text(encoding="utf-8").split()), page
    stability = " ".join((GUIDE / "stability.md").read_text(encoding="utf-8").split())
    flax_ends, orbax_ends = (
        [".".join(map(str, end(releases))) for end in (min, max)]
        for releases in ([case.flax for case in cases], [case.orbax for case in cases if case.orbax])
    )
    counted = f"{len({case.release for case in cases})} pairs of releases wrote"
    assert f"{counted}, from Flax {' to '.join(flax_ends)} and from Orbax {' to '.join(orbax_ends)}" in stability


SEEN = rows("formats.md", "What others see")


@pytest.mark.parametrize("leaf, flax_sees", [row[:2] for row in SEEN], ids=[row[0] for row in SEEN])
def test_what_flax_sees(leaf: str, flax_sees: str, tmp_path: Path) -> None:
    """Real Flax reads our msgpack file as the table says; where that is an error, its own file is one, too."""
    value = value_of(leaf)
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path / "ours", {"x": value}, 1)
        if flax_sees == "error":
            flax_checkpoints.save_checkpoint(tmp_path / "flax", {"x": value}, 1)
            for writer in ("ours", "flax"):
                with pytest.raises(TypeError, match="data type"):
                    flax_checkpoints.restore_checkpoint(tmp_path / writer, None)
        else:
            seen = flax_checkpoints.restore_checkpoint(tmp_path / "ours", None)["x"]
            assert fingerprint(seen) == fingerprint(value if flax_sees == "same" else value_of(flax_sees))
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path / "ours", {"x": value})["x"]) == fingerprint(value)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("leaf, orbax_sees", [row[::2] for row in SEEN], ids=[row[0] for row in SEEN])
def test_what_orbax_sees(leaf: str, orbax_sees: str, reader: str, tmp_path: Path) -> None:
    """Every reader of real Orbax reads our directory as the table says, and we read the leaf as it was."""
    value = value_of(leaf)
    if "random.key" in leaf:
        skip_without_typed_keys()
    with use_flag(True):
        path = checkpoints.save_checkpoint(tmp_path, {"x": value}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = READERS[reader](path)["x"]
    assert fingerprint(seen) == fingerprint(value if orbax_sees == "same" else value_of(orbax_sees))
    assert fingerprint(checkpoints.restore_checkpoint(path, {"x": value})["x"]) == fingerprint(value)


def test_every_error_is_explained() -> None:
    """The page on errors has one section for each class, for no other, and each says what to do."""
    text = (GUIDE / "troubleshooting.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert sorted(name for name, _ in sections) == sorted(set(errors.__all__) - {"CheckpointError"})
    assert all("\n**Do:** " in section for _, section in sections)


def test_every_error_is_quoted() -> None:
    """The page quotes the messages of each class that is raised, as they are in the source."""
    packages = (flax_ckpt_compat, legacy, orbax_backend)
    files = [file for package in packages for file in Path(package.__path__[0]).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    texts = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    text = (GUIDE / "troubleshooting.md").read_text(encoding="utf-8")
    quotes = dict(re.findall(r"^### `(\w+)`\n\n\*\*Says:\*\* (.*)", text, re.MULTILINE))
    never = {"CheckpointError", "MPARestoreTargetRequiredError", "MPARestoreDataCorruptedError"}
    assert quotes.keys() == set(errors.__all__) - never
    assert [quote for line in quotes.values() for quote in re.findall("`(.+?)`", line) if quote not in texts] == []


@flax.struct.dataclass
class Run:
    """A state."""

    loss: float = 0.0


@flax.struct.dataclass
class LongerRun(Run):
    """The state with one field more."""

    epoch: int = 0


def _restored(tree: Any, target: Any) -> Callable[[Any], Any]:
    return lambda module: module.restore_checkpoint(module.save_checkpoint(os.path.abspath("runs"), tree, 1), target)


def _restored_file(content: bytes) -> Callable[[Any], Any]:
    def act(module: Any) -> Any:
        Path("checkpoint_1").write_bytes(content)
        return module.restore_checkpoint(".", None)

    return act


def _save_twice(module: Any) -> None:
    for _ in range(2):
        module.save_checkpoint(os.path.abspath("runs"), {"a": 1}, 1)


def _restore_by_orbax(flag: bool) -> Callable[[Any], Any]:
    """Restore under another name, or a msgpack file, with real Orbax instead of real Flax."""

    def act(module: Any) -> Any:
        path = module.save_checkpoint(os.path.abspath("runs"), {"a": 1}, 1)
        if module is flax_checkpoints:
            return ocp.StandardCheckpointer().restore(path, {"b": 1} if flag else None)
        return module.restore_checkpoint(path, {"b": 1} if flag else None)

    return act


def _remove(module: Any) -> None:
    os.remove(module.save_checkpoint(os.path.abspath("runs"), {"a": 1}, 1))


# What Flax says, with this flag, when this is done, and the error here.
SAID: dict[str, tuple[bool, Callable[[Any], Any], type[Exception] | None]] = {
    "The target dict keys and state dict keys do not match": (
        False,
        _restored({"a": 1}, {"a": 0, "b": 0}),
        errors.MissingLeavesError,
    ),
    "Missing field": (False, _restored(Run(), LongerRun()), errors.MissingLeavesError),
    "Unknown field(s)": (False, _restored(LongerRun(), Run()), None),
    "The size of the list and the state dict do not match": (
        False,
        _restored([1], [1, 2]),
        errors.MissingLeavesError,
    ),
    "Unpack failed: incomplete input": (False, _restored_file(b"\x81\xa1a"), errors.CorruptCheckpointError),
    "unpack(b) received extra data": (False, _restored_file(b"<html>"), errors.UnrecognizedFormatError),
    "Trying to save an outdated checkpoint at step": (False, _save_twice, errors.InvalidCheckpointError),
    "Destination": (True, _save_twice, errors.InvalidCheckpointError),
    "Checkpoint path should be absolute. Got": (True, lambda module: module.save_checkpoint("runs", {"a": 1}, 1), None),
    "JAX array with PRNGKey dtype cannot be converted": (
        False,
        lambda module: module.save_checkpoint("runs", {"a": jax.random.key(0)}, 1),
        None,
    ),
    "User-provided restore item and on-disk value metadata tree structures do not match": (
        True,
        _restore_by_orbax(True),
        errors.MissingLeavesError,
    ),
    "Found incomplete checkpoint": (False, _restore_by_orbax(False), None),
    "Is a directory": (True, _remove, IsADirectoryError),
}

# What older releases of Orbax say.
SAID_BEFORE = {
    "User-provided restore item and on-disk value metadata tree structures do not match": "Dict key mismatch",
    "Found incomplete checkpoint": "Not a valid checkpoint",
}


@pytest.mark.parametrize("said", SAID)
def test_what_flax_says(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real Flax says what the page quotes, and the same call raises here what the page says, or nothing."""
    flag, act, ours = SAID[said]
    for name, module, expected in (("flax", flax_checkpoints, Exception), ("ours", checkpoints, ours)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with use_flag(flag), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if expected is None:
                act(module)
                continue
            with pytest.raises(expected) as caught:
                act(module)
        if module is flax_checkpoints:
            texts = str(caught.value), repr(caught.value)
            assert any(quote in text for quote in (said, SAID_BEFORE.get(said, said)) for text in texts)


def test_what_flax_says_is_all_on_the_page() -> None:
    """The page quotes each of these messages, and no other."""
    assert [row[0].split("`")[0] for row in rows("troubleshooting.md", "What Flax and Orbax say")] == list(SAID)


def test_dropped_leaves_are_logged(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the target does not ask for is named in a log line at level INFO, as the guide says."""
    checkpoints.save_checkpoint(tmp_path, {"a": 1, "b": 2}, 1)
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        checkpoints.restore_checkpoint(tmp_path, {"a": 0})
    assert [record.levelname for record in caplog.records if "dropped: b" in record.message] == ["INFO"]


def test_leaves_that_are_not_damaged_can_be_read(tmp_path: Path) -> None:
    """Where one array has lost a chunk, that one is an error and the others are read, as the page on errors says."""
    checkpointer = ocp.Checkpointer(pytree_handler(use_ocdbt=False))
    checkpointer.save(tmp_path / "c", {"a": np.ones(3), "b": np.arange(3.0)})
    (tmp_path / "c" / "a" / "0").unlink()
    with open_checkpoint(tmp_path / "c") as view:
        np.testing.assert_array_equal(view.read("b")["b"], np.arange(3.0))
        for paths in ("a", None):
            with pytest.raises(errors.CorruptCheckpointError, match="'a'"):
                view.read(paths)
