"""In the style of score_sde: polling for a name, per-host prefixes, infinite keep."""

import time

import jax
import numpy as np
import tensorflow as tf
from flax.training import checkpoints  # expect: import


def train(workdir, state, meta, step):
    state = checkpoints.restore_checkpoint(workdir, state)  # expect: restore
    meta = checkpoints.restore_checkpoint(workdir, meta, prefix=f"meta_{jax.host_id()}_")  # expect: restore
    if jax.host_id() == 0:
        checkpoints.save_checkpoint(workdir, state, step=step, keep=np.inf)  # expect: save, process-guard
    checkpoints.save_checkpoint("checkpoints", meta, step, keep=1, prefix="meta_")  # expect: save, relative-path


def evaluate(checkpoint_dir, ckpt, state):
    ckpt_filename = tf.io.gfile.join(checkpoint_dir, "checkpoint_{}".format(ckpt))
    while not tf.io.gfile.exists(ckpt_filename):  # expect: poll
        time.sleep(60)
    try:
        return checkpoints.restore_checkpoint(checkpoint_dir, state, step=ckpt)  # expect: restore
    except:  # expect: caught-error
        time.sleep(60)
