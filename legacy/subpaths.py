"""Where in the folder of arrays each array lies."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence

from flax_ckpt_compat._core import temporaries
from flax_ckpt_compat._core.tree import Path

# Of what most file systems allow for one name, and of what a path has room for.
_MAX_NAME, _MAX_SUBPATH = 255, 1024
_SAFE = "arrays"


def choose(paths: Sequence[Path], taken: Collection[str]) -> dict[Path, str]:
    """A subpath for each array: its key path joined with ``/``, as in Flax, where that is safe; else a number.

    Readers take the subpath from the file's text, so any will do that leads to one array alone. The plain one
    may leave the folder (``..``), not be a path, or lead to another leaf's array too (a key ``a/b`` beside
    a key ``a`` over ``b``; keys that some file systems do not tell apart, such as ``A`` and ``a``).

    Args:
        paths: key paths, in an order that all processes agree on.
        taken: the names at the root of the tree.
    """
    safe = _SAFE
    while _folded(safe) in {_folded(name) for name in taken}:
        safe += "_"
    spelled: dict[Path, Path] = {}
    chosen = {}
    for number, path in enumerate(paths):
        plain = all(map(_is_plain, path)) and not (path and temporaries.is_nest(path[0]))
        plain = plain and len("/".join(path).encode()) <= _MAX_SUBPATH and _claim(path, spelled)
        chosen[path] = "/".join(path) if plain else f"{safe}/{number}"
    return chosen


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name) and len(name.encode()) <= _MAX_NAME


def _claim(path: Path, spelled: dict[Path, Path]) -> bool:
    """Notes the folders on the way; False where one of them is spelled otherwise than before."""
    folded = tuple(map(_folded, path))
    ways = [(folded[:end], path[:end]) for end in range(1, len(path) + 1)]
    if any(spelled.get(way, plain) != plain for way, plain in ways):
        return False
    spelled.update(ways)
    return True


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
