"""Publish, sync and map files of a local file system, and record their checksums (`local_file.py`)."""
