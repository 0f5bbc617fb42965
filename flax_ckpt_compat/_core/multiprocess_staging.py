"""Stage the save of several processes: one temporary that all see, or, for a store, one local temporary each."""

from __future__ import annotations

import dataclasses
import json

from flax_ckpt_compat._core.listing import AfterCommit
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.upload import Upload


@dataclasses.dataclass(slots=True)
class Staging:
    """The temporary of one save, as one of its processes sees it; for a save to a store it is local."""

    path: str
    upload: Upload | None = None  # of a save to a store
    publishing: bool = False  # process 0 has begun to publish

    def to_json(self) -> str:
        """Encode for the other processes' `from_json`."""
        return json.dumps({"path": self.path, "upload": None if self.upload is None else self.upload.fields()})

    def publish(self, location: Location, *, new: bool, after: AfterCommit | None = None) -> None:
        """Publish what all processes wrote; called in process 0. See `Storage.publish`."""
        self.publishing = True
        if self.upload is None:
            location.publish(self.path, new=new, after=after)
        else:
            self.upload.publish(self.path, new=new, after=after)

    def cleanup(self, is_primary: bool, *, late: bool = False) -> None:
        """Remove what this process wrote, and in process 0 what all wrote, after a failed save.

        Keep what a store may already count as a checkpoint. ``late``: process 0 gave up before this process finished
        writing, which may have recreated removed files."""
        if is_primary or late or self.upload is not None:
            atomic.remove_temporary(self.path)
        if is_primary and self.upload is not None and not self.publishing:
            self.upload.abort()

    def remove_local(self) -> None:
        """Remove the local temporary of a process other than 0 after a commit to a store."""
        if self.upload is not None:
            atomic.remove_temporary(self.path)


def begin(location: Location, *, in_gda_folder: bool) -> Staging:
    """Choose the temporary; called in process 0."""
    upload = location.storage.begin_upload(location.path, in_gda_folder=in_gda_folder)
    return Staging(location.storage.temporary_path(location.path, locked=True), upload)


def from_json(text: str, location: Location, is_primary: bool) -> Staging:
    """Decode the temporary that process 0 chose for a location."""
    found = json.loads(text)
    if found["upload"] is None:
        return Staging(found["path"])
    upload = location.storage.join_upload(found["upload"])
    return Staging(found["path"] if is_primary else location.storage.temporary_path(upload.url, locked=True), upload)
