"""The process whose forks stand for fresh interpreters; `tests.support.interpreters` starts it and speaks to it.

``serve()`` returns in the forks only, to the main module, which executes what it returns. So a fork ends as every
other interpreter does: traceback, ``atexit``, threads, signals, exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import types
import warnings
from contextlib import suppress

# What takes seconds to import and starts no thread. Our own library is imported anew by each program.
PRELOAD = ("jax", "flax.linen", "flax.training.checkpoints", "optax", "orbax.checkpoint", "tensorstore")


def serve() -> types.CodeType:
    """Fork a process for each request, until the other end of the socket is closed.

    Returns:
        In a fork: the program to execute.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOAD:
        importlib.import_module(name)
    # Another process is writing it, or was killed meanwhile: it is compiled.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    gc.collect()
    gc.freeze()
    while True:
        message, files, *_ = socket.recv_fds(control, 1, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return _become(*files)
        for file in files:
            os.close(file)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that have ended since
                pass


def _become(stdin: int, stdout: int, stderr: int, answers: int) -> types.CodeType:
    """Fork the program's process, in which this returns; the process itself stays as its keeper."""
    with socket.socket(fileno=answers) as channel:
        with channel.makefile(encoding="utf-8") as lines:
            request = json.loads(lines.readline())
        program = os.fork()
        if program:
            _keep(program, channel, (stdin, stdout, stderr))
    for number, file in enumerate((stdin, stdout, stderr)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = ["-c", *request["arguments"]]
    if request["environment"].get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    return compile(request["code"], "<string>", "exec", dont_inherit=True)


def _keep(program: int, channel: socket.socket, files: tuple[int, ...]) -> None:
    """Send the process id of the program and, once it has ended, its exit code; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for file in files:
        os.close(file)
    with suppress(BrokenPipeError):
        channel.sendall(program.to_bytes(8, "big"))
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        channel.sendall(status.to_bytes(8, "big", signed=True))
    os._exit(0)
