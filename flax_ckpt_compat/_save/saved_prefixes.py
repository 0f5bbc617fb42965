"""Record which prefix saved which checkpoint in this process, to tell apart prefixes such as ``v`` and ``v2``.

``v23`` is step 23 of the prefix ``v`` and step 3 of ``v2``. Retention of one neither counts nor removes checkpoints
of the other. Other processes cannot know, so a save warns.
"""

from __future__ import annotations

import logging

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

_log = logging.getLogger("flax_ckpt_compat")
# Changed by single operations only: with a lock, a signal handler or a fork that saves could wait for ever.
_saved: dict[str, dict[str, str]] = {}  # directory → name → prefix it was saved with
_warned: set[tuple[str, str, str]] = set()


def record(checkpoint_dir: CheckpointDir, name: str) -> None:
    """Record the prefix of a committed checkpoint."""
    _saved.setdefault(_key(checkpoint_dir), {})[name] = checkpoint_dir.prefix


def forget(checkpoint_dir: CheckpointDir, name: str) -> None:
    """Remove a checkpoint that no longer exists from the record."""
    _saved.get(_key(checkpoint_dir), {}).pop(name, None)


def saved_by_other_prefixes(checkpoint_dir: CheckpointDir) -> set[str]:
    """Return names that look like steps of this prefix, but were saved with another one."""
    known = dict(_saved.get(_key(checkpoint_dir), {}))
    return {
        name
        for name, prefix in known.items()
        if prefix != checkpoint_dir.prefix and _is_step(name, checkpoint_dir.prefix)
    }


def warn_of_overlap(checkpoint_dir: CheckpointDir, name: str) -> None:
    """Warn, once for a pair of prefixes, if a saved checkpoint, or the one to be saved, is a step of both."""
    known = dict(_saved.get(_key(checkpoint_dir), {}))
    for other_name, other in known.items():
        if other == checkpoint_dir.prefix:
            continue
        both = name if _is_step(name, other) else other_name if _is_step(other_name, checkpoint_dir.prefix) else None
        first, second = sorted((checkpoint_dir.prefix, other))
        if both is not None and (_key(checkpoint_dir), first, second) not in _warned:
            _warned.add((_key(checkpoint_dir), first, second))
            _log.warning(
                "The prefixes %r and %r are both saved to %s, and %s is a step of both: other processes and later "
                "runs confuse their checkpoints. Use prefixes of which none is the start of another, such as %r",
                first, second, checkpoint_dir.directory, both, first + "_",
            )  # fmt: skip


def _is_step(name: str, prefix: str) -> bool:
    return steps.step_of(name, prefix) is not None


def _key(checkpoint_dir: CheckpointDir) -> str:
    return checkpoint_dir.directory.resolve()
