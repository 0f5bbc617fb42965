"""What goes wrong on purpose, and what is left then, ours beside real Flax: `python -m tests.reliability`."""
