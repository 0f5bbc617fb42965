"""Save a checkpoint: validate, snapshot, write, publish, retain."""
