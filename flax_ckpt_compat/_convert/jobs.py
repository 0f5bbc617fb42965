"""Find the checkpoints to convert; define a job, one of them with its result's name, and the outcome.

Jobs and outcomes travel to other processes."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flax_ckpt_compat._core.errors import ArgumentError, CheckpointNotFoundError
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._discovery import locating, saved_steps, steps
from flax_ckpt_compat._discovery.contents import State, contents_of, foreign_message, why_inside
from flax_ckpt_compat._discovery.walk import DEFAULT_PREFIX, MSGPACK_SUFFIX, checkpoints_below

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


# The step of a name that a program gives to steps: the whole name, as of managers, or the longest number after a
# separator, as in ``checkpoint_-1.5``, ``ckpt-10`` or ``v1.10``. Models and dates have none: ``pi0``, ``2024-05-01``.
_NUMBER = r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_STEP = re.compile(rf"(?:|.*_|(?=.*?[A-Za-z]).*?[^0-9A-Za-z.])(-?{_NUMBER})", re.DOTALL)
_AFTER_DOT = re.compile(r".*[A-Za-z].*\.(\d+)", re.DOTALL)
_DATE = re.compile(r"(?:.*[^0-9])?(?:19|20)\d\d([-_.])(?:0?[1-9]|1[0-2])\1[0-3]?\d", re.DOTALL)


def find_jobs(source: Location, destination: Location, to: str, wanted: Sequence[Any] | None) -> list[Job]:
    """Return a job for each checkpoint to convert, or for the ``wanted`` steps; an impossible one has an ``error``.

    ``destination`` is that of the one result, or of the directory for all. Errors are as of `convert`."""
    listed = source.listed()
    found = [source] if _is_checkpoint(listed) else checkpoints_below(listed)
    if not found:
        raise locating.Absence(f"{source} holds no checkpoint").error(source, "nothing to convert: ")
    if found != [source]:
        folders = [destination.sibling(one.parent.path[len(source.path) :]) for one in found]
        jobs = [_job(one, folder, to, _step_of(one)) for one, folder in zip(found, folders, strict=True)]
        jobs = _selected(source, jobs, wanted) if wanted else jobs
    elif to in TO_STEPS:
        texts = [steps.step_text(one) for one in wanted or ()]
        step = steps.parse_step(texts[0]) if texts else _step_of(source)
        if len(texts) > 1 or (texts and step is None):
            raise ArgumentError(f"{source} is one checkpoint, so step is the number it gets; found {one_line(texts)}")
        jobs = [_job(source, destination, to, step)]
    else:
        jobs = [Job(source.path, destination.path, to)]
    for one, holding in [(one, contents_of(listed.at(one.path), lists_denied=True)) for one in found]:
        if not holding.is_readable:
            error = f"IncompleteCheckpointError: {one} is not a complete checkpoint: {holding.why}"
            if holding.state is State.FOREIGN:
                error = f"UnrecognizedFormatError: {foreign_message(holding)}"
            jobs = [dataclasses.replace(job, error=error) if job.source == one.path else job for job in jobs]
    _check_destinations(source, destination, jobs)
    count = Counter(job.destination for job in jobs if job.error is None)
    for place, job in enumerate(jobs):
        if job.error is None and count[job.destination] > 1:
            why = f"another checkpoint would be converted to {job.destination} too; convert each alone"
            jobs[place] = dataclasses.replace(job, error=f"ArgumentError: {job.source}: {why}")
    return jobs


def _check_destinations(source: Location, destination: Location, jobs: Sequence[Job]) -> None:
    """Raise if the destination is the source, or in it, also by symbolic links, or in a checkpoint of Orbax."""
    for here, there in ((source.path, destination.path), (source.resolve(), destination.resolve())):
        if f"{there}/".startswith(f"{here}/"):
            message = f"{destination} is in the source {source}, which is never touched; pass another destination"
            raise ArgumentError(message, path=destination.path)
    for path in {os.path.dirname(job.destination): job.destination for job in jobs if job.error is None}.values():
        if why := why_inside(location_of(path)):
            from flax_ckpt_compat.errors import InvalidCheckpointError  # it imports flax

            raise InvalidCheckpointError(f"cannot convert to {path}: {why}", path=path)


def _is_checkpoint(location: Location) -> bool:
    """Return whether a directory is one checkpoint, also without the markers of newer releases."""
    if not location.isdir():
        return False
    checkpoint_dir = saved_steps.checkpoint_dir(location.path, DEFAULT_PREFIX).listed(location)
    located = locating.find(checkpoint_dir, None)
    return isinstance(located, locating.LocatedCheckpoint) and located.location == location


def _step_of(checkpoint: Location) -> float | None:
    """Return the step that a name records, or None."""
    name = checkpoint.name.removesuffix(MSGPACK_SUFFIX)
    match = None if _DATE.fullmatch(name) else _STEP.fullmatch(name) or _AFTER_DOT.fullmatch(name)
    return steps.parse_step(match[1]) if match else None


def _job(source: Location, folder: Location, to: str, step: float | None) -> Job:
    """Return the job of a checkpoint whose result lies in a folder."""
    name = source.name if to == "msgpack" else source.name.removesuffix(MSGPACK_SUFFIX)
    if to not in TO_STEPS:
        name = f"checkpoint_{name}" if name.isdecimal() else name  # a manager's step gets Flax's name
        name = f"{name}.safetensors" if to == "safetensors" else name
    elif step is not None and step >= 0 and step == int(step):
        name = str(int(step))
    else:
        shown = "its name has no step" if step is None else f"its step is {step}"
        remedy = "convert it alone, with a step that you choose (step=5, --step 5), or to another layout"
        error = f"ArgumentError: {source}: {shown}, and managers count whole steps from 0; {remedy}"
        return Job(source.path, folder.path, to, step, error)
    return Job(source.path, (folder / name).path, to, step)


def _selected(source: Location, jobs: Sequence[Job], wanted: Sequence[Any]) -> list[Job]:
    """Return the jobs of the steps that were asked for: numbers, or the ends of names, as 1.5 of ``v1.5``."""
    chosen = []
    for text in map(steps.step_text, wanted):
        number, end = steps.parse_step(text), re.compile(rf"(?<!\d){re.escape(text)}$")
        mine = [job for job in jobs if number is not None and job.step == number]
        mine = mine or [job for job in jobs if end.search(os.path.basename(job.source))]
        if not mine:
            there = ", ".join(dict.fromkeys(f"{job.step}" for job in jobs if job.step is not None))
            message = f"{source} has no step {text} (available steps: {there}; pass one of them, or none for all)"
            raise CheckpointNotFoundError(message, path=source.path)
        chosen += mine
    return list(dict.fromkeys(chosen))
