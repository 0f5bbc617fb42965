"""Read many ranges of objects in a store with few concurrent requests."""

from __future__ import annotations

from collections.abc import Callable

from flax_ckpt_compat._core.thread_pools import Pool

from .uncompressed import Piece

# A request takes about as long as reading 1 MiB, so small gaps between ranges are read with them.
_GAP_BYTES = 64 << 10
_RUN_BYTES = 16 << 20
_AT_ONCE = 16


def runs(pieces: list[Piece]) -> list[list[Piece]]:
    """Group neighbouring pieces into runs.

    Args:
        pieces: sorted by file and offset.
    """
    found: list[list[Piece]] = []
    for piece in pieces:
        extent = piece.extent
        if found:
            first, last = found[-1][0].extent, found[-1][-1].extent
            near = extent.file == last.file and extent.offset <= last.offset + last.length + _GAP_BYTES
            if near and extent.offset + extent.length - first.offset <= _RUN_BYTES:
                found[-1].append(piece)
                continue
        found.append([piece])
    return found


def deliver(piece: Piece, data: memoryview) -> None:
    """Copy the bytes of a piece to their targets."""

    def fill(_: Piece, target: memoryview) -> None:
        target[:] = data

    piece.read(fill)


def in_threads(function: Callable[[list[Piece]], None], found: list[list[Piece]]) -> None:
    """Call the function with every run concurrently; after a failure no new call starts."""
    if len(found) < 2:
        for run in found:
            function(run)
        return
    with Pool(min(_AT_ONCE, len(found))) as pool:
        futures = [pool.submit(function, run) for run in found]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
