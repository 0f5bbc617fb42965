"""The guide: its steps are complete, its tables are what real readers see, its errors are the library's.

That its Python runs is tested in ``guide/test_readme.py``, for every page.
"""

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints, errors, open_checkpoint
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
    """The page on errors has one row for each class that the library raises, and for no other."""
    explained = [row[0] for row in rows("troubleshooting.md", "Errors")]
    assert len(set(explained)) == len(explained)
    assert set(explained) == set(errors.__all__) - {"CheckpointError"}


def test_every_step_is_there() -> None:
    """No step of a checkpointing guide has gone from ours."""
    text = (GUIDE / "guide.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for call in (
        "save_checkpoint(",
        "target=None",
        "flax.struct.dataclass",
        "orbax_transforms={}",
        "async_manager=",
        "NamedSharding",
        "save_checkpoint_multiprocess(",
        "flax_use_orbax_checkpointing",
        "open_checkpoint(",
        "iter_checkpoints(",
    ):
        assert call in blocks
    assert "not run" not in text


@pytest.mark.parametrize("page", ["guide.md", "changed_state.md", "formats.md", "troubleshooting.md"])
def test_pages_are_linked(page: str) -> None:
    """The first page of the guide leads to every other, and the README to the guide."""
    assert f"]({page})" in (GUIDE / "index.md").read_text(encoding="utf-8")
    assert "](migration_guide/guide.md)" in (GUIDE.parent / "README.md").read_text(encoding="utf-8")


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
