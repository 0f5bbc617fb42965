"""Teams: real processes joined by ``jax.distributed`` on loopback, which run functions of the tests together.

A team lives for many jobs, so that its start is paid once; the processes are programs of `tests.support.interpreters`,
so that the start takes a fraction of a second.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import subprocess
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
from tests.support.interpreters import start_python
from tests.support.servers import free_port

_ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "1"}
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
        call = "import sys; from tests.support import team; team.{}(*sys.argv[1:])"
        program = call.format("coordinate")
        self._coordinator = start_python(program, port, self.count, **_ENVIRONMENT) if outside else None
        variables = _ENVIRONMENT | interpreters.devices(devices)
        self._members = [
            start_python(call.format("take_part"), index, self.count, port, int(outside), log, **variables)
            for index, log in enumerate(self._logs)
        ]
        self._jobs = [Connection(os.dup(one.stdin.fileno()), readable=False) for one in self._members]
        self._answers = [Connection(os.dup(one.stdout.fileno()), writable=False) for one in self._members]
        for member in self._members:
            member.stdin.close()
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
            self._jobs[index].send((job, args))

    def kill(self, index: int) -> None:
        """Kills one process: ``kill -9``."""
        self.broken = True
        self._members[index].kill()

    def finish(self, timeout: float = 60) -> list[Outcome]:
        """What became of the job; processes that have not answered in time are killed.

        Returns:
            By process, in order; an empty one for a process that was not asked.
        """
        outcomes = [Outcome() for _ in range(self.count)]
        deadline = time.monotonic() + timeout
        while self._waited_for:
            ready = wait([self._answers[i] for i in self._waited_for], max(0.0, deadline - time.monotonic()))
            for index in sorted(self._waited_for):
                if self._answers[index] in ready:
                    outcomes[index] = self._receive(index)
                elif not ready:
                    self.kill(index)
                    outcomes[index] = Outcome(hung=True, log=self._log(index))
            self._waited_for -= {i for i in self._waited_for if not ready or self._answers[i] in ready}
        return outcomes

    def _receive(self, index: int) -> Outcome:
        try:
            answer: Outcome = self._answers[index].recv()
        except (EOFError, OSError):
            self.broken = True
            return Outcome(died=self._members[index].wait(5), log=self._log(index))
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
        for pipe in (*self._jobs, *self._answers):
            pipe.close()
        processes = list(filter(None, (*self._members, self._coordinator)))
        for process in processes:
            process.kill()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.close()
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
        atexit.register(team.close)
    return team


def take_part(index: str, count: str, port: str, outside: str, log: str) -> None:  # pragma: no cover  (in a program)
    """One process of a team: joins the others, and does as it is told until the pipe is closed."""
    jobs, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    with open(log, "wb", 0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    job: Any = _join
    args: Any = (int(index), int(count), port, outside == "1")
    while True:
        answers.send(_carried_out(job, args))
        try:
            job, args = jobs.recv()
        except EOFError:
            os._exit(0)


def coordinate(port: str, count: str) -> None:  # pragma: no cover  (in a program)
    """The process of jax's coordinator, until the pipe is closed."""
    service = _library().get_distributed_runtime_service(f"127.0.0.1:{port}", int(count))
    sys.stdin.read()
    del service


def _library() -> Any:
    """The module of jaxlib that makes coordinators; it had another name up to jax 0.5."""
    from jax._src import lib

    return lib._jax if hasattr(lib, "_jax") else lib.xla_extension


def _join(index: int, count: int, port: str, outside: bool) -> int:
    import flax
    import jax

    if outside and index == 0:
        _library().get_distributed_runtime_service = lambda *_, **__: None

    flax.config.update("flax_use_orbax_checkpointing", True)  # Flax's default, which programs turn off
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
