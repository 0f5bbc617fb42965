"""Flax with Orbax, without the legacy API."""

import os

import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training import train_state


def save(workdir, state, step):
    with ocp.CheckpointManager(os.path.abspath(workdir)) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))
        return manager.latest_step(), nn.Dense, train_state


def restore_checkpoint(path):
    with open(path, "rb") as file:
        return file.read()


checkpoint_path = "checkpoint_1"
os.remove(checkpoint_path)
restore_checkpoint(checkpoint_path)
