"""What the library logs, for tests of generated cases, where pytest's caplog cannot be asked per case."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """The warnings that the library logs inside the block, as text."""
    logger, collector = logging.getLogger("flax_ckpt_compat"), _Collector()
    logger.addHandler(collector)
    try:
        yield collector.messages
    finally:
        logger.removeHandler(collector)
