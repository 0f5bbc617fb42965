"""Convert checkpoints between the formats and out to Orbax's managers: `convert`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from flax_ckpt_compat import config
from flax_ckpt_compat._convert import write_output
from flax_ckpt_compat._convert.jobs import FILES, LAYOUTS, TO_STEPS, Conversion, Job, find_jobs
from flax_ckpt_compat._convert.plan_output import Output, output_of
from flax_ckpt_compat._core import arguments
from flax_ckpt_compat._core.errors import ArgumentError, ConversionError, SettingError, StorageError
from flax_ckpt_compat._core.local.presence import occupy_standard_streams
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.text_formatting import MAX_SHOWN
from flax_ckpt_compat._discovery.locating import unchanged
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._restore import call_arguments

_log = logging.getLogger("flax_ckpt_compat")


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Literal["orbax", "msgpack", "manager", "v1", "safetensors"],
    *,
    step: SupportsFloat | str | Sequence[SupportsFloat | str] | None = None,
    target: Any = None,
    transforms: Any = None,
    item: str | Sequence[str] | Mapping[str, str] | None = None,
    sharding: Literal["drop", "keep"] = "drop",
    dry_run: bool = False,
    resume: bool = False,
    executor: Executor | None = None,
    progress: Callable[[Conversion], None] | None = None,
) -> list[Conversion]:
    """Convert a checkpoint, a directory of steps, or a tree of runs; never touch the source.

    Each result is read back and compared with its source before it gets its name. The memory needed is that of the
    largest array, twice if it is one compressed chunk, besides buffers, for each checkpoint that is converted at the
    same time; safetensors files are built in memory.

    Args:
        src: one checkpoint of any format, or a directory; all checkpoints below it are converted.
        dst: for one checkpoint, the path of the result; else the directory of the results, which lie as below ``src``.
            With ``to="manager"`` and ``"v1"``, the manager's directory. Nothing in it is replaced.
        to: ``"orbax"``: a directory that real Orbax restores, like those that Flax saves; ``"msgpack"``: a file;
            ``"manager"``: steps of ``orbax.checkpoint.CheckpointManager``; ``"v1"``: steps of
            ``orbax.checkpoint.v1.training.Checkpointer``; ``"safetensors"``: a file of arrays, named by their key paths
            joined with dots.
        step: the step, or steps, to convert; None for all. If ``src`` is one checkpoint and ``to`` is
            ``"manager"`` or ``"v1"``: the number of the step that it becomes.
        target: the saved state, abstract or not, for its lists and tuples, which msgpack files store as dicts; or
            ``"module:name"`` of a function that returns it. It must have the leaves of the checkpoints. None writes
            dicts of ``0``, ``1``, … as lists, except to msgpack and safetensors files, which have no lists.
        transforms: convert what ``restore(src, target, transforms=transforms)`` returns; or ``"module:name"`` of them.
        item: the item, or items, of a checkpoint of several to convert; a mapping gives them other names
            (``{"state": "default"}``). None converts all. One item becomes a checkpoint of one tree, but a step with an
            item of that name for ``"manager"`` and ``"v1"``.
        sharding: ``"drop"``: the result restores on any machine with real Orbax's defaults, without a target as numpy
            arrays; ``"keep"`` records the devices of the source, which must be there then.
        dry_run: only open the checkpoints, and report what would be done.
        resume: keep results that are there, if they still are equal to their sources.
        executor: runs a job for each checkpoint, in other threads, processes or machines, which must see the same
            paths; None runs them here, one after another.
        progress: called with each result as it completes.

    Returns:
        What was done, in the order of the sources. ``left_out`` of each is what a file has no place for: custom
        metadata, other files in the directory.

    Raises:
        ConversionError: some checkpoints could not be converted; all others were.
        CheckpointNotFoundError: there is none, or not the step.
        SettingError: no such layout, executor, target, transforms or sharding.
        ArgumentError: a result would be in ``src``, or ``progress`` is not a function, or ``item`` no name.
        InvalidCheckpointError: a result would be in another checkpoint, in Orbax's format.

    Example:
        >>> _ = save("runs", {"w": np.ones(2)}, step=1, format="msgpack")
        >>> [result.status for result in convert("runs", "runs_orbax", "orbax")]
        ['converted']
    """
    call_arguments.check_function(progress, "progress")
    dry_run, resume = arguments.flag(dry_run, "dry_run"), arguments.flag(resume, "resume")
    if executor is not None and not hasattr(executor, "submit"):
        raise SettingError(f"executor takes a concurrent.futures.Executor; {arguments.found(executor)}")
    options = {"target": target, "transforms": transforms, "dry_run": dry_run, "resume": resume}
    jobs = plan(src, dst, to, step=step, item=item, sharding=sharding, **options)
    by_source: dict[str, Conversion] = {}
    with closing(run(jobs, executor)) as results:
        for result in results:
            by_source[result.source] = result
            if progress is not None:
                progress(result)
    ordered = [by_source[job.source] for job in jobs]
    failed = [result for result in ordered if result.error is not None]
    if failed:
        lines = [f"{len(failed)} of {len(ordered)} checkpoints could not be converted:"]
        lines += [f"  {result.error}" for result in failed[:MAX_SHOWN]]
        lines += [f"  and {len(failed) - MAX_SHOWN} more"] if len(failed) > MAX_SHOWN else []
        raise ConversionError("\n".join(lines), path=failed[0].source, conversions=tuple(ordered))
    return ordered


def plan(
    src: Any, dst: Any, to: Any, *, step: Any = None, item: Any = None, sharding: Any = "drop", **options: Any
) -> list[Job]:
    """Return the jobs of a conversion; arguments as for `convert`."""
    if not isinstance(to, str) or to not in LAYOUTS:
        raise SettingError(f"to takes {', '.join(map(repr, LAYOUTS))}; {arguments.found(to)}")
    if to == "safetensors" and importlib.util.find_spec("safetensors") is None:
        remedy = "python -m pip install 'flax-ckpt-compat[safetensors]'"
        raise SettingError(f"safetensors files are written by safetensors: {remedy}")
    if sharding not in ("drop", "keep"):
        raise SettingError(f"sharding takes 'drop' or 'keep'; {arguments.found(sharding)}")
    items = _items(item)
    is_one = step is None or isinstance(step, str) or not isinstance(step, Sequence)
    steps = None if step is None else [step] if is_one else list(step)
    if steps == []:
        raise SettingError("step is an empty list, so nothing would be converted; None converts all steps")
    jobs = find_jobs(location_of(src), location_of(dst), to, steps)
    return [dataclasses.replace(job, items=items, sharding=sharding, **options) for job in jobs]


def free_space(destination: str) -> tuple[int, str] | None:
    """Return the bytes that are free in the nearest folder above a result, and that folder; None if nothing tells."""
    if location_of(destination).is_remote:
        return None
    place = Path(os.path.abspath(destination))
    folder = next(above for above in (place, *place.parents) if os.path.isdir(above))
    with suppress(OSError):
        return shutil.disk_usage(folder).free, str(folder)
    return None


def _items(item: Any) -> dict[str, str] | None:
    """Return the name of each item to convert → its name in the result, '' for its own; None for all items."""
    if item is None:
        return None
    named = item if isinstance(item, Mapping) else dict.fromkeys([item] if isinstance(item, str) else item, "")
    if not named or not all(isinstance(one, str) for pair in named.items() for one in pair) or "" in named:
        raise ArgumentError(f"item is the name of an item, names or a dict of new ones; found {item!r:.100}")
    return dict(named)


def run(
    jobs: Sequence[Job], executor: Executor | None, progress: write_output.Progress | None = None
) -> Generator[Conversion]:
    """Yield the results of the jobs of a `plan` as they end; ``executor`` is as for `convert`.

    ``progress`` is as for `convert_one`, in the executor's threads, so leave it out for one of other processes."""
    if jobs and (executor is None or isinstance(executor, ThreadPoolExecutor)):
        # Once: a function that returns the target may build a model. Other processes load it by its name.
        first = _loaded(jobs[0])
        jobs = [dataclasses.replace(job, target=first.target, transforms=first.transforms) for job in jobs]
    write_output.copy_root_metadata([job for job in jobs if job.to in TO_STEPS and not (job.error or job.dry_run)])
    do = convert_one if progress is None else functools.partial(convert_one, progress=progress)
    if executor is None:
        yield from map(do, jobs)
        return
    futures = {executor.submit(do, job): job for job in jobs}
    try:
        for future in as_completed(futures):
            try:
                yield future.result()
            except Exception as error:  # noqa: BLE001  (a worker died, or its job cannot be pickled)
                source, destination = futures[future].source, futures[future].destination
                message = f"{source}: {type(error).__name__}: {error}"
                yield Conversion(source, destination, "failed", error=message)
    finally:
        for future in futures:
            future.cancel()


def convert_one(job: Job, progress: write_output.Progress = lambda _: None) -> Conversion:
    """Run a job; return its result, or its failure.

    ``progress`` takes numbers of bytes, which add up to twice the size of the arrays: written, and verified."""
    start = time.monotonic()
    result = Conversion(job.source, job.destination, "failed", error=job.error)
    try:
        if job.error is None:
            with ExitStack() as watched:
                source = location_of(job.source).listed()
                watched.enter_context(unchanged(source))
                verifies = config.current().checksums == "verify"
                opening = Opened(source, verify=verifies, items=job.items, warns=False, allows_unknown=True)
                with closing(opening) as opened:
                    found = output_of(opened, _loaded(job))
                    size, notes = (len(found.leaves), found.nbytes), tuple(found.notes)
                    result = Conversion(job.source, job.destination, "failed", *size, notes=notes)
                    status = _write(job, found, progress, watched.close)
                    result = dataclasses.replace(result, status=status, left_out=tuple(found.left_out))
    except Exception as failure:  # noqa: BLE001  (of one checkpoint: the others are converted)
        _log.debug("%s could not be converted", job.source, exc_info=True)
        message = str(failure) if job.source in str(failure) else f"{job.source}: {failure}"
        error = f"{type(failure).__name__}: {message}"
        result = dataclasses.replace(result, status="failed", error=error, left_out=())
    return dataclasses.replace(result, seconds=time.monotonic() - start)


def _loaded(job: Job) -> Job:
    """Return a job with the target and transforms that it names as ``module:name``."""
    target, transforms = call_arguments.loaded(job.target, job.transforms)
    return dataclasses.replace(job, target=target, transforms=transforms)


def _write(job: Job, output: Output, progress: write_output.Progress, check_unchanged: Callable[[], None]) -> str:
    """Write, verify, and publish unless the source was replaced meanwhile; return the status."""
    prepared = write_output.prepare(output, progress, keep_shardings=job.sharding == "keep")
    final = location_of(job.destination)
    if final.exists() and not final.holds_nothing():
        if not job.resume:
            why = "exists, and nothing is replaced; pass another destination, or resume (--resume)"
            raise StorageError(f"{final} {why}", path=final.path)
        if final.isdir() == (job.to in FILES):
            what = "a directory" if final.isdir() else "a file"
            raise StorageError(f"{final} is {what}, so not of {job.to!r}; pass another destination", path=final.path)
        if not job.dry_run:
            write_output.compare(final, output, progress, final)
        return "kept"
    if job.dry_run:
        return "planned"
    occupy_standard_streams()
    final.parent.prepare_directory()
    with final.temporary() as temporary:
        write_output.write(temporary, output, prepared, final)
        write_output.compare(Location(temporary), output, progress, final)
        check_unchanged()
        final.publish(temporary, new=True)
    return "converted"
