"""Cache facts about types, dtypes and shardings: thousands of leaves share few of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class Memo(dict[Any, _Value]):
    """A dict that computes missing values."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        super().__init__()
        self._compute = compute
        self._last: tuple[Any, Any] = (object(), None)

    def __missing__(self, key: Any) -> _Value:
        return self.setdefault(key, self._compute(key))

    def of(self, key: Any) -> _Value:
        """Return the value of a key, comparing it with the last key first: shardings hash slowly and often repeat."""
        last, value = self._last
        if key is last or key == last:  # `!=` of shardings takes longer
            return value  # type: ignore[no-any-return]
        found = self[key]
        self._last = key, found
        return found


class AddressableMemo:
    """Cache whether arrays are fully addressable."""

    def __init__(self) -> None:
        # Set at the first array: ``process_count`` starts jax's backends.
        self._is_single_process: bool | None = None
        self._by_sharding = Memo[bool](lambda sharding: sharding.is_fully_addressable)

    def is_fully_addressable(self, array: Any) -> bool:
        """Return whether this process sees all of a ``jax.Array``."""
        if self._is_single_process is None:
            self._is_single_process = sys.modules["jax"].process_count() == 1
        return self._is_single_process or self._by_sharding.of(array.sharding)
