from flax.training import checkpoints


def save(workdir, state, step, metrics):
    path = checkpoints.save_checkpoint(workdir, state, step, keep=20)
    return path, metrics["loss"]
