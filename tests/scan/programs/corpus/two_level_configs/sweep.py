import json
import os


def configs(root):
    for run in sorted(os.listdir(root)):
        with open(os.path.join(root, run, "config.json")) as f:
            yield run, json.load(f)
