"""Read, upload and commit objects of ``s3://`` and ``gs://``."""
