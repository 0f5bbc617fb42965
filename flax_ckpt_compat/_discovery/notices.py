"""Log repeated messages once, for programs that poll a directory."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable

_log = logging.getLogger("flax_ckpt_compat")
_MAX_KNOWN = 1000
_lock = threading.Lock()
_logged: OrderedDict[Hashable, str] = OrderedDict()


def log_once(subject: Hashable, message: str | None, level: int = logging.WARNING) -> None:
    """Log a message, unless it was the last one about the same subject; None forgets that, so the next is logged."""
    with _lock:
        before = _logged.pop(subject, None)
        if message is not None:
            _logged[subject] = message
            if len(_logged) > _MAX_KNOWN:
                _logged.popitem(last=False)
    if message is not None and message != before:
        _log.log(level, "%s", message)
