"""Rules that give stored leaves other names; no value changes."""

from __future__ import annotations

import re

from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.tree import Node, Path, from_leaves, iter_leaves, show_path
from flax_ckpt_compat.rules._rule import Apply, rule


@rule
def rename(pattern: str, replacement: str) -> Apply:
    """Renames wherever the pattern matches whole names of a key path: ``rename("Dense_0", "encoder")``.

    Args:
        pattern: regular expression over the key path joined with ``/``; it matches whole names, one or several
            (``layer_(\\d+)``, ``params/Dense_0``), anywhere in the path, or from its root if it begins with ``^``.
        replacement: what stands in their place; may refer to groups (``block_\\1``), and may contain ``/``.

    Raises:
        TransformError: a bad pattern; when applied: it matches nothing in the checkpoint.
        NameCollisionError: when applied: two leaves would get the same name.
    """
    try:
        whole_names = re.compile(rf"(?<![^/])(?:{pattern})(?![^/])")
    except re.error as error:
        raise TransformError(f"rename: {pattern!r} is no regular expression: {error}") from error

    def apply(stored: Node, target: Node) -> Node:
        renamed: dict[Path, object] = {}
        changed = False
        for path, leaf in iter_leaves(stored):
            new = tuple(filter(None, whole_names.sub(replacement, "/".join(path)).split("/")))
            changed = changed or new != path
            if new in renamed:
                raise NameCollisionError(f"rename({pattern!r}, {replacement!r}) makes two leaves {show_path(new)}")
            renamed[new] = leaf
        if not changed:
            raise TransformError(f"rename({pattern!r}, …) matches nothing in the checkpoint")
        return from_leaves(renamed, like=stored)

    return apply
