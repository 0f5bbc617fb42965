"""Look into checkpoints without restoring them; `plan.py` previews a restore, row by row."""
