import os
import re


def latest_step(directory, prefix):
    pattern = re.compile(re.escape(prefix) + r"(\d+)$")
    steps = []
    for name in os.listdir(directory):  # expect: glob
        found = pattern.match(name)  # expect: parse-name
        if found:
            steps.append(int(found.group(1)))
    return max(steps, default=None)
