"""Map key paths to stored names, and names to key prefixes and JSON pointers."""

from __future__ import annotations

import re

from flax_ckpt_compat._core.errors import NameCollisionError, UnsupportedLeafError
from flax_ckpt_compat._core.tree import Path, show_path

_BAD_ESCAPE = re.compile(r"~(?![01])")


def stored_name(path: Path) -> str:
    """Return Orbax's name of a leaf: its key path joined with dots; a bare leaf is ``""``."""
    return ".".join(path)


def key_prefix(name: str) -> str:
    """Return the key prefix of an array.

    TensorStore's zarr drivers add the ``/`` only where it is missing, so the names ``a`` and ``a/`` share
    their keys, and so do ``""`` and ``/`` (measured).
    """
    if name == "/":
        return ""
    return name if not name or name.endswith("/") else name + "/"


def pointer_tokens(name: str) -> tuple[str, ...] | None:
    """Return the tokens by which real Orbax looks a name up in ``_strings.json``; None if it cannot.

    Orbax 0.12.8 uses ``/`` + name, unescaped, as a JSON pointer (measured).
    """
    if _BAD_ESCAPE.search(name):
        return None
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in name.split("/"))


class NameRegistry:
    """Registers stored names and rejects those that collide or cannot be stored."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}

    def add(self, path: Path) -> str:
        """Register a leaf and return its stored name.

        Raises:
            NameCollisionError: another leaf has the same name or keys.
            UnsupportedLeafError: the name is not valid Unicode.
        """
        self.check(path)
        name = stored_name(path)
        other = self._paths.setdefault(key_prefix(name), path)
        if other is not path:
            raise NameCollisionError(
                f"the leaves {show_path(other)!r} ({other!r}) and {show_path(path)!r} ({path!r}) would both be stored "
                f"as {name!r}, so one would be lost; rename one of them",
                leaf=show_path(path),
            )
        return name

    @staticmethod
    def check(path: Path) -> None:
        """Check that a key path can be stored; empty nodes, without values to lose, need no more.

        Raises:
            UnsupportedLeafError: a name is not valid Unicode.
        """
        try:
            "".join(path).encode()
        except UnicodeEncodeError as error:
            keystr = show_path(path).encode(errors="backslashreplace").decode()
            raise UnsupportedLeafError(
                f"the key path {keystr} holds half a surrogate pair, which has no UTF-8 form; rename the key",
                leaf=keystr,
            ) from error
