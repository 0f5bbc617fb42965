"""Define ``flax-ckpt demo``: kill an unmodified training script, resume it across the flag, compare every bit."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from flax_ckpt_compat._core.text_formatting import aligned

from ._command_base import INTERRUPTED, FailedError, make_console

if TYPE_CHECKING:
    from rich.console import Console

    from flax_ckpt_compat import Plan
    from flax_ckpt_compat.cli._demo_checks import Entry, Timing

_NEEDS = {"optax": "optax", "orbax.checkpoint": "orbax-checkpoint", "sklearn": "scikit-learn"}
_STEPS = 600
_KILL_AT = 200
_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo_train.py")


class _DemoCommand(click.Command):
    """Command with a specific error for options of the training script, which it does not pass on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = (
                f"No such option: {error.option_name} (the demo's training is fixed; only --workdir can be chosen)"
            )
            raise click.NoSuchOption(error.option_name, message=message, ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


@click.command(cls=_DemoCommand)
@click.option("--workdir", type=click.Path(file_okay=False), help="Keep the files here (must be empty or new).")
def command(workdir: str | None) -> None:
    """Train, kill, flip the flag, resume, check every bit; under a minute.

    Runs an ordinary Flax training script on real data through "flax-ckpt run", and compares what the
    checkpoints hold with what Flax's and Orbax's own readers say. Exit code 1 if a single bit differs, 2 if nothing
    was compared.
    """
    missing = [package for module, package in _NEEDS.items() if not _is_installed(module)]
    if missing:
        raise FailedError(
            f"the demo also needs {', '.join(missing)}. Install {'it' if len(missing) == 1 else 'them'} with\n\n"
            f"    python -m pip install {' '.join(missing)}"
        )
    used: contextlib.AbstractContextManager[str]
    if workdir:
        _prepare(workdir)
        used = contextlib.nullcontext(os.path.abspath(workdir))
    else:
        used = tempfile.TemporaryDirectory(prefix="flax-ckpt-demo-")
    with used as folder, _silence():
        sys.exit(0 if _run_stages(folder, keep=workdir is not None) else 1)


def _prepare(workdir: str) -> None:
    try:
        os.makedirs(workdir, exist_ok=True)
        used = os.listdir(workdir)
        # Fail here, and not in the training script, if nothing can be written.
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        message = f"{workdir!r} cannot be used: {error.strerror}. Pass a new or an empty folder."
        raise click.BadParameter(message, param_hint="--workdir") from None
    if used:
        raise FailedError(f"{workdir} is not empty; pass a new or an empty folder")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silence the deprecation warnings and logs of Flax and Orbax."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _run_stages(folder: str, *, keep: bool) -> bool:
    """Run all stages; return whether all values were identical."""
    console = make_console(soft_wrap=True)
    console.print("Values are compared with what Flax's own and Orbax's own readers say.")
    run, old = os.path.join(folder, "run"), os.path.join(folder, "old_run")
    verdicts = [_stage_killed(console, run, old), _stage_resumed(console, run), _stage_changed(console, old)]
    _stage_timed(console, os.path.join(folder, "timing"))
    good = all(verdicts)
    console.print("\nEvery value is bit-identical." if good else "\nNOT IDENTICAL: see above.", style="bold")
    _show_next_steps(console)
    if keep:
        console.print(f"The files are in {folder}")
    return good


def _stage_killed(console: Console, run: str, old: str) -> bool:
    _headline(console, "1", f"flag off: trains, and is killed (SIGKILL) after step {_KILL_AT}")
    saved = _train(console, run, flag=False, kill_at=_KILL_AT)
    console.print(f"  killed (exit {-signal.SIGKILL}); accuracy at the last save: {saved['accuracy']:.1%}")
    good = _show_directory(console, run)
    shutil.copytree(run, old)
    return good


def _stage_resumed(console: Console, run: str) -> bool:
    _headline(console, "2", "flag on: the same command goes on where the killed one stopped")
    result = _train(console, run, flag=True)
    console.print(f"  resumed at step {result['resumed_at']}, trained to step {result['step']}")
    console.print(f"  accuracy: {result['accuracy']:.1%}")
    good = _show_directory(console, run)
    return good and result["resumed_at"] >= _KILL_AT and result["step"] == _STEPS


def _stage_changed(console: Console, old: str) -> bool:
    from flax_ckpt_compat import checkpoints
    from flax_ckpt_compat.cli import _demo_checks

    _headline(console, "3", "the old checkpoint, into a changed state: `Dense_2` is now `head`,")
    console.print("   and the field `batch_stats` is new", style="bold")
    path = checkpoints.latest_checkpoint(old)
    assert path is not None
    plan, entry, kept = _demo_checks.restore_into_changed_state(path)
    _show_plan(console, plan)
    _show_entries(console, [entry])
    console.print(f"  batch_stats, which the file lacks, {'kept from' if kept else 'NOT KEPT from'} the target")
    return entry.identical and kept


def _show_plan(console: Console, plan: Plan) -> None:
    """Show the plan's summary and the rules that it proposes; the demo restores with them."""
    summary = itertools.takewhile(lambda line: not line.startswith(("  leaf", "from ")), str(plan).splitlines()[1:])
    console.print('  >>> print(plan_restore("old_run", state))', markup=False)
    for line in [line for line in summary if line.strip()]:
        console.print(f"  {line.strip()}", markup=False)
    console.print("  transforms = [", markup=False)
    for rule in plan.suggestion.rules if plan.suggestion is not None else ():
        console.print(f"      {rule.source},", markup=False)
    console.print('  ]\n  >>> restore("old_run", state, transforms=transforms)', markup=False)


def _stage_timed(console: Console, folder: str) -> None:
    from flax_ckpt_compat.cli import _demo_checks

    _headline(console, "4", f"a TrainState of 52 MB by us and by Flax itself, fastest of {_demo_checks.ROUNDS} turns")
    try:
        with console.status("timing") as status:
            timings = _demo_checks.time_both(folder, status.update)
    except ImportError as error:
        console.print(f"  left out: {error}")
    else:
        _show_timings(console, timings)


def _show_next_steps(console: Console) -> None:
    _headline(console, "", "Go on:")
    console.print("  flax-ckpt run train.py …    your own script, unchanged")
    console.print("  flax-ckpt scan src          what in your code breaks on directories")
    console.print("  flax-ckpt plan --help       what a restore into your state would do")
    console.print("  migration_guide/index.md    recipes, errors, settings, and how to leave")


def _train(console: Console, run: str, *, flag: bool, kill_at: int | None = None) -> dict[str, Any]:
    """Run the training script to its end, or kill it after a step; return its last report."""
    arguments = [_SCRIPT, "--workdir", run, "--steps", str(_STEPS)]
    environment = {**os.environ, "FLAX_USE_ORBAX_CHECKPOINTING": str(flag).lower()}
    shown = " ".join(["flax-ckpt run", os.path.basename(_SCRIPT), *arguments[3:]])
    console.print(f"  $ FLAX_USE_ORBAX_CHECKPOINTING={environment['FLAX_USE_ORBAX_CHECKPOINTING']} \\")
    console.print(f"    {shown} --workdir …")
    printed: list[str] = []
    reports: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+") as stderr:
        command_line = [sys.executable, "-m", "flax_ckpt_compat", "run", *arguments]
        with (
            console.status("training"),
            subprocess.Popen(  # noqa: S603 - our own interpreter on our own script
                command_line, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
            ) as child,
        ):
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    printed.append(line)
                    reports += _parse_report(line)
                    if kill_at is not None and reports and reports[-1].get("saved") == kill_at:
                        child.kill()
            except KeyboardInterrupt:
                child.kill()  # it may not have got the signal, and its folder is removed next
                raise
        stderr.seek(0)
        printed.append(stderr.read())
    if not reports or child.returncode != (0 if kill_at is None else -signal.SIGKILL):
        _fail(console, child.returncode, "".join(printed))
    return reports[-1]


def _parse_report(line: str) -> list[dict[str, Any]]:
    try:
        report = json.loads(line)
    except ValueError:  # something that a library printed
        return []
    return [report] if isinstance(report, dict) else []


def _fail(console: Console, code: int, printed: str) -> NoReturn:
    console.print(printed.rstrip(), markup=False)
    raise FailedError(
        f"the training script did not run as planned (exit {code}); what it printed is above. Nothing was compared."
    )


def _headline(console: Console, number: str, text: str) -> None:
    console.print(f"\n[bold]{f'{number}  {text}'.strip()}[/bold]")


def _show_directory(console: Console, run: str) -> bool:
    from flax_ckpt_compat.cli import _demo_checks

    with console.status("comparing with the real readers"):
        entries = _demo_checks.inspect_directory(run)
    _show_entries(console, entries)
    leftovers = sorted(set(os.listdir(run)) - {entry.name for entry in entries})
    if leftovers:
        console.print(f"  unfinished, and no checkpoint: {', '.join(leftovers)}")
    return bool(entries) and all(entry.identical for entry in entries)


def _show_entries(console: Console, entries: list[Entry]) -> None:
    rows = [("checkpoint", "format", "bytes", "leaves", "values")]
    for entry in entries:
        verdict = "bit-identical" if entry.identical else "DIFFERENT"
        rows.append((entry.name, entry.format, f"{entry.nbytes:,}", str(entry.leaves), verdict))
    _show_rows(console, rows, numbers={2, 3})


def _show_timings(console: Console, timings: list[Timing]) -> None:
    rows = [("operation", "ours", "Flax", "Flax / ours")]
    for timing in timings:
        ratio = f"{timing.flax / timing.ours:.1f}x"
        rows.append((timing.operation, f"{timing.ours * 1e3:.1f} ms", f"{timing.flax * 1e3:.1f} ms", ratio))
    _show_rows(console, rows, numbers={1, 2, 3})
    # By system calls: Flax's msgpack save does not fsync; ours does, and so does Orbax's TensorStore.
    console.print("  Ours waits until the disk has the files (fsync), and so does Orbax.")
    console.print("  Flax's msgpack save does not wait for the disk.")
    if any(timing.operation == "msgpack save" and timing.ours > timing.flax for timing in timings):
        console.print("  Our msgpack save took longer here; that wait is in its time.")


def _show_rows(console: Console, rows: Sequence[tuple[str, ...]], numbers: set[int]) -> None:
    for row, line in zip(rows, aligned(rows, numbers), strict=True):
        style = "bold" if row is rows[0] else "bold red" if "DIFFERENT" in row else None
        console.print(f"  {line}", style=style, markup=False)
