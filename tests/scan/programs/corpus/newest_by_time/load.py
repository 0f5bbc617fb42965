import glob
import os


def newest(pattern):
    return max(glob.glob(pattern), key=os.path.getctime)  # expect: glob


def first_byte(run):
    return open(newest(run + "/checkpoint_[0-9]*"), "rb").read(1)  # expect: open
