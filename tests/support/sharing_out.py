"""Which tests run in one process of pytest-xdist: those of one file, and those that share teams."""

from typing import Any

# Each process that runs one of them starts processes of its own, which takes seconds.
_TEAMS = (
    "tests/multiprocess/",
    "tests/stores/test_together.py",
    "tests/orbax_backend/test_shared",
    "tests/orbax_backend/test_checksums.py::test_flips_of_other_processes_are_found",
    "tests/convert/test_convert_sharded.py",
)
# They wait for other processes and servers, half of their time; begun last, they would be waited for.
_WAITING = (_TEAMS[0], "tests/stores/", "tests/reliability/")


def group_of(test: str) -> str:
    """Return the name of all tests that run where this one does."""
    return _TEAMS[0] if test.startswith(_TEAMS) else test.partition("::")[0]


def scheduler(config: Any, log: Any) -> Any:
    """Return what shares out groups: those that wait first, in all processes but one, which computes meanwhile."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            computes = node is self.nodes[-1]
            first = min(self.workqueue, key=lambda group: group.startswith(_WAITING) == computes)
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return ByGroup(config, log)
