import os


def iter_checkpoints(folder, prefix="checkpoint_"):
    for name in sorted(os.listdir(folder)):  # expect: glob
        if name.startswith(prefix):
            yield os.path.join(folder, name)
