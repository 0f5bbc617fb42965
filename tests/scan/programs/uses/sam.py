"""In the style of trainers that delete before they save."""

import os
import shutil
from pathlib import Path

from flax.training.checkpoints import latest_checkpoint as newest, save_checkpoint  # expect: import
from tensorflow.io import gfile


def save(workdir, state, epoch):
    old = os.path.join(workdir, f"checkpoint_{epoch}")
    if gfile.exists(old):
        gfile.remove(old)  # expect: remove
    path = save_checkpoint(workdir, state, epoch, overwrite=True)  # expect: save
    shutil.copy(path, os.path.join(workdir, "best"))  # expect: copy
    copies = [path]
    shutil.copyfile(copies[0], "/backup/last")  # expect: copy
    size = os.path.getsize(path) / 2**20  # expect: size
    print(f"{path}: {size:.1f} MB")
    return path


def tidy(workdir):
    for file in sorted(Path(workdir).glob("checkpoint_*"))[:-3]:  # expect: glob
        file.unlink()  # expect: remove
    names = [name for name in os.listdir(workdir) if name.startswith("checkpoint_")]  # expect: glob
    steps = [int(name.split("_")[-1]) for name in names]  # expect: parse-name
    if os.path.isfile(newest(workdir)):  # expect: is-file, lookup
        os.remove(newest(workdir))  # expect: remove, lookup
    return steps


def helper(where):
    os.unlink(where)  # expect: remove


def undo(workdir, metrics):
    last, metrics["undone"] = newest(workdir), True  # expect: lookup
    os.unlink(last)  # expect: remove


def drop(workdir, n):
    helper(workdir + "/checkpoint_" + str(n))


class Saver:
    def __init__(self, folder):
        self.folder, self.last = folder, None
        self.saved = []

    def __call__(self, state, step):
        self.last = save_checkpoint(self.folder, state, step)  # expect: save
        self.saved.append(self.last)
        if len(self.saved) > 3:
            os.unlink(self.saved.pop(0))  # expect: remove

    def best(self, metrics):
        with open(os.path.join(self.folder, "metrics.json"), "w") as file:
            file.write(metrics)
        with gfile.GFile(self.last, "rb") as file:  # expect: open
            return file.read()
