"""Primitives that every other room shares; imports nothing else of ours, and neither jax nor tensorstore."""
