"""In the style of scenic and big_vision: reading files by hand, pinning the flag, patterns for names."""

import re

import flax
import flax.training.checkpoints as ckpts  # expect: import
from flax import serialization
from flax.training import checkpoints, orbax_utils, train_state  # expect: import, orbax-utils
import functools

flax.config.update("flax_use_orbax_checkpointing", False)  # expect: flag
SIGNED_FLOAT_RE = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)")

restore = functools.partial(ckpts.restore_checkpoint, target=None)  # expect: restore, untyped-restore
manager = ckpts.AsyncManager()  # expect: async-manager


def load(checkpoint_path):
    with open(checkpoint_path, "rb") as file:  # expect: open
        tree = serialization.msgpack_restore(file.read())
    owl = checkpoints.restore_checkpoint(checkpoint_path, None)["optimizer"]  # expect: restore, untyped-restore
    return checkpoints.convert_pre_linen(owl), tree  # expect: other-api


def step_of(workdir):
    path = checkpoints.latest_checkpoint(workdir)  # expect: lookup
    match = re.search(r"checkpoint_(\d+)", path)  # expect: parse-name
    return match and int(match.group(1))


def new(path, state):
    args = orbax_utils.restore_args_from_target(state)  # expect: orbax-utils
    return checkpoints.restore_checkpoint(path, state, orbax_transforms={}), args  # expect: restore, transforms


def with_config(config, state):
    config.flax_use_orbax_checkpointing = True  # expect: flag
    if config.flax_use_orbax_checkpointing:  # expect: flag
        save = checkpoints.save_checkpoint_multiprocess
        save("gs://bucket/run", state, 1)  # expect: multiprocess-save
