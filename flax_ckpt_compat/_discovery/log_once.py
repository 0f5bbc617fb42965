"""Log repeated messages once, for programs that poll a directory."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable

_log = logging.getLogger("flax_ckpt_compat")
_MAX_KNOWN = 1000
# Changed by single operations only: with a lock, a signal handler or a fork that looks could wait for ever.
_logged: OrderedDict[Hashable, str] = OrderedDict()


def log_once(subject: Hashable, message: str | None, level: int = logging.WARNING) -> None:
    """Log a message, unless it was the last one about the same subject; None clears it, so that the next is logged."""
    before = _logged.pop(subject, None)
    if message is None:
        return
    _logged[subject] = message
    if len(_logged) > _MAX_KNOWN:
        _logged.popitem(last=False)
    if message != before:
        _log.log(level, "%s", message)
