"""Restore a checkpoint: locate, open, plan, read, place, rebuild."""
