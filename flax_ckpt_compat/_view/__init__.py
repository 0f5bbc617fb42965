"""Look into checkpoints and plans without restoring them."""
