"""The legacy room; see the modules."""
