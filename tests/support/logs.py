"""What the library logs, for tests of generated cases, where pytest's caplog cannot be asked per case."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """The warnings that the library logs inside the block, as text."""
    logger, handler, messages = logging.getLogger("flax_ckpt_compat"), logging.Handler(logging.WARNING), list[str]()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
