"""Which objects of a folder in a store are the checkpoint, while one that is complete is being replaced.

A store replaces no two objects at once. So the new checkpoint's objects whose names the old one has as well (all but
those with data, which have random names) are first written below ``_next.<number>.<32 digits>/``, with a
``commit_success.txt`` of their own. Then the old ``commit_success.txt`` is deleted: in that moment the new checkpoint
takes its place, read from below ``_next…``. What the old one had is removed after that, the objects are written
where they belong, ``commit_success.txt`` last, and what is below ``_next…`` goes. Every step but that one deletion
leaves the same checkpoint complete.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, DATA_DIRECTORY, DATA_FILE_PATTERN, PROCESS_PREFIX

# Below ``_next…``, written first: the names of the objects with data, for whoever cleans up after a dead writer.
LIST_FILE = "_data.txt"
_NEXT = re.compile(r"(.*/|)(_next\.(\d+)\.([0-9a-f]{32}))/(.+)", re.DOTALL)
_IN_NEXT = re.compile(r"(.*/_next\.\d+\.([0-9a-f]{32}))(?:/|$)", re.DOTALL)
_DATA = re.compile(f"{DATA_DIRECTORY}/{DATA_FILE_PATTERN}")
_Order = tuple[int, str]


def next_name(mark: str) -> str:
    """Return the name of the folder of a save, inside that of the checkpoint, from the name of its mark."""
    return mark.replace("_begun", "_next", 1)


def order_of(name: str) -> _Order:
    """Return what the folders of saves are ordered by; (0, "") for other names."""
    match = _NEXT.fullmatch(f"{name}/x")
    return (int(match[3]), match[4]) if match and not match[1] else (0, "")


def commit_files(names: Iterable[str]) -> list[str]:
    """Return the signs of completeness among a folder's names in the order in which they can go.

    Until the last one is gone, what was complete before stays so.
    """
    there = [name for name in names if name.endswith(COMMIT_FILE)]
    nexts = [name for name in there if name.count("/") == 1 and order_of(name.partition("/")[0])[0]]
    # Where there is the one of the folder itself, those below do not count.
    return sorted(nexts, key=order_of_key) + [name for name in there if name == COMMIT_FILE]


def order_of_key(key: str) -> _Order:
    """Return the order of the folder of a save that an object is in."""
    return order_of(key.partition("/")[0])


def current(names: Collection[str]) -> str | None:
    """Return the name of the folder inside this one from which its checkpoint is read; None for the folder itself."""
    if COMMIT_FILE in names:
        return None
    last = commit_files(names)
    return last[-1].partition("/")[0] if last else None


def visible(keys: list[str]) -> list[str]:
    """Return the keys as they are to be taken: without folders of saves, of which the one that counts is laid over."""
    if not any("_next." in key for key in keys):
        return keys
    inside: dict[str, list[str]] = {}
    for key in keys:
        if match := _NEXT.fullmatch(key):
            inside.setdefault(match[1], []).append(key[match.start(2) :])
    chosen: dict[str, str] = {}
    for folder, names in inside.items():
        top = [COMMIT_FILE] if folder + COMMIT_FILE in keys else []
        if name := current([*names, *top]):
            chosen[folder] = name
    return sorted({seen for key in keys if (seen := _seen(key, chosen)) is not None})


def _seen(key: str, chosen: dict[str, str]) -> str | None:
    match = _NEXT.fullmatch(key)
    if match:
        return match[1] + match[5] if chosen.get(match[1]) == match[2] and match[5] != LIST_FILE else None
    for folder, name in chosen.items():
        if key.startswith(folder):
            rest = key[len(folder) :]
            # Of the rest, only data can be the new checkpoint's; in the open, marks tell of the save.
            kept = _DATA.fullmatch(rest) or rest.startswith("_begun.")
            return key if kept or is_of_save(rest, name) else None
    return key


def is_of_save(name: str, inside: str) -> bool:
    """Whether an object of a folder was written by one of the processes of the save that writes below ``inside``."""
    return name.startswith(PROCESS_PREFIX) and name.partition("/")[0].endswith("." + inside.rpartition(".")[2])


def physical(key: str) -> str:
    """Return the key of the object that is meant by a name below the folder of a save, where data never lies."""
    match = _IN_NEXT.match(key)
    if match is None:
        return key
    rest = key[match.end() :]
    if _DATA.fullmatch(rest) or rest.startswith(PROCESS_PREFIX):
        return match[1].rpartition("/")[0] + "/" + rest
    return key


def is_inside(url: str) -> bool:
    """Whether a URL is of the folder of a save, or of something below it."""
    return _IN_NEXT.search(url) is not None


def parent(url: str) -> str | None:
    """Return the checkpoint's folder if a URL is that of the folder of a save itself."""
    match = _IN_NEXT.fullmatch(url.removesuffix("/"))
    return match[1].rpartition("/")[0] if match else None
