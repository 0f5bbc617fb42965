"""Local copies of folders of a store that TensorStore does not reach."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flax_ckpt_compat._core.epath_store import copies
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.storage import Stat
from tests.support.interpreters import start_python
from tests.support.shelf import Shelf


def test_what_is_there_is_copied_once(shelf: Shelf) -> None:
    """The same files are the same folder; what changed is copied anew, and the old copy stays for who reads it."""
    shelf.put("run/a/b", b"1")
    shelf.put("run/c", b"")
    first = location_of(f"{shelf.url}/run").kvstore()["path"]
    assert {str(path.relative_to(first)): path.read_bytes() for path in Path(first).rglob("*") if path.is_file()} == {
        "a/b": b"1",
        "c": b"",
    }
    assert location_of(f"{shelf.url}/run").kvstore()["path"] == first
    shelf.put("run/c", b"longer")
    second = location_of(f"{shelf.url}/run").kvstore()["path"]
    assert second != first
    assert Path(second, "c").read_bytes() == b"longer" and Path(first, "c").read_bytes() == b""


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b"])
def test_names_that_lead_out_are_refused(name: str, shelf: Shelf) -> None:
    """Nothing is written outside of the copy, whatever a store lists."""
    with pytest.raises(CorruptCheckpointError, match="do not use it"):
        copies.kvstore_of_copy(location_of(shelf.url), {name: Stat(1, "1")})


def test_copies_go_with_their_process(tmp_path: Path) -> None:
    """The end of a forked process leaves those of its parent."""
    program = """
import os, sys
from flax_ckpt_compat._core.epath_store import copies
root = copies._root()
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
print(os.path.isdir(root), root)
"""
    out, err = start_python(program, cwd=tmp_path).communicate(timeout=60)
    assert err == "" or "Error" not in err
    was_there, root = out.split()
    assert was_there == "True" and not os.path.exists(root)
