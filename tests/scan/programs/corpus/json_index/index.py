import json
import os


def write_index(folder, entries):
    with open(os.path.join(folder, "index.json"), "w") as f:
        json.dump(entries, f)


def read_index(folder):
    with open(os.path.join(folder, "index.json")) as f:
        return json.load(f)
