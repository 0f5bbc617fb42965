"""Which tests run in one process of pytest-xdist: those of one file, and those that share servers or teams."""

from __future__ import annotations

from typing import Any

# Each process that runs one of them starts processes of its own, which takes seconds.
_TEAMS = (
    "tests/multiprocess/",
    "tests/stores/test_together.py",
    "tests/stores/test_overwrites.py",
    "tests/orbax_backend/test_shared",
    "tests/legacy/test_gda_write_team.py",
    "tests/convert/test_convert_sharded.py",
    "tests/benchmarks/test_scale.py",
)
_STORES = ("tests/stores/",)


def group_of(test: str) -> str:
    """Return the name of all tests that run where this one does."""
    return next((group[0] for group in (_TEAMS, _STORES) if test.startswith(group)), test.partition("::")[0])


def scheduler(config: Any, log: Any) -> Any:
    """Return what shares out groups of tests, the largest first."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)
