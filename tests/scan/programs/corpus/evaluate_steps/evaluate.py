from flax.training import checkpoints


def todo(run, done):
    return [step for step in checkpoints.available_steps(run) if step not in done]


def load(run, step, state):
    return checkpoints.restore_checkpoint(f"{run}/checkpoint_{step}", state)
