"""Random differential tests: a few of each kind in the suite, any number with ``python -m tests.random_cases``."""
