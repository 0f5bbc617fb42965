"""Share primitives with all other packages; import none of them, nor jax or flax."""
