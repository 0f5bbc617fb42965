"""Convert checkpoints: find → open → check → write → verify → publish, one checkpoint a job."""
