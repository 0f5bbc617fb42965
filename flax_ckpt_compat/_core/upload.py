"""Define `Upload`: a save by several processes to a storage where they share no directory."""

from __future__ import annotations

import abc
from collections.abc import Collection

from flax_ckpt_compat._core.progress import OFF, Meter


class Upload(abc.ABC):
    """The files of one save that its processes write below unique names, until process 0 commits them.

    Attributes:
        url: the checkpoint's path.
        folder: the path of the folder that all write below: the checkpoint's, or that of its arrays.
        needs_commit_file: others take the folder for incomplete unless it has ``commit_success.txt``.
    """

    url: str
    folder: str
    needs_commit_file: bool

    @property
    @abc.abstractmethod
    def tag(self) -> str:
        """Return the suffix of the names of directories that no other save uses."""

    @abc.abstractmethod
    def fields(self) -> dict[str, str]:
        """Return what other processes need to join; see `Storage.join_upload`."""

    @abc.abstractmethod
    def written(self) -> list[str]:
        """List what the processes have written so far, relative to the folder."""

    @abc.abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write one file below the folder."""

    @abc.abstractmethod
    def upload_files(self, directory: str, names: Collection[str], last: str, meter: Meter = OFF) -> None:
        """Upload this process's files under the same names; ``last`` tells others that all are complete.

        Raise ConcurrentWriteError if process 0 has aborted the save."""

    @abc.abstractmethod
    def check_active(self, written: Collection[str]) -> None:
        """Raise ConcurrentWriteError, after removing what this process wrote, if process 0 has aborted the save."""

    @abc.abstractmethod
    def delete_harmless(self, name: str) -> None:
        """Delete a file below the folder without which the save is as complete as with it, if that is permitted."""

    @abc.abstractmethod
    def publish(self, staged: str, *, new: bool) -> None:
        """Commit what all processes wrote, with what process 0 has still in ``staged``; see `Storage.publish`."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Remove what a failed save has written, unless it is committed; ignore refusals."""
