"""Start a program that serves on loopback, and wait until it answers."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

PATIENCE = 60.0  # s


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def serving(command: Sequence[str], port: int, *, stdin: int) -> Iterator[None]:
    """Run a program that serves at a port; ``stdin`` as for `subprocess.Popen`."""
    # Into a file: a pipe that nobody empties would stop the server.
    with (
        tempfile.TemporaryFile() as told,
        subprocess.Popen(command, stdin=stdin, stdout=told, stderr=told) as process,
    ):
        try:
            end = time.monotonic() + PATIENCE
            while True:
                assert process.poll() is None, f"the server ended: {command}"
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert time.monotonic() < end, "the server did not answer"
                time.sleep(0.02)
            yield
        finally:
            process.kill()
