"""The process that pytest-xdist starts: a fork of the zygote, which has imported everything, works in its place."""

import json
import os
import signal
import socket
import sys

from zygote import SUCCESS

# What was read of other variables when these were imported. It ends with this process, which xdist kills.
CODE = f"""
import os, select, sys, threading, flax, jax
watched = os.pidfd_open({os.getpid()})
threading.Thread(target=lambda: (select.select([watched], [], []), os._exit(1)), daemon=True).start()
flax.config.update("flax_use_orbax_checkpointing", True)
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
"""
signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the fork as well
way, (channel, its_channel) = socket.socket(socket.AF_UNIX), socket.socketpair()
way.connect(f"\0{os.environ['TESTS_ZYGOTE']}")
with its_channel:  # else this process would not see the end of the zygote
    socket.send_fds(way, [b"x"], [0, 1, 2, its_channel.fileno()])
request = {"code": CODE + sys.argv[-1] + SUCCESS, "arguments": [], "environment": {**os.environ}, "cwd": os.getcwd()}
channel.sendall(json.dumps(request).encode() + b"\n")
channel.recv(8)  # its process id
sys.exit(int.from_bytes(channel.recv(8), "big", signed=True))
