"""Conventions of all subcommands, and what implements them.

- Exit code 0: done, and all is well. 1: done, and what was looked for is there (damage, a difference, a restore that
  would raise). 2: refused or failed; standard error has one paragraph that says what to do, ``--debug`` the traceback.
  130: interrupted. 141: whatever read the output went away, as ``head`` does (128 + SIGPIPE, as of other programs).
- Results go to standard output, warnings and errors to standard error. Commands that read have ``--json``. Colours
  are for terminals, and ``NO_COLOR`` in the environment turns them off.
- A command imports everything slow when it runs, and jax only to place arrays.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from flax_ckpt_compat._view.metadata import Begin, Count
    from flax_ckpt_compat._view.report import Line, Report, Table

FOUND, INTERRUPTED, CLOSED_PIPE = 1, 130, 141
# Libraries of stores, and absl for what they and TensorFlow's file functions say.
_TALKATIVE = ("absl", "adlfs", "aiobotocore", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs", "urllib3")
_BY_OWN_PATH = (".safetensors", ".npz", ".msgpack")  # endings of files that hold a tree without a step


class FailedError(click.ClickException):
    """Failure of a command; exits with code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002
        """Print the message to standard error."""
        echo(f"Error: {self.message}", err=True)


class Command(click.Command):
    """Command with ``--debug`` that reports every failure alike.

    Its function returns whether what was looked for is there, for exit code 1; or None."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."))

    def invoke(self, ctx: click.Context) -> None:
        """Run the command; translate what it raises."""
        debug = ctx.params.pop("debug")
        for name in () if debug else _TALKATIVE:
            logging.getLogger(name).setLevel(logging.CRITICAL)  # their failures are ours, in one paragraph
        if os.environ.get("NO_COLOR"):  # rich knows it, click does not
            ctx.color = False
        try:
            if super().invoke(ctx):
                ctx.exit(FOUND)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001  (reported)
            message = _paragraph(error)
            if debug:
                traceback.print_exc()
                sys.exit(FailedError.exit_code)
            raise FailedError(message) from None


def command(examples: str) -> Callable[[Callable[..., Any]], Command]:
    """Decorate the function of a command, whose help ends with ``examples``, lines of shell."""
    return click.command(cls=Command, epilog="\b\nExamples:" + examples.rstrip().replace("\n", "\n  "))


def print_report(report: Report, *, as_json: bool) -> bool:
    """Print a report, as JSON if that is asked for, and its problems; return whether what was looked for is there."""
    if as_json:
        import json

        click.echo(json.dumps(report.value(), indent=2))
    else:
        print_lines(report.lines)
    print_lines(report.problems, err=True)
    return report.found


def print_lines(lines: Iterable[Line | Table], *, err: bool = False) -> None:
    """Print lines and tables of a report; on a terminal by rich, with colours unless NO_COLOR is set."""
    for line in lines:
        is_error = err or getattr(line, "is_note", False)
        stream = sys.stderr if is_error else sys.stdout
        if not is_terminal(stream):
            click.echo(str(line), file=stream, err=is_error)
            continue
        from rich.console import Console

        colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
        # To old releases of rich, an empty variable is set, too.
        console = Console(highlight=False, color_system=colors, no_color=False, stderr=is_error)
        with console.capture() as shown:  # a console of its own would write into a bar
            console.print(line, crop=False)
        erase = "\x1b[K" if console.color_system else ""  # a bar that is in this line
        print(f"{erase}{shown.get()}", end="", file=stream)


def echo(text: str, *, err: bool = False) -> None:
    """Print lines of text, which terminals wrap between words."""
    from flax_ckpt_compat._view.report import Line

    print_lines([Line(text)], err=err)


def escape_what_cannot_be_shown() -> None:
    """Let the standard streams print an escape for a character that their encoding lacks, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # of a file that was replaced by a pipe
                stream.reconfigure(errors="backslashreplace")


@contextmanager
def progress_shown(*, as_json: bool) -> Iterator[Begin]:
    """Set what begins a bar on standard error, and yield it; unless both streams are a terminal it counts nothing."""
    from flax_ckpt_compat._core import progress
    from flax_ckpt_compat._view.metadata import BAR

    if as_json or not (is_terminal(sys.stdout) and progress.is_shown()):
        yield BAR.get()
        return
    meter = progress.Meter(progress.bar)
    with meter.reporting():

        def begin(total: Callable[[], int]) -> Count:
            meter.begin("", total)
            return meter.add

        token = BAR.set(begin)
        try:
            yield begin
        finally:
            BAR.reset(token)


def tell_passed_over(path: str, found: Collection[str]) -> None:
    """Name the files below a path that are read by their own path only, which no search of a directory finds."""
    from flax_ckpt_compat._core.location import location_of
    from flax_ckpt_compat._discovery import locating

    root, inside = location_of(path), tuple(f"{one}/" for one in found)
    files = [] if root.path in found else [name for name in root.files_below() if name.endswith(_BY_OWN_PATH)]
    others = [other for name in files if not (other := (root / name).path).startswith(inside) and other not in found]
    if others:
        echo(f"Passed over: {locating.a_few(others)}. Such files are read by their own path: pass it.", err=True)


def is_terminal(stream: IO[Any] | None) -> bool:
    """Return whether a standard stream, None if it is closed, is a terminal."""
    return stream is not None and stream.isatty()


def _paragraph(error: Exception) -> str:
    """Return what is said of an error; of a full disk for the output, nothing more is written to it."""
    from flax_ckpt_compat._core.errors import FULL_DISK, CheckpointError
    from flax_ckpt_compat._core.text_formatting import printable

    text = printable(f"{type(error).__name__}: {error}")
    if isinstance(error, CheckpointError):
        return text
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        _discard_output()
        return f"the output could not be written: {error.strerror}; free space, or redirect it elsewhere"
    return f"{text}\nThis is not an error that flax-ckpt expects: run it again with --debug, and report the traceback."


@contextmanager
def reporting_closed_pipe() -> Iterator[None]:
    """Exit with a code of its own when the reader of the output has gone; click's 1 would mean damage."""
    try:
        yield
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(CLOSED_PIPE) from None


def _discard_output() -> None:
    """Discard what is still to be written, which would fail once more at the exit."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


class FilePath(click.Path):
    """A path or URL, for which shells complete names of files.

    An empty one is refused: that of a variable which is not set would stand for the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value or self.fail("the path is empty; write . for the working directory", param, ctx)


def path_argument(name: str, **options: Any) -> Callable[[Any], Any]:
    """Return an argument that is a path."""
    return click.argument(name, type=FilePath(), **options)


def json_option(what: str) -> Callable[[Any], Any]:
    """Return the option ``--json`` of a command that prints ``what`` with it."""
    return click.option("--json", "as_json", is_flag=True, help=f"Instead of text, print {what}.")


prefix_option = click.option("--prefix", default="checkpoint_", show_default=True, help="What is before the step.")
_item_option = click.option("--item", help="The item of a checkpoint of several, as one tree; all if not given.")
_step_option = click.option("--step", help="The step in a directory of checkpoints; the latest if not given.")


def checkpoint_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose one checkpoint of a path: ``--step``, ``--prefix`` and ``--item``."""
    return _step_option(prefix_option(_item_option(function)))
