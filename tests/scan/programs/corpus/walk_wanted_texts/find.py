import os


def find_all(root, suffixes):
    for folder, _, files in os.walk(root):
        yield from (os.path.join(folder, name) for name in files if name.endswith(tuple(suffixes)))
