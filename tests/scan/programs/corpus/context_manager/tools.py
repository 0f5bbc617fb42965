import contextlib
import os


@contextlib.contextmanager
def removed_afterwards(path):
    try:
        yield path
    finally:
        os.remove(path)  # expect: remove
