"""The page of the guide about stores: its program runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.interpreters import run_python
from tests.support.s3 import Bucket

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "migration_guide/object_stores.md").read_text(encoding="utf-8")


def test_the_program_runs(bucket: Bucket) -> None:
    """The first program of the page runs in a fresh interpreter, with a bucket of the tests in the place of its own."""
    program, _ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    program = program.replace("s3://bucket/", f"{bucket.url}/")
    flag = "import flax; flax.config.update('flax_use_orbax_checkpointing', True)\n"
    assert "7 " in run_python(flag + program)[0]
