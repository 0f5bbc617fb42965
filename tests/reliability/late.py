"""Stores that execute deletions late, or again later: what has been saved under the name meanwhile has to stay."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from flax_ckpt_compat._core.object_store import s3_requests
from tests.reliability import forks
from tests.reliability.extent import Extent
from tests.reliability.judge import judge, quiet, text_of
from tests.reliability.tally import Tally
from tests.reliability.workloads import Save, Scenario, System
from tests.support import gs, s3

_SECONDS = 60
_AT_ONCE = 8  # runs that wait together for what comes late
SCENARIOS = (
    Scenario("evicted", (Save(1), Save(2, keep=1), Save(1, overwrite=True))),
    Scenario("evicted twice", (Save(1), Save(2, keep=1), Save(1, overwrite=True), Save(2, keep=1))),
    Scenario("overwritten", (Save(1), Save(1, overwrite=True), Save(1, overwrite=True))),
    Scenario("an older one overwritten", (Save(1), Save(2), Save(1, overwrite=True), Save(2))),
)


def deletions(scheme: str, *, with_botocore: bool = True) -> Callable[[System, Tally, Extent], None]:
    """Return an experiment on the store of a scheme; it does nothing where its server cannot run.

    Checkpoints are evicted or overwritten, and saved again; each deletion is executed a second time, or late."""

    def run(system: System, tally: Tally, extent: Extent) -> None:
        if scheme == "gs" and gs.why_not():
            return
        seconds = _SECONDS * extent.scale
        # The server has threads, and is told what to do: both run in one fork.
        ended = forks.run(
            lambda: _outcomes(system, scheme, seconds, with_botocore=with_botocore), timeout=seconds + 120
        )
        for outcome, where in ended.value or [(f"crash: {ended}", scheme)]:
            tally.add(outcome, where)

    return run


def _outcomes(system: System, scheme: str, seconds: float, *, with_botocore: bool) -> list[tuple[str, str]]:
    """Run batches of scenarios until the time is over, one at least; return what is wrong, and where."""
    outcomes, end, number = list[tuple[str, str]](), time.monotonic() + seconds, 0
    with _bucket(scheme) as bucket, contextlib.ExitStack() as stack:
        if not with_botocore:
            stack.enter_context(mock.patch.object(s3_requests, "is_installed", lambda: False))
        system.use()
        while not number or time.monotonic() < end:
            outcomes += _batch(system, bucket, number)
            number += 1
    return outcomes


@contextlib.contextmanager
def _bucket(scheme: str) -> Iterator[Any]:
    """A bucket, to which the variables of this process lead."""
    store: Any = gs if scheme == "gs" else s3
    with store.serving() as proxy:
        os.environ.update(store.environment(proxy))
        yield store.new_bucket(proxy)


def _batch(system: System, bucket: Any, number: int) -> list[tuple[str, str]]:
    late = s3.sometimes(1, number, ("again", "again", "delayed"))
    runs = {f"{bucket.url}/{number}-{place}": SCENARIOS[place % len(SCENARIOS)] for place in range(_AT_ONCE)}
    failed = {}
    with bucket.proxy.failing(lambda method, path: late(method, path) if method == "DELETE" else ""), quiet():
        for folder, scenario in runs.items():
            failed[folder] = _saved(system, folder, scenario)
        bucket.proxy.wait_for_late()
    found = []
    for folder, scenario in runs.items():
        after = scenario.states()[-1]
        wrong = failed[folder] or judge(system, folder, after, after, acknowledged=True, goes_on=True)
        found.append((wrong, f"{scenario.name}, batch {number}"))
    return found


def _saved(system: System, folder: str, scenario: Scenario) -> str:
    for number, save in enumerate(scenario.saves, 1):
        try:
            save.run(system, folder, number)
        except Exception as error:
            return f"blocked: save {number}: {text_of(error)}"
    return ""
