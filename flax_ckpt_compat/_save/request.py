"""One save: what it may replace, and what it removes once it is committed."""

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
    """One save after its arguments were checked.

    Attributes:
        where: directory and prefix.
        name: of the checkpoint.
        step: as the caller gave it, for messages; None for a checkpoint that is no step of a directory.
        overwrite: replace what has that name.
        keep: how many to keep; 0 keeps all.
        careful: replace nothing but checkpoints, and remove none that are newer.
        format: what to write.
        sort_keys: write the maps of a msgpack file sorted.
        start: of the call, in seconds since the epoch.
    """

    where: CheckpointDir
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
        """Absolute final path."""
        return self.where.path(self.name)

    def check(self) -> None:
        """Refuses what ``overwrite`` does not allow."""
        if self.step is not None:
            prefixes.warn_of_overlap(self.where, self.name)
        with paths.listing_cache(self.where.directory):
            retention.check_directory(self.where, self.name, self.step)
            self._check_replaced()
            if self.step is not None and not self.overwrite:
                retention.check_overwrite(
                    self.where, self.name, self.step, removes_newer=not self.replace_only_checkpoints
                )

    def check_again(self) -> None:
        """Refuses to replace what came into this place during the save."""
        # In a store the look at what else is there would be one more request.
        if self.replace_only_checkpoints or not paths.is_url(self.where.directory):
            with paths.listing_cache(self.where.directory):
                self._check_replaced()

    def _check_replaced(self) -> None:
        if self.replace_only_checkpoints:
            retention.check_replaceable(self.where, self.name, self.step, overwrite=self.overwrite)
        else:
            retention.check_not_foreign(self.where, self.name, self.step)

    def publish(self, publish: Callable[..., None]) -> None:
        """Give what was written its name.

        Args:
            publish: does that; takes ``new``, which forbids to replace what another writer saved meanwhile.

        Raises:
            InvalidCheckpointError: it would have replaced something, and ``overwrite`` was not given.
        """
        try:
            publish(new=not self.overwrite)
        except StorageError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                self.check()  # says what is there
            raise

    def clean_up(self) -> None:
        """What overwrite and retention remove, after the commit."""
        if self.step is not None:
            newer = self.overwrite and not self.replace_only_checkpoints
            retention.clean_up(self.where, self.name, self.keep, self.overwrite, self.keep_every_n_steps, newer)

    def prepare_directory(self) -> None:
        """Makes the directory, and frees it from what dead writers left."""
        paths.prepare_directory(self.where.directory)

    def refuse_store(self, what: str, remedy: str) -> None:
        """Raises for what cannot be done to a URL."""
        if paths.is_url(self.path):
            raise StorageError(f"{self.path}: {what} cannot save to an object store; {remedy}", path=self.path)

    def committed(self) -> None:
        """What follows the commit: clean-up, and the event that Flax records."""
        global _last_saved
        if self.step is not None:
            prefixes.record(self.where, self.name)
        try:
            self.clean_up()
        finally:  # it is saved in any case
            monitoring.record_event_duration_secs(
                "/jax/checkpoint/write/duration_since_last_checkpoint_secs", self.start - _last_saved
            )
            _last_saved = self.start
