"""A thin layer over the API: other modules import this one only."""
from flax.training import checkpoints


def save(folder, state, step):
    return checkpoints.save_checkpoint(folder, state, step, overwrite=True, keep=3)


def load(folder, state, step=None):
    return checkpoints.restore_checkpoint(folder, state, step)


def latest(folder):
    return checkpoints.latest_checkpoint(folder)
