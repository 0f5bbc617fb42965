"""Convert, and kill this process before its n-th call into the system: source, destination, layout, n."""

import os
import signal
import sys

import flax_ckpt_compat
from tests.support.interrupting import count_calls, interrupted

source, destination, to, at = sys.argv[1:]


def convert() -> None:
    """Convert what is left."""
    flax_ckpt_compat.convert(source, destination, to, resume=True)


if at == "count":
    print(count_calls(convert))
else:
    interrupted(convert, int(at), lambda: os.kill(os.getpid(), signal.SIGKILL))
