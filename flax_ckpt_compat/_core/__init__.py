"""Share primitives with every other room; import nothing above this one, and neither jax nor tensorstore."""
