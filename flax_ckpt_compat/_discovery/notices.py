"""Log messages that would repeat at every look-up, such as those of a program that polls a directory: each once."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable

_log = logging.getLogger("flax_ckpt_compat")
_MAX_KNOWN = 1000
_lock = threading.Lock()
_told: OrderedDict[Hashable, str] = OrderedDict()


def tell_once(subject: Hashable, message: str | None, level: int = logging.WARNING) -> None:
    """Log a message, unless it was the last one about the same subject.

    Args:
        subject: what it is about, such as a directory and a prefix.
        message: None where there is nothing to say any more: the next message is logged again.
        level: of the log record.
    """
    with _lock:
        before = _told.pop(subject, None)
        if message is not None:
            _told[subject] = message
            if len(_told) > _MAX_KNOWN:
                _told.popitem(last=False)
    if message is not None and message != before:
        _log.log(level, "%s", message)


def forget() -> None:
    """Forget what was logged, so that everything is logged again."""
    with _lock:
        _told.clear()
