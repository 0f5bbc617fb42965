"""Estimate the time and the free space that a conversion takes, from a sample that is read."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from itertools import chain

from flax_ckpt_compat._convert.jobs import Conversion
from flax_ckpt_compat._core import bounded_reads
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, Reader
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.location import of_text
from flax_ckpt_compat._core.text_formatting import format_size
from flax_ckpt_compat._discovery.opening import Opened

# A sample ends after so many bytes, or seconds; a rate of fewer bytes says nothing.
_SAMPLE_BYTES, _SAMPLE_SECONDS, _LEAST_BYTES = 256 << 20, 2.0, 4 << 20
_PASSES = 3  # the source is read, the result written, and read again to be compared


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The time and space that planned conversions take.

    Attributes:
        nbytes: size of the arrays in memory, in bytes; results take about as much, a little less where they compress.
        rate: bytes per second at which the sample was read and decoded; None if there was too little to read.
        sampled: size of the sample, in bytes.
        free: bytes that are free where the results go; None for object stores.
        place: the folder, which exists, that ``free`` is of.
    """

    nbytes: int
    rate: float | None
    sampled: int
    free: int | None
    place: str

    def seconds(self, nbytes: int) -> float | None:
        """Return the time that so many bytes take with one worker, if the destination is as fast as the source."""
        return None if self.rate is None else _PASSES * nbytes / self.rate

    def lines(self) -> list[str]:
        """Return a line for the time and one for the space, with what is assumed."""
        found: list[str] = []
        if (seconds := self.seconds(self.nbytes)) is not None and self.rate is not None:
            found.append(
                f"Time: about {_duration(seconds)} with one worker: read, written, and read again to compare, each at "
                f"{format_size(self.rate)}/s, the rate at which {format_size(self.sampled)} of the source were read. "
                "A slower destination takes longer."
            )
        if self.free is not None:
            is_short = self.nbytes > self.free
            found.append(
                f"Space: {'NOT ENOUGH: ' if is_short else ''}about {format_size(self.nbytes)}, and "
                f"{format_size(self.free)} are free in {self.place}; nothing of the source is removed."
            )
        return found


def estimate(results: Iterable[Conversion]) -> Estimate | None:
    """Return the estimate for the planned ones among the results of a dry run; None if there are none."""
    planned = [result for result in results if result.status == "planned"]
    if not planned:
        return None
    rate, sampled = _read_rate(planned)
    free, place = _free(planned[0].destination)
    return Estimate(sum(result.nbytes for result in planned), rate, sampled, free, place)


def _read_rate(planned: Iterable[Conversion]) -> tuple[float | None, int]:
    """Read a sample of the sources, the first ones first; return bytes per second and the bytes read."""
    nbytes, seconds = 0, 0.0
    for result in planned:
        # What cannot be read fails in the conversion, with a reason.
        with (
            suppress(CheckpointError),
            closing(Opened(of_text(result.source).listed(), verify=False, warns=False)) as opened,
        ):
            for together in chain.from_iterable(map(_together, map(opened.reader, opened.trees))):
                if nbytes >= _SAMPLE_BYTES or seconds >= _SAMPLE_SECONDS:
                    return nbytes / seconds, nbytes
                start = time.perf_counter()
                values = bounded_reads.read_all(together)
                seconds += time.perf_counter() - start
                nbytes += sum(getattr(value, "nbytes", 0) for value in values)
    return (nbytes / seconds if nbytes >= _LEAST_BYTES and seconds else None), nbytes


def _together(reader: Reader) -> Iterator[list[LeafHandle | ArraySlice]]:
    """Yield what is read at once: small leaves together, a large one in slices."""
    for batch in bounded_reads.batches(bounded_reads.handles_of(reader)):
        if len(batch) > 1:
            yield [*batch]
        else:
            yield from ([piece] for piece in bounded_reads.pieces(batch[0]))


def _free(destination: str) -> tuple[int | None, str]:
    """Return the bytes that are free in the nearest folder that exists, and that folder; None for a store."""
    location = of_text(destination)
    if location.is_remote:
        return None, destination
    folder = os.path.abspath(destination)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        return shutil.disk_usage(folder).free, folder
    except OSError:
        return None, folder


def _duration(seconds: float) -> str:
    """Format a time, such as ``3 h 20 min``."""
    if seconds < 120:
        return f"{max(seconds, 0.1):.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
