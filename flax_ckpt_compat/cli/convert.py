"""Define ``flax-ckpt convert``."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from flax_ckpt_compat._convert.jobs import FILES, LAYOUTS
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.text_formatting import format_size, printable
from flax_ckpt_compat._view.report import Line, Report

from . import _command_base as base

if TYPE_CHECKING:
    from flax_ckpt_compat._convert.jobs import Conversion, Job
    from flax_ckpt_compat._view.metadata import Count

_STATUSES = ("converted", "kept", "planned", "failed")
_KEEPS_ALL = "--to orbax keeps them; of several items, --item takes one without them, with exit code 0."


def _items(ctx: click.Context, param: click.Parameter, words: Sequence[str]) -> dict[str, str] | None:  # noqa: ARG001
    """Return the old and new names of ``--item``."""
    pairs = [word.partition("=") for word in words]
    if bad := [name for name, equals, new in pairs if not name or (equals and not new)]:
        raise click.UsageError(f"--item takes NAME or NAME=NEW, not {bad[0]}=")
    return {name: new for name, _, new in pairs} or None


@base.command("""
flax-ckpt convert runs/a/checkpoint_7 a7 --to orbax
flax-ckpt convert runs runs_orbax --to orbax --dry-run
flax-ckpt convert runs runs_orbax --to orbax --workers 4 --resume
flax-ckpt convert runs s3://bucket/runs --to manager --target train:init
flax-ckpt convert best_model runs_orbax --to manager --step 5
flax-ckpt convert runs/5 model --to msgpack --item state
flax-ckpt convert runs/5 out --to manager --step 5 --item state=default
""")
@base.path_argument("src")
@base.path_argument("dst")
@click.option("--to", required=True, type=click.Choice(LAYOUTS), help="What to write; see above.")
@click.option("--step", multiple=True, help="Only this step; repeatable. For one checkpoint: its new number.")
@click.option("--item", multiple=True, callback=_items, metavar="NAME[=NEW]", help="Only this, or renamed; repeatable.")
@click.option("--sharding", type=click.Choice(["drop", "keep"]), default="drop", help="keep: record the devices.")
@click.option("--target", metavar="MODULE:FUNCTION", help="Function that returns the saved state, for its containers.")
@click.option("--transforms", metavar="MODULE:NAME", help="Rules or transforms to apply, with the target's structure.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, and the space it takes; write nothing.")
@click.option("--resume", is_flag=True, help="Keep results that are there and equal to their sources.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Checkpoints at the same time.")
@base.json_option("a list with the fields of each result; with --dry-run also free_bytes")
def command(
    src: str, dst: str, *, step: Sequence[str], workers: int, dry_run: bool, as_json: bool, **options: Any
) -> bool:
    """Convert checkpoints to another layout. SRC, one checkpoint or all below a directory, is never touched.

    For one checkpoint DST is the path of the result, else the directory of the results, which lie in it as below
    SRC; for the steps of a manager it is the manager's directory. Nothing in DST is replaced.

    --to writes Orbax directories, msgpack files, steps of a CheckpointManager or of Orbax v1's training.Checkpointer,
    or safetensors files. By default results restore on any machine; with --sharding keep they record the devices.

    Each result is read back and compared with its source before it gets its name. An interrupted conversion
    leaves no half results: run it again with --resume. Dicts of the keys 0, 1, …, as msgpack files store lists and
    tuples, become lists, with a warning; --target gives the containers that the state has.

    msgpack and safetensors files have no place for custom metadata and other files in a checkpoint's directory:
    results without them are written and named, with exit code 1, unless --item chooses what to convert.

    Exit code 0: all converted. 1: some could not be, or lack something. 2: refused. 130: interrupted.
    """
    from flax_ckpt_compat._convert import convert

    jobs = convert.plan(src, dst, step=step or None, dry_run=dry_run, **options)
    start = time.monotonic()

    def show(result: Conversion) -> None:
        size = "" if result.status == "failed" else f" ({format_size(result.nbytes)})"
        line = Line(printable(f"{result.status} {result.source} → {result.destination}{size}"), hang=2)
        base.print_lines([] if as_json else [line])

    with base.progress_shown(as_json=as_json or dry_run) as begin:
        # Each byte is written and compared. On disk some have another size, so the sum is approximate.
        count = begin(lambda: 2 * sum(location_of(job.source).total_size() for job in jobs))
        results = _converted(jobs, count, show, workers)
    if not step:
        base.tell_passed_over(src, {job.source for job in jobs})
    report = _report(results, time.monotonic() - start, to_file=options["to"] in FILES, dry_run=dry_run)
    return base.print_report(report, as_json=as_json)


def _converted(jobs: Sequence[Job], count: Count, show: Callable[[Conversion], None], workers: int) -> list[Conversion]:
    """Run jobs, show each result when it is there, and return them in the order of the jobs.

    Ctrl-C stops the threads, and says how to go on."""
    from flax_ckpt_compat._convert import convert

    stopped = threading.Event()
    results: dict[str, Conversion] = {}

    def progress(nbytes: int) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        count(nbytes, f"{len(results)}/{len(jobs)}")

    with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as executor:
        try:
            for result in convert.run(jobs, executor, progress):
                results[result.source] = result
                show(result)
        except KeyboardInterrupt:
            done = sum(result.error is None for result in results.values())
            base.echo(f"{done} of {len(jobs)} converted; go on with --resume", err=True)
            raise
        finally:  # before the executor waits for its threads
            stopped.set()
    return [results[job.source] for job in jobs]


def _report(results: Sequence[Conversion], seconds: float, *, to_file: bool, dry_run: bool) -> Report:
    """Return what is shown of the results, each of which is printed already."""
    from flax_ckpt_compat._convert import convert

    notes = _with_sources([(result, note) for result in results for note in result.notes])
    lines = [Line(printable(f"Note: {note}"), hang=2, is_note=True) for note in notes]
    counts = Counter(result.status for result in results)
    summary = ", ".join(f"{counts[status]} {status}" for status in _STATUSES if counts[status])
    nbytes = sum(result.nbytes for result in results if result.status in ("converted", "planned"))
    rate = f" in {seconds:.0f} s ({format_size(int(nbytes / max(seconds, 1e-3)))}/s)"
    size = f": {format_size(nbytes)}" if counts["converted"] or dry_run else ""
    end = ". Nothing was written." if dry_run else rate if counts["converted"] else "."
    lines.append(Line(f"{summary}{size}{end}"))
    planned = [result.destination for result in results if result.status == "planned"]
    free, folder = (convert.free_space(planned[0]) if planned else None) or (None, "")
    if free is not None:
        short = "NOT ENOUGH: " if nbytes > free else ""
        space = f"Space: {short}about {format_size(nbytes)}, and {format_size(free)} are free in {folder}"
        lines.append(Line(printable(f"{space}; nothing of the source is removed."), hang=2))
    of_plan = {"free_bytes": free} if dry_run else {}
    rows = [{"bytes": result.nbytes} | dataclasses.asdict(result) | of_plan for result in results]
    written = "would be written" if dry_run else "written"
    remedy = _KEEPS_ALL if to_file else "The source has them: keep it."
    lacks = [(one, f"{written} without: {'; '.join(one.left_out)}. {remedy}") for one in results if one.left_out]
    errors = [one.error for one in results if one.error is not None]
    problems = [Line(printable(f"Error: {error}"), hang=2) for error in [*errors, *_with_sources(lacks)]]
    return Report(lines, lambda: rows, problems, found=bool(problems))


def _with_sources(facts: Sequence[tuple[Conversion, str]]) -> list[str]:
    """Return each fact once, after the first source that it is about and the number of the others."""
    sources: dict[str, list[str]] = {}
    for result, fact in facts:
        sources.setdefault(fact, []).append(result.source)
    more = {fact: f" (and {len(found) - 1} more)" if len(found) > 1 else "" for fact, found in sources.items()}
    return [f"{found[0]}{more[fact]}: {fact}" for fact, found in sources.items()]
