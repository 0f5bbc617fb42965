"""Read, write and commit objects of ``s3://``, ``gs://`` and ``az://`` by the clients of fsspec."""
