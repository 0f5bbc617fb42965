import os


def last_step(folder):
    names = [n for n in os.listdir(folder) if n.startswith("checkpoint_")]  # expect: glob
    if not names:
        return 0
    tails = [n.replace("checkpoint_", "") for n in names]
    return max(int(t) for t in tails)  # expect: parse-name


def load_raw(folder):
    step = last_step(folder)
    with open(os.path.join(folder, "checkpoint_" + str(step)), "rb") as f:  # expect: open
        return f.read()
