import os


def acquire(path):
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL)
    os.close(descriptor)


def release(path):
    os.remove(path)
