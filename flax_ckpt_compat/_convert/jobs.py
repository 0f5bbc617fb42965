"""Define a job, one checkpoint to convert, and its result; both travel to other processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

TO_STEPS = ("manager", "v1")  # layouts whose checkpoints are steps of a directory that Orbax manages
FILES = ("msgpack", "safetensors")  # layouts of one file
LAYOUTS = ("orbax", "msgpack", *TO_STEPS, "safetensors")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint to convert."""

    source: str  # path of the checkpoint
    destination: str  # path of the result; of the directory for it, if there is an error
    to: str  # name of the layout
    step: float | None = None  # the number at the end of its name, or None
    error: str | None = None  # why it cannot be converted, or None
    target: Any = None  # as in `convert`, like the next
    transforms: Any = None
    items: Mapping[str, str] | None = None  # item to convert → its name in the result, '' for its own; None for all
    sharding: str = "drop"  # or "keep"
    resume: bool = False  # a result that is there is compared with its source, instead of refused
    dry_run: bool = False  # plan only

    @property
    def renames(self) -> bool:
        """Return whether an item gets a name by the caller's choice."""
        return any((self.items or {}).values())


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The result of converting one checkpoint.

    Attributes:
        source: path of the checkpoint.
        destination: path of the result; of the directory for it, if it has no name.
        status: ``converted``; ``kept`` if the result was there, and equal; ``planned`` in a dry run; ``failed``.
        leaves: number of leaves.
        nbytes: size of the arrays in memory, in bytes.
        seconds: time taken.
        notes: what to know about the result, such as dicts that became lists.
        error: why it failed, or None.
        left_out: what the result lacks, because its format has no place for it: custom metadata, other files in the
            directory. With ``item``, they were not asked for, and are a note.
    """

    source: str
    destination: str
    status: str
    leaves: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    error: str | None = None
    left_out: tuple[str, ...] = ()
