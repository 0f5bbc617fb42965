"""What real old releases of Flax and Orbax read of our files: `python -m tests.readers_matrix`."""
