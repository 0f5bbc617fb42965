"""Where several processes write one checkpoint: into what all of them see, or into a store, and each beside it."""

from __future__ import annotations

import dataclasses
import json

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import commit, multiprocess
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload


@dataclasses.dataclass(slots=True)
class Staging:
    """The place of one save, as one of its processes knows it.

    Attributes:
        path: local temporary; of a save to a store, what this process alone sees.
        shares: of a save to a store.
        begun: process 0 has begun to publish.
    """

    path: str
    shares: MultiprocessUpload | None = None
    begun: bool = False

    def to_json(self) -> str:
        """Text from which the other processes `from_json`."""
        shares = None if self.shares is None else dataclasses.asdict(self.shares)
        return json.dumps({"path": self.path, "shares": shares})

    def publish(self, path: str, *, new: bool) -> None:
        """Process 0 gives what all have written its final name; see `paths.publish`."""
        self.begun = True
        if self.shares is None:
            paths.publish(self.path, path, new=new)
        else:
            multiprocess.publish(self.shares, self.path, new=new)

    def give_up(self, leads: bool, *, late: bool = False) -> None:
        """Remove what this process wrote, and process 0 what all did, of a save that failed.

        What a store may already count as a checkpoint stays.

        Args:
            leads: in process 0.
            late: process 0 has given up before this process had ended, which may have made anew what was removed.
        """
        if leads or late or self.shares is not None:
            atomic.remove_temporary(self.path)
        if leads and self.shares is not None and not self.begun:
            multiprocess.withdraw(self.shares)

    def leave(self) -> None:
        """Removes what only a process that does not publish still has of a save that is committed."""
        if self.shares is not None:
            atomic.remove_temporary(self.path)


def begin(path: str, *, beside: bool) -> Staging:
    """Process 0 chooses the place.

    Args:
        path: of the checkpoint, or its URL.
        beside: arrays go into a folder beside it.

    Raises:
        StorageError: the store refused.
    """
    if not paths.is_url(path):
        return Staging(atomic.temporary_path(path))
    return Staging(commit.staging_path(path), multiprocess.begin(path, beside=beside))


def from_json(to_json: str, leads: bool) -> Staging:
    """The place that process 0 chose.

    Args:
        told: by `Staging.told`.
        leads: in process 0 itself.
    """
    found = json.loads(to_json)
    if found["shares"] is None:
        return Staging(found["path"])
    shares = MultiprocessUpload(**found["shares"])
    return Staging(found["path"] if leads else commit.staging_path(shares.url), shares)
