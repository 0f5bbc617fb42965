"""The experiments on object stores, of which real servers run here (moto, fake-gcs-server)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.reliability import forks
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import System

_PATIENCE = 300.0  # seconds until a server is there
_POLL = 0.05


def on(scheme: str, experiment: Callable[..., None]) -> Callable[[System, Tally, Extent], None]:
    """Return an experiment on the store of a scheme; it does nothing where its server cannot run."""

    def run(system: System, tally: Tally, extent: Extent) -> None:
        with _serving(scheme) as (url, environment):
            if url:
                there = dataclasses.replace(system, environment=tuple(environment.items()))
                experiment(there, tally, extent, f"{url}/run")

    return run


@contextlib.contextmanager
def _serving(scheme: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket, and the variables that lead there; the server has threads, so it runs in a fork."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        told, ended = Path(folder, "told"), Path(folder, "ended")
        with forks.running(lambda: _serve(scheme, told, ended)):
            _wait_for(told)
            url, environment = json.loads(told.read_text())
            yield url, environment
            told.unlink()
            _wait_for(ended)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} is not there after {_PATIENCE} s"
        time.sleep(_POLL)


def _serve(scheme: str, told: Path, ended: Path) -> None:
    """Serve until a file goes away."""
    from tests.support import gs, s3

    with contextlib.ExitStack() as stack:
        if scheme == "gs" and gs.why_not():
            where: tuple[str, dict[str, str]] = "", {}
        elif scheme == "gs":
            proxy = stack.enter_context(gs.serving())
            where = f"gs://{gs.new_bucket(proxy).name}", gs.environment(proxy)
        else:
            plain = stack.enter_context(s3.serving())
            where = f"s3://{s3.new_bucket(plain).name}", s3.environment(plain)
        part = told.with_suffix(".part")
        part.write_text(json.dumps(where))
        os.rename(part, told)
        while told.exists():
            time.sleep(_POLL)
    ended.touch()
