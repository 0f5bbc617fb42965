"""Describe one save: its options, its overwrite checks, and its clean-up after the commit."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable
from typing import Any

from jax import monitoring

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._discovery.listing import CheckpointDir
from flax_ckpt_compat._save import prefixes, retention

_last_saved = time.time()


@dataclasses.dataclass(frozen=True, slots=True)
class SaveRequest:
    """One save with validated arguments.

    Attributes:
        checkpoint_dir: directory and prefix.
        name: name of the checkpoint in the directory.
        step: as the caller gave it, for messages; None for a checkpoint that is no step of a directory.
        overwrite: replace what has that name.
        keep: number of checkpoints to keep; 0 keeps all.
        keep_every_n_steps: also keep one checkpoint in so many steps; None for none.
        replace_only_checkpoints: replace nothing but checkpoints, and remove none that are newer.
        format: format to write.
        sort_keys: write the maps of a msgpack file sorted.
        start: start of the call, in seconds since the epoch.
    """

    checkpoint_dir: CheckpointDir
    name: str
    step: Any
    overwrite: bool
    keep: int
    keep_every_n_steps: float | None
    replace_only_checkpoints: bool
    format: Format
    sort_keys: bool
    start: float

    @property
    def path(self) -> str:
        """Return the absolute final path."""
        return self.checkpoint_dir.path(self.name)

    def check(self) -> None:
        """Raise unless this save may write, and ``overwrite`` allows what it replaces."""
        if self.step is not None:
            prefixes.warn_of_overlap(self.checkpoint_dir, self.name)
        with paths.listing_cache(self.checkpoint_dir.directory):
            retention.check_directory(self.checkpoint_dir, self.name, self.step)
            self._check_replaced()
            if self.step is not None and not self.overwrite:
                retention.check_overwrite(
                    self.checkpoint_dir, self.name, self.step, removes_newer=not self.replace_only_checkpoints
                )

    def check_again(self) -> None:
        """Check again, just before publishing, what other writers put there during the save."""
        # In a store this would be one more request.
        if self.replace_only_checkpoints or not paths.is_url(self.checkpoint_dir.directory):
            with paths.listing_cache(self.checkpoint_dir.directory):
                self._check_replaced()

    def _check_replaced(self) -> None:
        if self.replace_only_checkpoints:
            retention.check_replaceable(self.checkpoint_dir, self.name, self.step, overwrite=self.overwrite)
        else:
            retention.check_not_foreign(self.checkpoint_dir, self.name, self.step)

    def publish(self, publish: Callable[..., None]) -> None:
        """Publish the written checkpoint under its final name.

        Args:
            publish: renames or uploads; its argument ``new`` forbids to replace what another writer saved meanwhile.

        Raises:
            InvalidCheckpointError: something has that name, and ``overwrite`` was not given.
        """
        try:
            publish(new=not self.overwrite)
        except StorageError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                self.check()  # raises an error that names what is there
            raise

    def clean_up(self) -> None:
        """Remove what overwrite and retention remove, after the commit."""
        if self.step is not None:
            newer = self.overwrite and not self.replace_only_checkpoints
            retention.clean_up(
                self.checkpoint_dir, self.name, self.keep, self.overwrite, self.keep_every_n_steps, newer
            )

    def prepare_directory(self) -> None:
        """Create the directory, and remove temporaries of dead writers."""
        paths.prepare_directory(self.checkpoint_dir.directory)

    def reject_url(self, feature: str, remedy: str) -> None:
        """Raise if the checkpoint's path is a URL."""
        if paths.is_url(self.path):
            raise StorageError(f"{self.path}: {feature} cannot save to an object store; {remedy}", path=self.path)

    def on_committed(self) -> None:
        """Clean up after the commit, and record the event that Flax records."""
        global _last_saved
        if self.step is not None:
            prefixes.record(self.checkpoint_dir, self.name)
        try:
            self.clean_up()
        finally:  # the checkpoint is saved even if the clean-up failed
            monitoring.record_event_duration_secs(
                "/jax/checkpoint/write/duration_since_last_checkpoint_secs", self.start - _last_saved
            )
            _last_saved = self.start
