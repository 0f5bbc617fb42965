import functools
import shutil


def retried(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for attempt in range(2):
            try:
                return function(*args, **kwargs)
            except TimeoutError:
                if attempt:
                    raise

    return wrapper


@retried
def fetch(source, target):
    return shutil.copy2(source, target)  # expect: copy
