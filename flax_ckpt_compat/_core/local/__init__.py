"""Publish, sync and map files of a local file system."""
