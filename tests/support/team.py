"""Teams: real processes joined by ``jax.distributed`` on loopback, which run functions of the tests together.

A team lives for many jobs, so that its start is paid once; the processes are forks of a server that has imported
everything (and started no thread), so that the start takes a fraction of a second.
"""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import interpreters
from tests.support.servers import free_port

_SERVER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "PYTHONWARNINGS": "ignore",
    "TF_CPP_MIN_LOG_LEVEL": "1",
}
_START_SECONDS = 30
_teams: dict[tuple[int, int], Team] = {}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job in one process.

    Attributes:
        value: what the function returned; it has to be picklable.
        kinds: names of the classes of the error that it raised; empty if none.
        error: that error's message.
        trace: the end of its traceback.
        died: exit code of a process that ended instead of answering; None for others.
        log: stdout and stderr of a process that died or did not answer in time.
        hung: it did not answer in time, and was killed.
        seconds: how long the job took.
    """

    value: Any = None
    kinds: tuple[str, ...] = ()
    error: str = ""
    trace: str = ""
    died: int | None = None
    log: str = ""
    hung: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return not (self.kinds or self.hung or self.died is not None)


class Team:
    """Processes that have each called ``jax.distributed.initialize``.

    Attributes:
        count: how many.
        broken: one has died or been killed, so that the team is of no more use.
    """

    def __init__(self, count: int, devices: int = 2, *, outside: bool = False):
        """Starts them.

        Args:
            count: how many processes.
            devices: of each; on the CPU.
            outside: jax's coordinator, which is part of process 0, lives in a process of its own. When the coordinator
                dies, jax ends all other processes at once; when any other process dies, it does so after 100 s.
        """
        self.count, self.broken = count, False
        for attempt in range(3):  # another program may take the free port first
            self._start(devices, outside)
            outcomes = self.finish(_START_SECONDS)
            if all(outcome.ok for outcome in outcomes):
                return
            self.close()
            assert attempt < 2, outcomes

    def _start(self, devices: int, outside: bool) -> None:
        port, self.broken = free_port(), False
        self._folder = tempfile.TemporaryDirectory(prefix="team-")
        self._logs = [Path(self._folder.name, str(index)) for index in range(self.count)]
        self._pipes: list[Connection] = []
        self._members: list[Any] = []
        self._coordinator = _server().Process(target=_coordinate, args=(port, self.count), daemon=True)
        if outside:
            self._coordinator.start()
        for index, log in enumerate(self._logs):
            ours, theirs = mp.Pipe()
            setup = (index, self.count, devices, port, outside, str(log))
            member = _server().Process(target=_member, args=(theirs, *setup), daemon=True)
            member.start()
            theirs.close()
            self._pipes.append(ours)
            self._members.append(member)
        self._waited_for = set(range(self.count))

    def start(self, job: Callable[..., Any], *args: Any, only: Collection[int] | None = None) -> None:
        """Lets the processes run a function, and does not wait for them.

        Args:
            job: a function that can be imported.
            args: the function's.
            only: the processes that run it; None for all.
        """
        assert not self.broken and not self._waited_for
        self._waited_for = set(range(self.count) if only is None else only)
        for index in self._waited_for:
            self._pipes[index].send((job, args))

    def kill(self, index: int) -> None:
        """Kills one process: ``kill -9``."""
        self.broken = True
        os.kill(self._members[index].pid, signal.SIGKILL)

    def finish(self, timeout: float = 60) -> list[Outcome]:
        """What became of the job; processes that have not answered in time are killed.

        Returns:
            By process, in order; an empty one for a process that was not asked.
        """
        outcomes = [Outcome() for _ in range(self.count)]
        deadline = time.monotonic() + timeout
        while self._waited_for:
            ready = wait([self._pipes[i] for i in self._waited_for], max(0.0, deadline - time.monotonic()))
            for index in sorted(self._waited_for):
                if self._pipes[index] in ready:
                    outcomes[index] = self._receive(index)
                elif not ready:
                    self.kill(index)
                    outcomes[index] = Outcome(hung=True, log=self._log(index))
            self._waited_for -= {i for i in self._waited_for if not ready or self._pipes[i] in ready}
        return outcomes

    def _receive(self, index: int) -> Outcome:
        try:
            answer: Outcome = self._pipes[index].recv()
        except (EOFError, OSError):
            self.broken = True
            self._members[index].join(5)
            return Outcome(died=self._members[index].exitcode, log=self._log(index))
        return answer

    def run(
        self, job: Callable[..., Any], *args: Any, timeout: float = 60, only: Collection[int] | None = None
    ) -> list[Outcome]:
        """`start` and `finish`."""
        self.start(job, *args, only=only)
        return self.finish(timeout)

    def call(self, job: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """What the job returned in each process, all of which have to return."""
        outcomes = self.run(job, *args, timeout=timeout)
        failed = {index: outcome for index, outcome in enumerate(outcomes) if not outcome.ok}
        # Who knows what the processes have left undone.
        self.broken = self.broken or bool(failed)
        assert not failed, "\n".join(
            f"process {index}: {outcome.trace or outcome}\n{outcome.log}" for index, outcome in failed.items()
        )
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Kills the processes."""
        self.broken, self._waited_for = True, set()
        for member, pipe in zip(self._members, self._pipes, strict=True):
            with suppress(ProcessLookupError):
                member.kill()
            member.join(5)
            pipe.close()
        if self._coordinator.pid is not None:
            self._coordinator.kill()
            self._coordinator.join(5)
        self._folder.cleanup()

    def _log(self, index: int) -> str:
        return self._logs[index].read_text(errors="replace")[-4000:] if self._logs[index].exists() else ""


def team_of(count: int, devices: int = 2) -> Team:
    """A team that many tests use one after the other; a new one if the last was broken."""
    team = _teams.get((count, devices))
    if team is None or team.broken:
        if team is not None:
            team.close()
        team = _teams[count, devices] = Team(count, devices)
    return team


@atexit.register
def close_all() -> None:
    """Ends all teams that tests have shared."""
    for team in _teams.values():
        team.close()
    _teams.clear()


def _server() -> Any:
    """The context whose processes are forks of one that has imported all that takes long."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    variables = _SERVER_ENVIRONMENT | interpreters.COMPILATION_CACHE
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return context


def _member(
    pipe: Connection, index: int, count: int, devices: int, port: int, outside: bool, log: str
) -> None:  # pragma: no cover  (runs in the processes of a team)
    """One process of a team: joins the others, and does as it is told until the pipe is closed."""
    with open(log, "wb", 0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(interpreters.devices(devices))
    job: Any = _join
    args: Any = (index, count, port, outside)
    while True:
        pipe.send(_carried_out(job, args))
        try:
            job, args = pipe.recv()
        except EOFError:
            os._exit(0)


def _coordinate(port: int, count: int) -> None:  # pragma: no cover  (runs in a process of its own)
    _jax = _library()

    service = _jax.get_distributed_runtime_service(f"127.0.0.1:{port}", count)
    signal.pause()
    del service


def _library() -> Any:
    """The module of jaxlib that makes coordinators; it had another name up to jax 0.5."""
    from jax._src import lib

    return lib._jax if hasattr(lib, "_jax") else lib.xla_extension


def _join(index: int, count: int, port: int, outside: bool) -> int:
    import jax

    if outside and index == 0:
        _jax = _library()

        _jax.get_distributed_runtime_service = lambda *_, **__: None

    # The default of newer jax; without it, jax 0.4 computes nothing across processes on the CPU.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Also its default; without it, jax 0.4 makes other random keys where a mesh holds copies of them.
    jax.config.update("jax_threefry_partitionable", True)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        count,
        index,
        coordinator_bind_address=f"127.0.0.1:{port}",
        initialization_timeout=_START_SECONDS // 2,
    )
    assert jax.process_count() == count
    return len(jax.devices())


def _carried_out(job: Any, args: Any) -> Outcome:
    start = time.monotonic()
    try:
        value = job(*args)
    except BaseException as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        trace = "".join(traceback.format_exception(error))
        return Outcome(kinds=kinds, error=str(error), trace=trace[-3000:], seconds=time.monotonic() - start)
    return Outcome(value=value, seconds=time.monotonic() - start)
