"""Keep the Python values of a container as they were decoded, as one run, in place of a handle for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.tree import Branch, Path, ValueRun

from . import format

_PLAIN = frozenset({*format.NUMBERS, str, bytes, type(None)})


def branch_of(
    values: dict[str, Any] | list[Any], path: Path, leaf_of: Callable[[Path, Any], LeafHandle | None]
) -> Branch | None:
    """Return the branch of a container at a key path; None if it is empty, or has others than Python values."""
    children = values.values() if isinstance(values, dict) else values
    kinds = set(map(type, children))
    if not kinds or not _PLAIN.issuperset(kinds):
        return None
    if str in kinds and any(type(one) is str and one.startswith(format.PLACEHOLDER) for one in children):
        return None
    if len(kinds) == 1 and kinds <= format.NUMBERS.keys():
        nbytes = len(values) * format.NUMBERS[kinds.pop()][1]
    else:
        nbytes = sum([_kind_of(one)[1] for one in children if one is not None])
    return Branch.of_run(ValueRun(path, values, nbytes, leaf_of))


def leaf_of(reader: Reader) -> Callable[[Path, Any], LeafHandle | None]:
    """Return a function that makes the leaf of a decoded Python value; it raises KeyError for other types."""

    def leaf(path: Path, value: Any) -> LeafHandle | None:
        if value is None:
            return None
        kind, nbytes = _kind_of(value)
        return LeafHandle(path, kind, (), None, nbytes, None, reader, value)

    return leaf


def _kind_of(value: Any) -> tuple[LeafKind, int]:
    """Return the kind of a Python value and its size in memory, in bytes."""
    kind = type(value)
    if kind is str and not value.startswith(format.PLACEHOLDER):
        return LeafKind.STR, len(value)
    return (LeafKind.BYTES, len(value)) if kind is bytes else format.NUMBERS[kind]
