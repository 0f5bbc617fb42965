"""Removes all but the newest: a command of its own beside the trainer."""
import os


def prune(run_dir, keep):
    old = []
    for folder, _, names in os.walk(run_dir):  # expect: file-names
        for name in names:
            if name.startswith("checkpoint_"):
                old.append(os.path.join(folder, name))
    old.sort(key=lambda path: int(path.rsplit("_", 1)[-1]))  # expect: parse-name
    for path in old[:-keep]:
        os.remove(path)  # expect: remove
    return len(old)
