"""Remove checkpoints in object stores, and what dead writers left there; `commit` tells in which order."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from flax_ckpt_compat._core.errors import ConcurrentWriteError, StorageError
from flax_ckpt_compat._core.listing import Listing
from flax_ckpt_compat._core.local import removal, temporaries
from flax_ckpt_compat._core.object_store import client, commit, replace_directory, visible_objects
from flax_ckpt_compat._core.object_store.writer_markers import (
    EXPIRES_AFTER,
    WriteLease,
    is_expired,
    is_old,
    tag_of,
    warn_of_leftovers,
)
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, NEXT_DATA_LIST, is_upload_marker
from flax_ckpt_compat._core.steps import ARRAYS_POSTFIX
from flax_ckpt_compat._core.thread_pools import at_once

_log = logging.getLogger("flax_ckpt_compat")
# Of removals that the store refused, by URL: the marker, with which the next one goes on, or "".
_refused: dict[str, str] = {}


def discard(url: str, known: Listing | None = None) -> None:
    """Remove a checkpoint; at no moment is a partly removed one complete."""
    inside = client.known_keys(url, known)
    if inside is None:
        found, inside = at_once(lambda: client.version(url), lambda: client.fresh_keys(url))
    else:
        found = client.version(url) if client.is_object(url, known) else client.NO_OBJECT
    # The object first: it must not reappear when the folder that replaced it is gone.
    if found != client.NO_OBJECT:
        client.delete_version(url, found)
    if inside:
        _remove_folder(url, inside)


def _remove_folder(url: str, initial: Collection[str] | None = None) -> None:
    marker = _refused.pop(url, "")
    lease = WriteLease(url, marker, initial=initial)
    if marker and not lease.is_held(lease.initial):
        lease = WriteLease(url, initial=lease.initial)
    try:
        lease.clear()
        lease.release()
    except ConcurrentWriteError:  # the other writer removes or rewrites it
        pass
    except StorageError:
        _refused[url] = lease.marker
        raise


def stale_names(directory: str, known: Listing | None = None) -> dict[str, list[str]]:
    """Return the folders in which dead writers left something and none writes, each with their markers."""
    if known is None or not known.covers(directory):
        known = client.listing(directory)
    there = {name: client.keys(f"{directory}/{name}", known) for name in client.names(directory, known)}
    found = {}
    for name, inside in there.items():
        markers = list(filter(is_upload_marker, inside))
        main = name.removesuffix(ARRAYS_POSTFIX)
        # Only the msgpack file knows which arrays beside it are in use; the rest is removed with it.
        if markers and all(map(is_expired, markers)) and (main == name or main not in there):
            found[name] = markers
    return found


def stale_uploads(directory: str) -> list[str]:
    """Return the names in a folder to which dead writers sent parts that are no object yet."""
    return [name for name, began in client.scheme_of(directory).unfinished_uploads(directory).items() if is_old(began)]


def abort_stale_uploads(directory: str, names: Collection[str]) -> None:
    """Delete the parts that dead writers sent under these names of a folder."""
    for name in names:
        client.scheme_of(directory).abort_uploads(f"{directory}/{name}", time.time() - EXPIRES_AFTER)


def is_removed_whole(directory: str, name: str, known: Listing | None = None) -> bool:
    """Return whether `remove_stale` removes all of a folder, not what dead writers left in a checkpoint."""
    return name.endswith(ARRAYS_POSTFIX) or commit.is_unfinished(client.keys(f"{directory}/{name}", known))


def remove_stale(directory: str, names: Collection[str] | None = None, known: Listing | None = None) -> list[str]:
    """Remove what dead writers left in a folder of checkpoints, or in these of it; return names of removed folders."""
    removed = []
    for name, markers in stale_names(directory, known).items():
        url = f"{directory}/{name}"
        if url in _refused if names is None else name not in names:
            continue
        _log.info("Removing what an interrupted save left at %s", url)
        try:
            if is_removed_whole(directory, name):
                _remove_folder(url)
                removed.append(name)
            else:
                _remove_leftovers(url, markers)
        except StorageError as error:
            if names is not None:
                raise
            # It must not prevent a save, nor make each one slower.
            _refused.setdefault(url, "")
            warn_of_leftovers(url, "what an interrupted save left", error)
    return removed


def _remove_leftovers(url: str, markers: Collection[str]) -> None:
    """Remove from a committed checkpoint an unfinished replacement, or the marker of its own writer."""
    inside = client.fresh_keys(url)
    if visible_objects.current_folder(inside) is not None:
        temporaries.create_directory(staged := commit.staging_path(url))
        try:
            replace_directory.resume(url, staged)
        except ConcurrentWriteError:
            pass
        finally:
            removal.remove_temporary(staged)
        return
    try:
        committed = client.read(f"{url}/{COMMIT_FILE}")
    except FileNotFoundError:  # another process has just begun to remove it
        return
    for marker in markers:
        tag, following = tag_of(marker), visible_objects.next_name(marker)
        leftovers = {key for key in inside if key.startswith(f"{following}/")}
        if tag.encode() not in committed:
            leftovers.update(key for key in inside if tag + "/" in key[: key.find("/") + 1])
            leftovers.update(
                replace_directory.data_names(url, following) if f"{following}/{NEXT_DATA_LIST}" in inside else ()
            )
        client.delete_all(f"{url}/{key}" for key in leftovers.intersection(inside))
    client.delete_all(f"{url}/{marker}" for marker in markers)
