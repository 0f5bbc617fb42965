"""The page of the guide about stores: its program runs, and its numbers are those of the requests."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from tests.support.interpreters import run_python
from tests.support.s3 import Asked, Bucket
from tests.support.saves import use_flag

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "migration_guide/object_stores.md").read_text(encoding="utf-8")


def test_the_program_runs(bucket: Bucket) -> None:
    """The first program of the page runs in a fresh interpreter, with a bucket of the tests in the place of its own."""
    program, _ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    program = program.replace("s3://bucket/", f"{bucket.url}/")
    flag = "import flax; flax.config.update('flax_use_orbax_checkpointing', True)\n"
    assert "7 " in run_python(flag + program)[0]


def kind(asked: Asked) -> str:
    """What the page calls a request."""
    if asked.is_listing:
        return "LIST"
    return "HEAD" if asked.method == "GET" and asked.status in (404, 416) else asked.method


ROWS = [line.strip("| \n").split(" | ") for line in PAGE.splitlines() if " LIST" in line]


@functools.cache  # and not when the file is collected, which every process of a run does
def tree() -> dict[str, Any]:
    """What the page's table is about."""
    return {f"{n}": {"kernel": np.ones((128, 512), np.float32), "bias": np.ones(512, np.float32)} for n in range(24)}


CALLS: dict[str, Callable[[str], Any]] = {
    "save, `keep=1`": lambda root: ours.save_checkpoint(root, tree(), 2),
    "`latest_checkpoint`": lambda root: ours.latest_checkpoint(root),
    "`plan_restore`": lambda root: flax_ckpt_compat.plan_restore(root, tree()),
    "restore": lambda root: ours.restore_checkpoint(root, tree()),
}


@pytest.mark.parametrize("column, format", [(1, "msgpack"), (2, "orbax")])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_the_requests_are_counted_right(row: list[str], column: int, format: str, bucket: Bucket) -> None:
    """No call makes more requests of a kind than the table says."""
    with use_flag(format == "orbax"):
        ours.save_checkpoint(f"{bucket.url}/run", tree(), 1)
        bucket.proxy.log.clear()
        CALLS[row[0]](f"{bucket.url}/run")
    counted = collections.Counter(map(kind, bucket.proxy.log))
    told = {name: int(number) for number, name in re.findall(r"(\d+) ([A-Z]+)", row[column])}
    assert counted <= collections.Counter(told), counted
