"""Reach what `etils.epath` reaches and TensorStore does not: ``az://``, ``hf://``, and path classes of users."""
