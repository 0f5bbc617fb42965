"""Programs in interpreters of their own: forks of one that has imported jax, Flax, Orbax and the library.

They differ from what ``python -c`` starts in one thing: those modules are loaded before the program begins. A test of
just that asks for a fresh interpreter; it also gets one where it sets a variable that they read when they are imported.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support import zygote

ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "FLAX_USE_ORBAX_CHECKPOINTING": "false"}
# Variables for all processes that are forked; set when the session starts.
COMPILATION_CACHE: dict[str, str] = {}
ADDRESS = "TESTS_ZYGOTE"  # variable: where the process listens that is forked
_READ_AT_IMPORT = ("JAX_", "FLAX_USE_", "PYTHON")


class Program:
    """A running program, with those methods of `subprocess.Popen` that tests need.

    Attributes:
        pid: of its process, which is not a child of this one.
        returncode: as in `subprocess.Popen`; None until somebody has waited for its end.
        stdin: what it reads.
        stdout: what it prints.
        stderr: what it prints there.
    """

    def __init__(self, code: str, arguments: list[str], environment: dict[str, str], cwd: str):
        """Start it."""
        (its_in, our_in), (our_out, its_out), (our_err, its_err) = os.pipe(), os.pipe(), os.pipe()
        self._channel, its_channel = socket.socketpair()
        files = [its_in, its_out, its_err, its_channel.detach()]
        socket.send_fds(_zygote(), [b"x"], files)
        for file in files:
            os.close(file)
        request = {"code": code, "arguments": arguments, "environment": environment, "cwd": cwd}
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._receive(None)
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = os.fdopen(our_in, "w"), os.fdopen(our_out), os.fdopen(our_err)

    def _receive(self, timeout: float | None) -> int:
        self._channel.settimeout(timeout)
        answer = self._channel.recv(8)
        assert len(answer) == 8, "the process whose forks are the programs has ended"
        return int.from_bytes(answer, "big", signed=True)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code."""
        if self.returncode is None:
            try:
                self.returncode = self._receive(timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        try:
            return self.wait(0.001)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return all that it prints once it has ended; kill it where that takes too long."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            finally:
                self.kill()
        self.close()
        return texts[0].result(), texts[1].result()

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Do what ``kill -9`` does."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the files that lead to it."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self.stderr.close()
        self._channel.close()


def devices(count: int) -> dict[str, str]:
    """Return the variable that splits the processor into devices, and keeps what the run says of compilation."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}".strip()}


def start_zygote() -> None:
    """Start the process that is forked, also for all that inherit this one's variables; it ends with this one."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0tests-{os.getpid()}-{id(listener)}")
    listener.listen()
    os.environ[ADDRESS] = listener.getsockname()[1:].decode()
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-c", "from tests.support import zygote; exec(zygote.serve())", str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, **COMPILATION_CACHE},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    assert process.stdin is not None
    atexit.register(lambda pipe: (pipe.close(), process.wait()), process.stdin)


@functools.cache
def _zygote() -> socket.socket:
    """The way to the process that is forked."""
    if ADDRESS not in os.environ:
        start_zygote()
    way = socket.socket(socket.AF_UNIX)
    way.connect(f"\0{os.environ[ADDRESS]}")
    atexit.register(way.close)
    return way


def start_python(
    code: str, *arguments: Any, fresh: bool = False, whole_end: bool = False, cwd: Any = ".", **environment: str
) -> Any:
    """Start a program that imports the library and these helpers from the checkout.

    Args:
        code: the program.
        arguments: its ``sys.argv[1:]``.
        fresh: in an interpreter that has imported nothing yet.
        whole_end: after exit handlers, files left open shall be flushed, and what ``__del__`` of globals does be seen.
        cwd: its working directory.
        environment: variables to set.

    Returns:
        A `Program`, or a `subprocess.Popen`.
    """
    code, words = textwrap.dedent(code), [str(argument) for argument in arguments]
    variables = {**os.environ, **_ENVIRONMENT, **environment}
    if fresh or any(name.startswith(_READ_AT_IMPORT) for name in environment.keys() - {"PYTHONWARNINGS"}):
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", code, *words]
        return subprocess.Popen(command, env=variables, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    return Program(code if whole_end else code + zygote.SUCCESS, words, variables, os.path.abspath(cwd))


def run_python(code: str, *arguments: Any, timeout: float = 120, **options: Any) -> tuple[str, str]:
    """Return what a program wrote to stdout and stderr; it must end without an error. See `start_python`."""
    process = start_python(code, *arguments, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out, err
