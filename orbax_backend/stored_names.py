"""Define the words of ``_METADATA``, and the names under which an Orbax directory stores leaves."""

from __future__ import annotations

import re

from flax_ckpt_compat._core.tree import Container

# Types of keys, and of leaves that are no arrays.
SEQUENCE_KEY, DICT_KEY = 1, 2
SCALAR, STRING, NONE = "scalar", "string", "None"
EMPTY_CONTAINERS = {
    "Dict": Container.DICT,
    "List": Container.LIST,
    "Tuple": Container.TUPLE,
    "NamedTuple": Container.NAMEDTUPLE,
}
ARRAY_METADATA_PREFIX = "process_"  # of files, before the index of the process that wrote the file
JAX_KEY_METADATA = "jax_random_key_metadata/metadata"  # of an item that is a key
_BAD_ESCAPE = re.compile(r"~(?![01])")


def key_prefix(name: str) -> str:
    """Return the key prefix of an array; TensorStore's drivers add a ``/`` only where there is none (measured)."""
    return "" if name in ("", "/") else name.removesuffix("/") + "/"


def pointer_tokens(name: str) -> tuple[str, ...] | None:
    """Return the tokens by which Orbax finds a name in ``_strings.json``, as an unescaped JSON pointer, or None."""
    if _BAD_ESCAPE.search(name):
        return None
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in name.split("/"))
