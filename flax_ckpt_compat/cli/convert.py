"""Define ``flax-ckpt convert``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from flax_ckpt_compat._core import progress
from flax_ckpt_compat._core.arguments import load_name
from flax_ckpt_compat._core.location import of_text
from flax_ckpt_compat._core.text_formatting import format_size, printable
from flax_ckpt_compat._view.report import Line, Report

from ._command_base import (
    Command,
    echo,
    is_terminal,
    json_option,
    path_argument,
    print_report,
    tell_passed_over,
    wrapped,
)

if TYPE_CHECKING:
    from flax_ckpt_compat._convert.jobs import Conversion, Job

_INDENT = "  "  # before what continues a line
_REMEDIES = dict.fromkeys(
    ("msgpack", "safetensors"),
    "--to orbax keeps them; of several items, --item takes one without them, with exit code 0.",
)
_EXAMPLES = """
flax-ckpt convert runs/a/checkpoint_7 a7 --to orbax
flax-ckpt convert runs runs_orbax --to orbax --dry-run
flax-ckpt convert runs runs_orbax --to orbax --workers 4 --resume
flax-ckpt convert runs s3://bucket/runs --to manager --target train:make_state
flax-ckpt convert best_model runs_orbax --to manager --step 5
flax-ckpt convert runs/5 model --to msgpack --item state
flax-ckpt convert runs/5 out --to manager --step 5 --item state=default
"""


@click.command(cls=Command, examples=_EXAMPLES)
@path_argument("src")
@path_argument("dst")
@click.option(
    "--to",
    required=True,
    type=click.Choice(["orbax", "msgpack", "manager", "v1", "safetensors"]),
    help="What to write: Orbax directories, msgpack files, steps of a CheckpointManager, steps of Orbax v1's "
    "training.Checkpointer, or safetensors files.",
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    help="Only this step; repeat it for more.  [default: all] If SRC is one checkpoint: the number of the step that it "
    "becomes, also of one whose name has none.",
)
@click.option(
    "--item",
    "items",
    multiple=True,
    metavar="NAME[=NEW]",
    help="Only this item, under a new name if given; repeatable.",
)
@click.option(
    "--sharding",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    show_default=True,
    help="drop: results restore on any machine. keep: they record the devices of the source.",
)
@click.option("--all", "every", is_flag=True, help="All checkpoints, as without --step.")
@click.option("--target", metavar="MODULE:FUNCTION", help="Function that returns the saved state, for its containers.")
@click.option("--transforms", metavar="MODULE:NAME", help="Rules or transforms to apply, with the target's structure.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show what would be done, how much space it takes and how much is free; write nothing.",
)
@click.option("--resume", is_flag=True, help="Keep results that are there and equal to their sources.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Checkpoints at the same time.")
@json_option(
    "a list with source, destination, status, leaves, bytes, seconds, notes, error and left_out of each; with "
    "--dry-run also free_bytes"
)
def command(
    src: str,
    dst: str,
    to: str,
    steps: Sequence[str],
    items: Sequence[str],
    workers: int,
    *,
    every: bool,
    dry_run: bool,
    resume: bool,
    as_json: bool,
    **options: Any,
) -> bool:
    """Convert SRC, one checkpoint or all below a directory, to DST, and never touch SRC.

    For one checkpoint DST is the path of the result, else the directory of the results, which lie in it as below
    SRC; for the steps of a manager it is the manager's directory. Nothing in DST is replaced.

    Each result is read back and compared with its source before it gets its name. An interrupted conversion
    leaves no half results: run it again with --resume. Memory: the largest array of each checkpoint that is
    converted at the same time, besides buffers.

    A msgpack file stores lists and tuples as dicts with the keys 0, 1, …. These become lists, with a
    warning; --target gives the containers that the state has.

    msgpack and safetensors files have no place for custom metadata and other files in a checkpoint's directory:
    results without them are written and named, with exit code 1, unless --item chooses what to convert.

    Exit code 0: all converted. 1: some could not be, or lack something. 2: refused. 130: interrupted.
    """
    if every and steps:
        raise click.UsageError("--all and --step contradict each other; leave one out")
    chosen_items = _items(items)
    for name in filter(None, (options["target"], options["transforms"])):
        load_name(name)  # a wrong name is refused once, not for each checkpoint
    from flax_ckpt_compat._convert import convert

    jobs = convert.plan(src, dst, to, step=steps or None, item=chosen_items, **options)
    start = time.monotonic()
    results = _converted(jobs, dry_run=dry_run, resume=resume, workers=workers, as_json=as_json)
    if not steps:
        tell_passed_over(src, {job.source for job in jobs})
    return print_report(_report(results, to, time.monotonic() - start, dry_run=dry_run), as_json=as_json)


def _items(words: Sequence[str]) -> dict[str, str] | None:
    """Return the old and new names of ``--item``."""
    pairs = [(name, new, equals) for name, equals, new in (word.partition("=") for word in words)]
    if bad := [name for name, new, equals in pairs if not name or (equals and not new)]:
        raise click.UsageError(f"--item takes NAME or NAME=NEW, not {bad[0]}=")
    return {name: new for name, new, _ in pairs} or None


def _converted(jobs: Sequence[Job], *, dry_run: bool, resume: bool, workers: int, as_json: bool) -> list[Conversion]:
    """Run jobs, print each result as it is there, and return them in the order of the jobs."""
    from flax_ckpt_compat._convert import convert

    results: list[Conversion] = []
    with ExitStack() as stack:
        bar = stack.enter_context(
            _progress(jobs) if progress.is_shown() and not (dry_run or as_json) else nullcontext(_Silent())
        )
        executor = stack.enter_context(_executor(workers))
        stack.callback(bar.stop)  # first, as the executor waits for its threads
        try:
            for result in convert.run(jobs, executor, dry_run=dry_run, resume=resume, progress=bar.advance):
                results.append(result)
                bar.done(result)
                if not as_json and not dry_run:
                    bar.print(_line(result))
        except KeyboardInterrupt:
            bar.stop()
            done = sum(result.error is None for result in results)
            echo(f"{done} of {len(jobs)} converted; go on with --resume", err=True)
            raise
    order = {job.source: number for number, job in enumerate(jobs)}
    return sorted(results, key=lambda result: order[result.source])


def _report(results: Sequence[Conversion], to: str, seconds: float, *, dry_run: bool) -> Report:
    """Return what is shown of the results, each of which is printed already unless nothing was written."""
    lines = [Line(_line(result), hang=2) for result in results] if dry_run else []
    for note in dict.fromkeys(note for result in results for note in result.notes):
        mine = [result for result in results if note in result.notes]
        more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
        lines.append(Line(f"Note: {printable(mine[0].source)}{more}: {note}", hang=2, is_note=True))
    lines.append(Line(_summary(results, seconds, dry_run=dry_run)))
    free, space = _space(results) if dry_run else (None, "")
    lines += [Line(printable(space), hang=2)] if space else []
    errors = [Line(f"Error: {printable(str(one.error))}", hang=2) for one in results if one.error is not None]
    errors += _lacking(results, to)
    rows = [_as_json(result) | ({"free_bytes": free} if dry_run else {}) for result in results]
    return Report(lines, lambda: rows, errors, found=bool(errors))


def _lacking(results: Sequence[Conversion], to: str) -> Iterator[Line]:
    """Yield what results lack of their sources, once for all that lack the same."""
    remedy = _REMEDIES.get(to, "The source has them: keep it.")
    for left_out in dict.fromkeys(result.left_out for result in results if result.left_out):
        mine = [result for result in results if result.left_out == left_out]
        more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
        written = "would be written" if mine[0].status == "planned" else "written"
        text = f"{mine[0].source}{more}: {written} without: {'; '.join(left_out)}. {remedy}"
        yield Line(f"Error: {printable(text)}", hang=2)


def _space(results: Sequence[Conversion]) -> tuple[int | None, str]:
    """Return the bytes that are free where planned results go, and a line that says so; None if nothing tells."""
    from flax_ckpt_compat._convert import convert

    planned = [result for result in results if result.status == "planned"]
    found = convert.free_space(planned[0].destination) if planned else None
    if found is None:
        return None, ""
    (free, folder), nbytes = found, sum(result.nbytes for result in planned)
    short = "NOT ENOUGH: " if nbytes > free else ""
    return free, (
        f"Space: {short}about {format_size(nbytes)}, and {format_size(free)} are free in {folder}; "
        "nothing of the source is removed."
    )


def _summary(results: Sequence[Conversion], seconds: float, *, dry_run: bool) -> str:
    counts = {status: sum(result.status == status for result in results) for status in _STATUSES}
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if not counts["converted"] and not dry_run:
        return f"{shown}."
    nbytes = sum(result.nbytes for result in results if result.status in ("converted", "planned"))
    text = f"{shown}: {format_size(nbytes)}"
    if dry_run:
        return f"{text}. Nothing was written."
    return f"{text} in {seconds:.0f} s ({format_size(int(nbytes / max(seconds, 1e-3)))}/s)"


_STATUSES = ("converted", "kept", "planned", "failed")


def _line(result: Conversion) -> str:
    size = "" if result.status == "failed" else f" ({format_size(result.nbytes)})"
    return printable(f"{result.status} {result.source} → {result.destination}{size}")


def _as_json(result: Conversion) -> dict[str, Any]:
    return {
        "source": result.source,
        "destination": result.destination,
        "status": result.status,
        "leaves": result.leaves,
        "bytes": result.nbytes,
        "seconds": round(result.seconds, 3),
        "notes": list(result.notes),
        "error": result.error,
        "left_out": list(result.left_out),
    }


def _executor(workers: int) -> AbstractContextManager[Executor | None]:
    if workers == 1:
        return nullcontext()
    return ThreadPoolExecutor(workers, thread_name_prefix="flax-ckpt-convert")


class _Silent:
    """No progress bar; stops the threads of an interrupted conversion."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def advance(self, nbytes: int) -> None:  # noqa: ARG002
        """Note that bytes were written or compared."""
        if self._stopped.is_set():
            raise KeyboardInterrupt

    def done(self, result: Conversion) -> None:
        """Note that a checkpoint is done."""

    def print(self, line: str) -> None:
        """Print a line of results."""
        echo(line, _INDENT)

    def stop(self) -> None:
        """Stop the threads that convert."""
        self._stopped.set()


class _Bar(_Silent):
    """A progress bar on standard error."""

    def __init__(self, progress: Any, jobs: Sequence[Job]):
        super().__init__()
        # Each byte is written and compared. On disk some have another size, so the sum is approximate.
        self._sizes = {job.source: 2 * of_text(job.source).total_size() for job in jobs}
        self._finished, self._count, self._progress = 0, 0, progress
        self._task = progress.add_task(f"0/{len(jobs)}", total=sum(self._sizes.values()))

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        self._progress.advance(self._task, nbytes)

    def done(self, result: Conversion) -> None:
        self._finished += self._sizes[result.source]
        self._count += 1
        self._progress.update(self._task, completed=self._finished, description=f"{self._count}/{len(self._sizes)}")

    def print(self, line: str) -> None:
        if is_terminal(sys.stdout):
            self._progress.console.print(wrapped(line, _INDENT), markup=False, highlight=False, soft_wrap=True)
        else:
            super().print(line)


@contextmanager
def _progress(jobs: Sequence[Job]) -> Iterator[_Bar]:
    with progress.display() as bars:
        yield _Bar(bars, jobs)
