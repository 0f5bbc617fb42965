"""Stage the save of several processes: one temporary that all see, or, for a store, one local temporary each."""

from __future__ import annotations

import dataclasses
import json

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import commit, multiprocess
from flax_ckpt_compat._core.object_store.multiprocess import MultiprocessUpload


@dataclasses.dataclass(slots=True)
class Staging:
    """The temporary of one save, as one of its processes sees it; for a save to a store it is local."""

    path: str
    upload: MultiprocessUpload | None = None  # the upload of a save to a store, or None
    publishing: bool = False  # process 0 has begun to publish

    def to_json(self) -> str:
        """Encode for the other processes' `from_json`."""
        upload = None if self.upload is None else dataclasses.asdict(self.upload)
        return json.dumps({"path": self.path, "upload": upload})

    def publish(self, path: str, *, new: bool) -> None:
        """Publish what all processes wrote; called in process 0. See `paths.publish`."""
        self.publishing = True
        if self.upload is None:
            paths.publish(self.path, path, new=new)
        else:
            multiprocess.publish(self.upload, self.path, new=new)

    def cleanup(self, is_primary: bool, *, late: bool = False) -> None:
        """Remove what this process wrote, and in process 0 what all wrote, after a failed save.

        Keep what a store may already count as a checkpoint. ``late``: process 0 gave up before this process finished
        writing, which may have recreated removed files."""
        if is_primary or late or self.upload is not None:
            atomic.remove_temporary(self.path)
        if is_primary and self.upload is not None and not self.publishing:
            multiprocess.abort(self.upload)

    def remove_local(self) -> None:
        """Remove the local temporary of a process other than 0 after a commit to a store."""
        if self.upload is not None:
            atomic.remove_temporary(self.path)


def begin(path: str, *, in_gda_folder: bool) -> Staging:
    """Choose the temporary; called in process 0."""
    upload = multiprocess.begin(path, in_gda_folder=in_gda_folder) if paths.is_url(path) else None
    return Staging(paths.storage_of(path).temporary_path(path), upload)


def from_json(text: str, is_primary: bool) -> Staging:
    """Decode the temporary that process 0 chose."""
    found = json.loads(text)
    if found["upload"] is None:
        return Staging(found["path"])
    upload = MultiprocessUpload(**found["upload"])
    return Staging(found["path"] if is_primary else commit.staging_path(upload.url), upload)
