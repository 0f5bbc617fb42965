"""Which prefix saved which checkpoint in this process, for prefixes of which one is the beginning of another.

``v23`` is step 23 of the prefix ``v`` and step 3 of ``v2``. What one of them saved is neither counted nor removed by
the retention of the other; another process cannot tell, so that a save warns.
"""

from __future__ import annotations

import logging
import os
import threading

from flax_ckpt_compat._core import paths, steps
from flax_ckpt_compat._discovery.listing import CheckpointDir

_log = logging.getLogger("flax_ckpt_compat")
_lock = threading.Lock()
_saved: dict[str, dict[str, str]] = {}  # directory → name → prefix that it was saved with
_told: set[tuple[str, str, str]] = set()


def record(where: CheckpointDir, name: str) -> None:
    """Remember the prefix of a committed checkpoint."""
    with _lock:
        _saved.setdefault(_key(where), {})[name] = where.prefix


def forget(where: CheckpointDir, name: str) -> None:
    """Forget a checkpoint that was removed."""
    with _lock:
        _saved.get(_key(where), {}).pop(name, None)


def of_others(where: CheckpointDir) -> set[str]:
    """Return the names that look like steps of this prefix, but were saved with another one."""
    with _lock:
        known = dict(_saved.get(_key(where), {}))
    return {name for name, prefix in known.items() if prefix != where.prefix and _is_step(name, where.prefix)}


def warn_of_overlap(where: CheckpointDir, name: str) -> None:
    """Log a warning, once for two prefixes, where a checkpoint about to be saved belongs to both, or one that is there.

    Args:
        where: directory and prefix.
        name: of the checkpoint about to be saved.
    """
    with _lock:
        known = dict(_saved.get(_key(where), {}))
    for other_name, other in known.items():
        if other == where.prefix:
            continue
        both = name if _is_step(name, other) else other_name if _is_step(other_name, where.prefix) else None
        first, second = sorted((where.prefix, other))
        if both is not None and (_key(where), first, second) not in _told:
            _told.add((_key(where), first, second))
            _log.warning(
                "The prefixes %r and %r are both saved to %s, and %s is a step of either: other processes and later "
                "runs mistake the checkpoints of one for those of the other. Use prefixes that no other begins with, "
                "such as %r",
                first, second, where.directory, both, first + "_",
            )  # fmt: skip


def _is_step(name: str, prefix: str) -> bool:
    return steps.step_of(name, prefix) is not None


def _key(where: CheckpointDir) -> str:
    return where.directory if paths.is_url(where.directory) else os.path.realpath(where.directory)
