"""The process whose forks stand for fresh interpreters; `tests.support.interpreters` starts it and speaks to it.

``serve()`` returns in the forks only, to the main module, which executes what it returns. So a fork ends as every
other interpreter does: traceback, threads, ``atexit``, signals, exit code. What comes after those takes most of the
time of a small program, and is left out where it has run `SUCCESS`.
"""

import atexit
import gc
import importlib
import json
import os
import selectors
import socket
import struct
import sys
import types
import warnings
from contextlib import suppress

_STDIN = 0
# What takes seconds to import and starts no thread.
PRELOAD = (
    *("jax", "flax.linen", "flax.training.checkpoints", "optax", "orbax.checkpoint", "tensorstore"),
    # Of teams, and of the processes of pytest-xdist.
    *("flax.training.train_state", "jaxlib.mlir.dialects.mhlo", "pytest"),
    *("flax.nnx", "hypothesis", "orbax.checkpoint.experimental.v1"),
    *(f"flax_ckpt_compat.{name}" for name in ("checkpoints", "legacy", "orbax_backend", "rules")),
)
# Variables that our library reads when it is imported: a program with one of them imports it anew.
_OUR_VARIABLES = "FLAX_CKPT_COMPAT_"
SUCCESS = "\nfrom tests.support import zygote\nzygote.has_succeeded = True"  # the last lines of a program
has_succeeded = False


def serve() -> types.CodeType:
    """Fork a process for each request of those that connect, until standard input is closed.

    Returns:
        In a fork: the program to execute.
    """
    listener = socket.socket(fileno=int(sys.argv[1]))
    atexit.register(_end)  # after what the modules below register
    for name in PRELOAD:
        with suppress(Exception):  # another release may lack it, or not load beside the others: a program tells of it
            importlib.import_module(name)
    # Another process is writing it, or was killed meanwhile: it is compiled.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    gc.collect()
    gc.freeze()
    clients: dict[int, socket.socket] = {}
    running: dict[int, tuple[int, socket.socket]] = {}  # of each program's pidfd: its process id, and who waits for it
    with selectors.PollSelector() as ready:  # forks share nothing with it
        ready.register(listener, selectors.EVENT_READ)
        ready.register(_STDIN, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fd == _STDIN:
                    os._exit(0)
                elif key.fd == listener.fileno():
                    client, _ = listener.accept()
                    if _is_ours(client):
                        clients[client.fileno()] = client
                        ready.register(client, selectors.EVENT_READ)
                elif key.fd in running:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    _report(*running.pop(key.fd))
                elif files := socket.recv_fds(clients[key.fd], 1, 4)[1]:
                    if (program := os.fork()) == 0:
                        _close_all(listener, *clients.values(), *(channel for _, channel in running.values()))
                        _close_all(*running)
                        return _become(*files)
                    _close_all(*files[:3])
                    channel = socket.socket(fileno=files[3])
                    pidfd = os.pidfd_open(program)
                    running[pidfd] = (program, channel)
                    ready.register(pidfd, selectors.EVENT_READ)
                    with suppress(BrokenPipeError):
                        channel.sendall(program.to_bytes(8, "big"))
                else:
                    ready.unregister(key.fd)
                    clients.pop(key.fd).close()


def _end() -> None:
    """End a program that succeeded, after its exit handlers: taking modules apart would copy its parent's memory."""
    if has_succeeded:
        with suppress(Exception):  # an output that is None or closed is for the interpreter
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _is_ours(client: socket.socket) -> bool:
    """Return whether the user who connects is the one of this process; everybody can, and what is sent is executed."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def _close_all(*files: socket.socket | int) -> None:
    for file in files:
        os.close(file if isinstance(file, int) else file.detach())


def _become(stdin: int, stdout: int, stderr: int, answers: int) -> types.CodeType:
    """Make this fork the program's process."""
    with socket.socket(fileno=answers) as channel, channel.makefile(encoding="utf-8") as lines:
        request = json.loads(lines.readline())
    for number, file in enumerate((stdin, stdout, stderr)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = ["-c", *request["arguments"]]
    if any(name.startswith(_OUR_VARIABLES) for name in request["environment"]):
        for name in [name for name in sys.modules if name.startswith("flax_ckpt_compat")]:
            del sys.modules[name]
    if request["environment"].get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    return compile(request["code"], "<string>", "exec", dont_inherit=True)


def _report(program: int, channel: socket.socket) -> None:
    """Send the exit code of a program that has ended."""
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with channel, suppress(BrokenPipeError):
        channel.sendall(status.to_bytes(8, "big", signed=True))
