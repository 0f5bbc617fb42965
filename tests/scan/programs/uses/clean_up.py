"""A second file of the same project, which does not import the API itself."""

import glob
import os
import shutil


def clean(workdir, keep):
    found = glob.glob(os.path.join(workdir, "checkpoint_*"))  # expect: glob
    for path in sorted(found, key=os.path.getmtime)[:-keep]:
        os.remove(path)  # expect: remove
    shutil.rmtree(os.path.join(workdir, "cache"))
    os.remove(os.path.join(workdir, "log.txt"))
