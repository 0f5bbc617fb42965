"""Replace a committed directory in a store so that at each moment the old or the new one is complete.

See `flax_ckpt_compat._core.object_store.views` for the layout and `flax_ckpt_compat._core.object_store.lease` for
other writers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from flax_ckpt_compat._core.object_store import client, uploads, views
from flax_ckpt_compat._core.object_store.lease import ConcurrentWriteError, WriteLease, after_commit
from flax_ckpt_compat._core.object_store.views import LIST_FILE
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE

_RANDOM = re.compile(r"(^|/)d/[0-9a-f]{32}$")
_ROUNDS = 5


def is_shared(name: str) -> bool:
    """Whether another writer's checkpoint has a file of the same name; those with data have random ones."""
    return _RANDOM.search(name) is None


def seen_versions(turn: WriteLease, names: Iterable[str]) -> dict[str, bytes]:
    """Return the version of each object that other writers write too, as it was when the turn began.

    What a later writer puts there is never replaced, however late a request of ours is carried out.
    """
    shared = set(filter(is_shared, names))
    found = dict.fromkeys(shared, client.NO_OBJECT)
    return found | uploads.versions(turn.url, turn.seen & shared)


def replace(
    turn: WriteLease, staged: str, names: Collection[str], versions: dict[str, bytes], there: Collection[str]
) -> None:
    """Replace the checkpoint that is there.

    Args:
        turn: of its folder.
        staged: local path of the new one's files.
        names: of the files, relative to it.
        versions: of `seen_versions`.
        there: names of objects that are part of the new one, and in their place.

    Raises:
        ConcurrentWriteError: another writer goes on; the checkpoint that was there is.
        CleanupError: it was replaced, but not all of the old one could be removed.
        StorageError: the store refused; the checkpoint that was there is.
    """
    inside = views.next_name(turn.mark)
    data = [name for name in names if not is_shared(name)]
    shared = [name for name in names if is_shared(name)]
    try:
        client.write(f"{turn.url}/{inside}/{LIST_FILE}", "\n".join(data).encode())
        uploads.upload(staged, turn.url, data, {})
        uploads.upload(staged, f"{turn.url}/{inside}", shared, {})
        if not {*data, *there, *(f"{inside}/{name}" for name in shared)} <= turn.others():
            turn.give_up()  # another writer has taken some for leftovers
        client.write(f"{turn.url}/{inside}/{COMMIT_FILE}", turn.sign())
        before = turn.others()
    except ConcurrentWriteError:
        _withdraw(turn, inside, shared, data)
        raise
    if COMMIT_FILE in before:
        client.delete(f"{turn.url}/{COMMIT_FILE}")  # from here on it is the new one that is complete
    _finish(turn, staged, shared, versions, {*data, *there}, inside)


def _withdraw(turn: WriteLease, inside: str, shared: Iterable[str], data: Iterable[str]) -> None:
    client.delete(f"{turn.url}/{inside}/{COMMIT_FILE}")
    client.delete_all(f"{turn.url}/{inside}/{name}" for name in [*shared, LIST_FILE])
    client.delete_all(f"{turn.url}/{name}" for name in data)


def _finish(
    turn: WriteLease,
    staged: str,
    shared: Collection[str],
    versions: dict[str, bytes],
    kept: Collection[str],
    inside: str,
) -> None:
    """Put the new checkpoint's files where they belong, and remove all else."""
    ours = [f"{inside}/{name}" for name in [*shared, LIST_FILE]]
    sign = f"{inside}/{COMMIT_FILE}"
    with after_commit(turn.url):
        fill(turn, staged, shared, versions, {*kept, *ours, sign})
        turn.commit([*shared, *kept], [sign, *ours])


def fill(
    turn: WriteLease, staged: str, names: Collection[str], versions: dict[str, bytes], kept: Collection[str]
) -> None:
    """Upload until just these files are there, whatever a writer who has lost its turn still does.

    Args:
        turn: of the folder.
        staged: local path of the files.
        names: of the files.
        versions: of `seen_versions`; changed.
        kept: names of objects that stay.

    Raises:
        ConcurrentWriteError: another writer goes on.
    """
    left = list(names)
    for _ in range(_ROUNDS):
        taken = uploads.upload(staged, turn.url, left, versions)
        versions |= uploads.versions(turn.url, taken)
        there = turn.others().difference(kept)
        missing = [name for name in names if name not in there]
        versions |= dict.fromkeys(filter(is_shared, missing), client.NO_OBJECT)
        left, strangers = [*taken, *set(missing).difference(taken)], there.difference(names)
        if not left and not strangers:
            return
        turn.remove(strangers)
    turn.give_up()


def complete(url: str, staged: str) -> None:
    """Go on with a replacement whose writer died after the new checkpoint was complete.

    Args:
        url: of the checkpoint.
        staged: path of a local directory that does not exist yet.

    Raises:
        ConcurrentWriteError: another writer goes on.
        StorageError: the store refused.
    """
    turn = WriteLease(url)
    inside = views.current(turn.seen)
    if inside is None:
        turn.end()
        return
    turn.goes_on_with.append(inside)
    shared = [name[len(inside) + 1 :] for name in turn.seen if name.startswith(f"{inside}/")]
    shared = [name for name in shared if name not in (COMMIT_FILE, LIST_FILE)]
    of_processes = [name for name in turn.seen if views.is_of_save(name, inside)]
    kept = {*data_of(url, inside), *of_processes} & turn.seen
    versions = seen_versions(turn, shared)
    uploads.download(f"{url}/{inside}", staged, shared)
    _finish(turn, staged, shared, versions, kept, inside)


def data_of(url: str, inside: str) -> list[str]:
    """Return the names of the objects with data of the save that writes below ``inside``."""
    try:
        return client.read(f"{url}/{inside}/{LIST_FILE}").decode().split("\n")
    except FileNotFoundError:  # its writer ended before
        return []
