"""Find what a program does with `flax.training.checkpoints`, and what breaks when checkpoints become directories."""
