"""The orbax_backend room; see the modules."""
