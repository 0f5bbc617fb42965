"""Select the objects of a folder that form the checkpoint, while a complete one is being replaced.

A store cannot replace two objects at once. So objects of the new checkpoint whose names the old one has too (all but
data, which has random names) are first written below ``_next.<number>.<32 digits>/``, with a ``commit_success.txt`` of
their own. Deleting the old ``commit_success.txt`` then commits the new checkpoint, read from below ``_next…``. After
that, the old objects are removed, the new ones are written under their final names, ``commit_success.txt`` last, and
``_next…`` is removed. Every step but that one deletion leaves the same checkpoint complete.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from flax_ckpt_compat._core import orbax_layout as layout

_NEXT = re.compile(rf"(.*/|)({layout.NEXT}\.(\d+)\.([0-9a-f]{{32}}))/(.+)", re.DOTALL)
_IN_NEXT = re.compile(rf"(.*/{layout.NEXT}\.\d+\.([0-9a-f]{{32}}))(?:/|$)", re.DOTALL)
_DATA = re.compile(f"{layout.DATA_DIRECTORY}/{layout.DATA_FILE_PATTERN}")
_OF_ONE_WRITER = re.compile(rf"(?:{layout.BEGUN}|{layout.NEXT})\..*|(?:.*/)?{_DATA.pattern}", re.DOTALL)
_Order = tuple[int, str]


def is_shared(name: str) -> bool:
    """Return whether other writers have a file of this name; names of data files, and of one save, are unique."""
    return _OF_ONE_WRITER.fullmatch(name) is None


def next_name(marker: str) -> str:
    """Return the name of the ``_next…`` folder of the save with this marker."""
    return marker.replace(layout.BEGUN, layout.NEXT, 1)


def order_of(key: str) -> _Order:
    """Return the sort key of the ``_next…`` folder that an object is in; (0, "") for other names."""
    match = _NEXT.fullmatch(f"{key.partition('/')[0]}/x")
    return (int(match[3]), match[4]) if match else (0, "")


def commit_files(names: Iterable[str]) -> list[str]:
    """Return the commit files among a folder's names, in an order in which they can be removed.

    The current checkpoint stays complete until the last one is removed.
    """
    there = [name for name in names if name.endswith(layout.COMMIT_FILE)]
    nexts = [name for name in there if name.count("/") == 1 and order_of(name)[0]]
    # The folder's own commit file takes precedence over those below ``_next…``.
    return sorted(nexts, key=order_of) + [name for name in there if name == layout.COMMIT_FILE]


def current_folder(names: Collection[str]) -> str | None:
    """Return the name of the ``_next…`` folder that has the checkpoint; None for the folder itself."""
    if layout.COMMIT_FILE in names:
        return None
    last = commit_files(names)
    return last[-1].partition("/")[0] if last else None


def visible(keys: list[str]) -> list[str]:
    """Return the keys of the current checkpoints, with those of a committed ``_next…`` under their final names."""
    if not any(f"{layout.NEXT}." in key for key in keys):
        return keys
    inside: dict[str, list[str]] = {}
    for key in keys:
        if match := _NEXT.fullmatch(key):
            inside.setdefault(match[1], []).append(key[match.start(2) :])
    chosen: dict[str, str] = {}
    for folder, names in inside.items():
        top = [layout.COMMIT_FILE] if folder + layout.COMMIT_FILE in keys else []
        if name := current_folder([*names, *top]):
            chosen[folder] = name
    return sorted({seen for key in keys if (seen := _visible_key(key, chosen)) is not None})


def is_replaced(before: list[str], now: list[str]) -> bool:
    """Return whether a folder's checkpoint was replaced, or partly removed, between two lists of all its keys.

    What a running save adds is not part of it yet. A new checkpoint has other names of data, or is in ``_next…``, and
    the data of the old one goes; only that may tell, as the list before may have all of the new one already."""
    old, new = ({key for key in visible(keys) if not key.startswith(f"{layout.BEGUN}.")} for keys in (before, now))
    return current_folder(before) != current_folder(now) or not old <= new


def _visible_key(key: str, chosen: dict[str, str]) -> str | None:
    match = _NEXT.fullmatch(key)
    if match:
        return match[1] + match[5] if chosen.get(match[1]) == match[2] and match[5] != layout.NEXT_DATA_LIST else None
    for folder, name in chosen.items():
        if key.startswith(folder):
            rest = key[len(folder) :]
            # Of the rest, only data can be the new checkpoint's; markers show the running save.
            kept = _DATA.fullmatch(rest) or rest.startswith(f"{layout.BEGUN}.")
            return key if kept or is_of_save(rest, name) else None
    return key


def is_of_save(name: str, inside: str) -> bool:
    """Return whether a process of the save that writes below ``inside`` wrote this object."""
    return name.startswith(layout.PROCESS_PREFIX) and name.partition("/")[0].endswith("." + inside.rpartition(".")[2])


def resolve_key(key: str) -> str:
    """Return the key of the object for a key below ``_next…``: data objects lie in the checkpoint's own folder."""
    match = _IN_NEXT.match(key)
    if match is None:
        return key
    rest = key[match.end() :]
    if _DATA.fullmatch(rest) or rest.startswith(layout.PROCESS_PREFIX):
        return match[1].rpartition("/")[0] + "/" + rest
    return key


def is_in_next_folder(url: str) -> bool:
    """Return whether a URL is a ``_next…`` folder or below one."""
    return _IN_NEXT.search(url) is not None


def parent(url: str) -> str | None:
    """Return the checkpoint's folder if a URL is a ``_next…`` folder itself, else None."""
    match = _IN_NEXT.fullmatch(url.removesuffix("/"))
    return match[1].rpartition("/")[0] if match else None
