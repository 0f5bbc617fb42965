"""What several processes write into a store for one checkpoint: below names of this save alone, until it is committed.

Process 0 marks the folder that takes it. All processes then write below names that end in the mark's number, which no
other save writes to, and which the checkpoint that is to be replaced does not have: that one stays whole until process
0 has seen that all of the new one is there. The commit is that of a save by one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import posixpath
from collections.abc import Collection

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import client, commit, uploads, views
from flax_ckpt_compat._core.object_store.lease import (
    ConcurrentWriteError,
    WriteLease,
    after_commit,
    is_mark,
    tag_of,
)
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX


@dataclasses.dataclass(frozen=True, slots=True)
class MultiprocessUpload:
    """A save by several processes to a store.

    Attributes:
        url: of the checkpoint.
        folder: the URL that they write below: the checkpoint's, or that of the arrays beside it.
        mark: name of the object in it that tells of this save.
        replaced: version of the object at the URL before that, in hexadecimal.
    """

    url: str
    folder: str
    mark: str
    replaced: str

    @property
    def tag(self) -> str:
        """What the names of directories end in that are this save's alone."""
        return tag_of(self.mark)

    def is_ours(self, key: str) -> bool:
        """Whether an object in the folder is one that this save's processes wrote together."""
        return key.partition("/")[0].endswith(self.tag) and "/" in key

    def written(self) -> list[str]:
        """What the processes have written so far, relative to the folder."""
        return [key for key in client.fresh_keys(self.folder) if self.is_ours(key)]


def begin(url: str, *, beside: bool) -> MultiprocessUpload:
    """Process 0 marks the folder; nothing is removed.

    Args:
        url: of the checkpoint.
        beside: the arrays go into a folder beside it.
    """
    folder = url + ARRAYS_POSTFIX if beside else url
    replaced = client.version(url)
    return MultiprocessUpload(url, folder, WriteLease(folder, replaces=not beside).mark, replaced.hex())


def upload(shares: MultiprocessUpload, directory: str, names: Collection[str], last: str) -> None:
    """Writes a process's files as objects of the same names in the folder.

    Args:
        shares: the save.
        directory: local path that the names are relative to.
        names: of files that are `is_ours`.
        last: of the file that says that all others are there.

    Raises:
        StorageError: the store refused, or process 0 has given the save up.
    """
    uploads.upload(directory, shares.folder, [name for name in names if name != last], {})
    uploads.upload_file(posixpath.join(directory, last), f"{shares.folder}/{last}")
    check_goes_on(shares, names)


def check_goes_on(shares: MultiprocessUpload, written: Collection[str]) -> None:
    """Removes what this process wrote if nobody waits for it any more.

    Raises:
        StorageError: it is so.
    """
    if client.is_object(f"{shares.folder}/{shares.mark}"):
        return
    client.delete_all(f"{shares.folder}/{name}" for name in written)
    message = f"{shares.url}: process 0 has given up this save, or another one replaced it, so nothing was saved"
    raise ConcurrentWriteError(message, path=shares.url)


def publish(shares: MultiprocessUpload, staged: str, *, new: bool) -> None:
    """Makes a checkpoint of what all processes wrote and of what process 0 has beside that, replacing what is there.

    Args:
        shares: the save.
        staged: local path of what is still to be uploaded: the msgpack file, or the directory.
        new: replace no other checkpoint.

    Raises:
        ConcurrentWriteError: another process writes, or has just written, the same checkpoint.
        StorageError: the store refused.
    """
    turn = WriteLease(shares.folder, shares.mark)
    try:
        if shares.folder == shares.url:
            replaced = bytes.fromhex(shares.replaced)
            commit.publish_folder(staged, turn, replaced, new=new, there=shares.written())
            if not new:
                with after_commit(shares.url):
                    commit.remove_arrays_beside(shares.url)
        else:
            _publish_beside(shares, turn, staged, new)
    except ConcurrentWriteError:
        withdraw(shares)
        raise
    atomic.discard(staged)


def _publish_beside(shares: MultiprocessUpload, turn: WriteLease, staged: str, new: bool) -> None:
    replaced = [key for key in turn.others() if not shares.is_ours(key)]
    commit.publish_object(staged, shares.url, new=new)
    with after_commit(shares.url):
        _remove_replaced(shares, turn, replaced)


def _remove_replaced(shares: MultiprocessUpload, turn: WriteLease, replaced: Collection[str]) -> None:
    there = set(client.fresh_keys(shares.folder))
    if shares.mark not in there:  # another save ended in this moment, and has removed the arrays
        turn.give_up()
    if not turn.is_behind(there):  # else they are for that writer to remove
        client.delete_all(f"{shares.folder}/{key}" for key in commit.arrays_among(replaced))
        client.delete_all(f"{shares.folder}/{key}" for key in replaced if is_mark(key))
    turn.end()


def withdraw(shares: MultiprocessUpload) -> None:
    """Removes what a save that failed has written, as far as the store lets us; a checkpoint that counts stays."""
    with contextlib.suppress(StorageError):
        there = set(client.fresh_keys(shares.folder))
        if COMMIT_FILE in there and shares.mark.encode() in client.read(f"{shares.folder}/{COMMIT_FILE}"):
            return
        if views.current(there) == views.next_name(shares.mark):
            return
        client.delete_all(f"{shares.folder}/{key}" for key in there if shares.is_ours(key))
        client.delete(f"{shares.folder}/{shares.mark}")
