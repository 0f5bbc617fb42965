"""Record which prefix saved which checkpoint in this process, to tell apart prefixes such as ``v`` and ``v2``.

``v23`` is step 23 of the prefix ``v`` and step 3 of ``v2``. Retention of one neither counts nor removes checkpoints
of the other. Other processes cannot know, so a save warns.
"""

from __future__ import annotations

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._discovery.log_once import log_once
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

# Changed by single operations only: with a lock, a signal handler or a fork that saves could wait for ever.
_saved: dict[str, dict[str, str]] = {}  # directory → name → prefix it was saved with


def of_directory(checkpoint_dir: CheckpointDir) -> dict[str, str]:
    """Return the record of a directory: name of a committed checkpoint → its prefix."""
    return _saved.setdefault(checkpoint_dir.directory.resolve(), {})


def saved_by_other_prefixes(checkpoint_dir: CheckpointDir) -> set[str]:
    """Return names that look like steps of this prefix, but were saved with another one."""
    known, prefix = dict(of_directory(checkpoint_dir)), checkpoint_dir.prefix
    return {name for name, other in known.items() if other != prefix and steps.step_of(name, prefix) is not None}


def warn_of_overlap(checkpoint_dir: CheckpointDir, name: str) -> None:
    """Warn, once for a pair of prefixes, if a saved checkpoint, or the one to be saved, is a step of both."""
    prefix, directory = checkpoint_dir.prefix, checkpoint_dir.directory
    for saved, other in dict(of_directory(checkpoint_dir)).items():
        is_of_both = steps.step_of(name, other) is not None or steps.step_of(saved, prefix) is not None
        if other != prefix and is_of_both:
            first, second = sorted((prefix, other))
            log_once(
                (directory.path, first, second),
                f"The prefixes {first!r} and {second!r} are both saved to {directory}, where some names are steps of "
                "both: other processes and later runs confuse their checkpoints. Use prefixes of which none is the "
                f"start of another, such as {first + '_'!r}",
            )
