"""Convert checkpoints for ``flax-ckpt convert``: progress, table, summary."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import click

from flax_ckpt_compat._convert import convert
from flax_ckpt_compat._convert.jobs import Conversion, Job
from flax_ckpt_compat._core import progress_bar
from flax_ckpt_compat._core.import_by_name import load_name
from flax_ckpt_compat._core.location import of_text
from flax_ckpt_compat._core.text_formatting import aligned, format_size, printable

from ._command_base import FailedError, echo, is_terminal, print_json, wrapped

_HEADINGS = ("status", "leaves", "size", "source", "result")
_INDENT = "  "  # before what continues a line


def run(
    src: str,
    dst: str,
    *,
    to: str,
    steps: Sequence[str],
    target: str | None,
    transforms: str | None,
    items: Mapping[str, str] | None,
    sharding: str,
    dry_run: bool,
    resume: bool,
    workers: int,
    dask: str | None,
    shard: tuple[int, int] | None,
    as_json: bool,
) -> bool:
    """Convert, print what is done, and return whether something failed; see `flax_ckpt_compat.cli.convert`."""
    for name in filter(None, (target, transforms)) if dask is None else ():
        load_name(name)  # a wrong name is refused once, not for each checkpoint
    options: dict[str, Any] = {"target": target, "transforms": transforms, "item": items, "shard": shard}
    jobs = convert.plan(src, dst, to, step=steps or None, sharding=sharding, **options)
    start = time.monotonic()
    results: list[Conversion] = []
    with ExitStack() as stack:
        bar = stack.enter_context(
            _progress(jobs) if progress_bar.is_shown() and not (dry_run or as_json) else nullcontext(_Silent())
        )
        executor = stack.enter_context(_executor(workers, dask))
        stack.callback(bar.stop)  # first, as the executor waits for its threads
        callback = None if dask else bar.advance
        for result in convert.run(jobs, executor, dry_run=dry_run, resume=resume, progress=callback):
            results.append(result)
            bar.done(result)
            if not as_json and not dry_run:
                bar.print(_line(result))
    order = {job.source: number for number, job in enumerate(jobs)}
    results.sort(key=lambda result: order[result.source])
    return _report(results, time.monotonic() - start, dry_run=dry_run, as_json=as_json)


def _report(results: Sequence[Conversion], seconds: float, *, dry_run: bool, as_json: bool) -> bool:
    if as_json:
        print_json([_as_json(result) for result in results])
    elif dry_run:
        rows = [_cells(result) for result in results]
        lines = aligned([_HEADINGS, *rows], right=(1, 2))
        if is_terminal(sys.stdout) and max(map(len, lines)) > shutil.get_terminal_size().columns:
            lines = [wrapped(_line(result), _INDENT) for result in results]
        click.echo("\n".join(lines))
    if not as_json:
        for note in dict.fromkeys(note for result in results for note in result.notes):
            mine = [result for result in results if note in result.notes]
            more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
            echo(f"Note: {printable(mine[0].source)}{more}: {note}", _INDENT, err=True)
        echo(_summary(results, seconds, dry_run=dry_run))
    failed = [result for result in results if result.error is not None]
    for result in failed:
        echo(f"Error: {printable(str(result.error))}", _INDENT, err=True)
    return bool(failed)


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


def _cells(result: Conversion) -> tuple[str, ...]:
    known = result.status != "failed"
    size, leaves = (format_size(result.nbytes), str(result.leaves)) if known else ("-", "-")
    return result.status, leaves, size, *(printable(one, one_line=True) for one in (result.source, result.destination))


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
    }


@contextmanager
def _executor(workers: int, dask: str | None) -> Iterator[Executor | None]:
    if dask is not None:
        try:
            from distributed import Client
        except ImportError:
            raise FailedError("--dask needs the package distributed: pip install distributed") from None
        try:
            _reach(dask)
            client = Client(dask, timeout=30)
        except (OSError, ValueError) as error:
            raise FailedError(f"no Dask scheduler answers at {dask}: {error}; check the address") from error
        with client:
            yield client.get_executor(pure=False)
    elif workers > 1:
        with ThreadPoolExecutor(workers, thread_name_prefix="flax-ckpt-convert") as executor:
            yield executor
    else:
        yield None


def _reach(address: str) -> None:
    """Raise at once if nothing listens at an address of TCP: dask's client would try it again for its whole timeout."""
    from distributed.comm import get_address_host_port

    if address.partition("://")[0] in (address, "tcp", "tls"):
        socket.create_connection(get_address_host_port(address), timeout=10).close()


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
    with progress_bar.display() as progress:
        yield _Bar(progress, jobs)
