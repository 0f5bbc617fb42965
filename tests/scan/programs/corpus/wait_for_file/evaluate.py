import os
import time


def wait_for(workdir, step, timeout=2):
    path = os.path.join(workdir, f"checkpoint_{step}")
    start = time.time()
    while not os.path.isfile(path):  # expect: poll, is-file
        if time.time() - start > timeout:
            return "timeout"
        time.sleep(0.1)
    return "found"
