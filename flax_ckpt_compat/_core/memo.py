"""What was found out once about types, dtypes and shardings, of which thousands of leaves have few."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class Memo(dict[Any, _Value]):
    """A dict that makes what it lacks."""

    def __init__(self, make: Callable[[Any], _Value]) -> None:
        super().__init__()
        self._make = make
        self._last: tuple[Any, Any] = (object(), None)

    def __missing__(self, key: Any) -> _Value:
        return self.setdefault(key, self._make(key))

    def of(self, key: Any) -> _Value:
        """The value of a key that most often equals the one before; for what Python hashes slowly, as shardings."""
        last, value = self._last
        if key is not last and key != last:
            value = self[key]
            self._last = key, value
        return value  # type: ignore[no-any-return]


class AddressableMemo:
    """Tells whether this process sees all of an array; asks jax once, or, where processes are many, a sharding once."""

    def __init__(self) -> None:
        # Not asked before there is an array: the answer starts jax's backends.
        self._is_alone: bool | None = None
        self._whole = Memo[bool](lambda sharding: sharding.is_fully_addressable)

    def is_fully_addressable(self, array: Any) -> bool:
        """Whether it is of a ``jax.Array``."""
        if self._is_alone is None:
            self._is_alone = sys.modules["jax"].process_count() == 1
        return self._is_alone or self._whole.of(array.sharding)
