import logging
import os


def delete(path):
    logging.info("deleting %s", path)
    try:
        os.unlink(path)  # expect: remove
    except FileNotFoundError:
        pass
