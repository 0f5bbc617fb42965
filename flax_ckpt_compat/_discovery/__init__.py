"""Find checkpoints: formats, steps, items, and which one a caller means."""
