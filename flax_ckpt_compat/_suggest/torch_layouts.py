"""Compare shapes in torch's layout, whose weights are transposed, with those in Flax's."""

from __future__ import annotations

from collections.abc import Sequence

# Orders of axes between torch's weights and Flax's kernels, by the number of axes.
TORCH_ORDERS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 0),),
    3: ((2, 1, 0),),
    4: ((2, 3, 1, 0), (3, 2, 0, 1), (2, 3, 0, 1)),
    5: ((2, 3, 4, 1, 0), (4, 3, 0, 1, 2), (3, 4, 0, 1, 2)),
}
_WEIGHTS = frozenset(("weight", "weights", "w"))


def permuted(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with its axes in another order."""
    return tuple(shape[axis] for axis in order)


def is_symmetric(shape: tuple[int, ...]) -> bool:
    """Return whether an array of torch's layout has the same shape in Flax's."""
    return any(permuted(shape, order) == shape for order in TORCH_ORDERS.get(len(shape), ()))


def is_torch_name(one: str, other: str) -> bool:
    """Return whether one name is that of torch's weights, and the other Flax's of kernels."""
    return "kernel" in (one, other) and not _WEIGHTS.isdisjoint((one, other))


def is_transposed(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether an array of torch's layout has the wanted shape in Flax's, or the other way round."""
    orders = TORCH_ORDERS.get(len(stored), ()) if len(stored) == len(wanted) else ()
    return any(permuted(stored, order) == wanted for order in orders)
