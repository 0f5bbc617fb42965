"""Convert checkpoints: find → open → check → write → compare → publish, one checkpoint a job."""
