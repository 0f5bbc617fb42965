"""What holds for all commands: quick to start, examples in the help, failures in one paragraph, completion."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from flax_ckpt_compat import cli, save
from flax_ckpt_compat._view import verify
from flax_ckpt_compat.cli._command_base import Command
from tests.support import terminal
from tests.support.interpreters import run_python

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
NAMES = cli.main.list_commands(click.Context(cli.main))
PROGRAM = [sys.executable, "-m", "flax_ckpt_compat"]
READING = ("clean", "diff", "ls", "plan", "scan", "show", "verify")


@pytest.mark.slow
def test_imports(tmp_path: Path) -> None:
    """The help, and what reads no arrays, loads no numpy; what reads them loads neither jax, flax nor rich."""
    path = save(tmp_path / "run", {"w": np.ones(3)}, step=1, format="orbax")
    script = f"""
import json, sys
from flax_ckpt_compat.cli import main
heavy = {{"jax", "flax", "numpy", "tensorstore", "orbax", "rich", "flax_ckpt_compat.rules"}}
for arguments in (["--help"], ["ls", {str(tmp_path / "run")!r}], ["clean", {str(tmp_path)!r}],
                  ["show", {path!r}], ["verify", {path!r}], ["diff", {path!r}, {path!r}],
                  ["convert", {path!r}, {str(tmp_path / "out")!r}, "--to", "msgpack"]):
    try:
        main(arguments)
    except SystemExit as end:
        print(json.dumps([arguments[0], end.code, sorted(heavy & sys.modules.keys())]), file=sys.stderr)
"""
    found = list(map(json.loads, run_python(script, fresh=True)[1].splitlines()))
    assert [one[:2] for one in found] == [
        [name, 0] for name in ("--help", "ls", "clean", "show", "verify", "diff", "convert")
    ]
    assert [one[2] for one in found[:3]] == [[], [], []]
    assert all({*one[2]} <= {"numpy", "tensorstore"} for one in found[3:])


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str) -> None:
    """Every command is summed up in one line of the list; those of class `Command` show examples, and read as JSON."""
    command = cli.main.get_command(click.Context(cli.main), name)
    assert command is not None
    (line,) = (line for line in CliRunner().invoke(cli.main, ["--help"]).stdout.splitlines() if f"  {name} " in line)
    assert line.endswith(".") and len(line) <= 80
    result = CliRunner().invoke(cli.main, [name, "--help"])
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines())  # a terminal would break it
    if isinstance(command, Command):
        assert f"  flax-ckpt {name}" in result.stdout.partition("Examples:\n")[2]
        assert "--debug" in result.stdout
    if name in READING:
        assert "--json" in result.stdout
        assert "xit code" in result.stdout


def test_errors_that_nobody_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug is one paragraph as well, which says how to report it; with --debug it is the traceback. Ctrl-C is 130."""
    errors: list[BaseException] = [KeyError("oh"), KeyError("oh"), KeyboardInterrupt()]

    def fail(*_: object, **__: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(verify, "verify", fail)
    result = CliRunner().invoke(cli.main, ["verify", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: KeyError: 'oh'\nThis is not an error that flax-ckpt expects")
    debugged = CliRunner().invoke(cli.main, ["verify", str(tmp_path), "--debug"])
    assert debugged.exit_code == 2
    assert "Traceback" in debugged.stderr
    assert CliRunner().invoke(cli.main, ["verify", str(tmp_path)]).exit_code == 130


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("flax-ckpt ver", "plain,verify"),
        ("flax-ckpt show ru", "file,ru"),
        ("flax-ckpt show runs --html pa", "file,pa"),
        ("flax-ckpt show --stat", "plain,--stats"),
    ],
)
def test_completion(line: str, completed: str) -> None:
    """Click's completion, as the guide shows it, completes commands and options, and leaves files to the shell."""
    words = {"_FLAX_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert CliRunner().invoke(cli.main, prog_name="flax-ckpt", env=words).stdout.split() == [completed]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["verify runs", "verify runs --json", "show runs/a", "verify --help", "--help"])
def test_a_reader_that_goes_away(line: str, tree_of_runs: Path) -> None:
    """Behind ``| head -1``, a command exits with 128 + SIGPIPE, as others do, and not as if it had found damage."""
    del tree_of_runs
    reader, pipe = os.pipe()
    os.close(reader)
    words = [*PROGRAM, *line.split()]
    done = subprocess.run(words, env=ENVIRONMENT, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_guide() -> None:
    """The guide's page has a row for every command, with its exit codes."""
    page = (ROOT / "migration_guide" / "commands.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `flax-ckpt ")]
    assert sorted(row[0].split()[1].strip("`") for row in rows) == NAMES
    assert all(len(row) == 4 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["verify runs", "show nope", "plan runs/a", "ls runs/a", "show --stats runs/a", "doctor", "scan ."]
)
def test_no_color(line: str, tree_of_runs: Path) -> None:
    """With NO_COLOR a terminal gets no escape sequence at all, for bold text and of a progress bar neither."""
    shown = terminal.raw([*PROGRAM, *line.split()], str(tree_of_runs), {**ENVIRONMENT, "NO_COLOR": "1"})
    assert "\x1b" not in shown[1]


@pytest.fixture
def tree_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory ``runs`` with one run of two steps, an empty directory and a foreign file."""
    for step in (1, 2):
        save(tmp_path / "runs" / "a", {"w": np.ones(3)}, step=step, format="msgpack", keep=9)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello\n")
    with zipfile.ZipFile(tmp_path / "notes.zip", "w") as archive:
        archive.writestr("checkpoint_1/_METADATA", "{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        *(((name, "runs/b"), 2, "/runs has a") for name in ("ls", "show", "verify", "clean", "plan")),
        *(((name, "run"), 2, "did you mean") for name in ("ls", "show", "verify", "clean", "plan")),
        *(((name, "runz"), 2, "id you mean ") for name in ("ls", "show", "verify", "clean", "plan")),
        (("convert", "runz/a", "out", "--to", "orbax"), 2, "/runs/a?"),
        *(((name, "runs/a/checkpoint_3"), 2, "did you mean ") for name in ("show", "verify", "plan")),
        *(((name, "runs"), 2, "there are checkpoints at ") for name in ("show", "plan")),
        (("ls", "runs"), 0, "there are checkpoints at "),
        *((("ls", path), 0, " (--recursive lists all below it)") for path in ("runs", ".")),
        *(((name, "notes.zip"), 2, "a zipped directory: unpack that first") for name in ("show", "verify")),
        *(((name, "empty"), 2, "pass a checkpoint, or a directory") for name in ("show", "verify", "plan")),
        *(((name, "notes.txt"), 2, "looks like a text file") for name in ("show", "verify", "plan")),
        (("clean", "notes.txt"), 2, "is not a directory: pass one"),
        (("diff", "runs/a", "runs/b"), 2, "/runs has a"),
        (("convert", "empty", "out", "--to", "orbax"), 2, "pass a checkpoint, or a directory"),
        (
            ("convert", "runs", "out", "--to", "orbax", "--target", "math:sine"),
            2,
            "'math:sine': module 'math' has no attribute",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_to_do_next(arguments: tuple[str, ...], code: int, hint: str, tree_of_runs: Path) -> None:
    """Wrong paths, empty directories and foreign files are answered with what there is instead, in one paragraph."""
    result = CliRunner().invoke(cli.main, arguments)
    assert (result.exit_code, hint in result.output) == (code, True), result.output
    assert len(result.output.splitlines()) == 1
    assert not (tree_of_runs / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *((name, "") for name in ("ls", "show", "verify", "clean", "plan", "doctor")),
        ("clean", "--yes", ""),
        ("verify", "runs", ""),
        ("diff", "runs/a", ""),
        ("convert", "", "out", "--to", "orbax"),
        ("convert", "runs", "", "--to", "orbax"),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_refused(arguments: tuple[str, ...], tree_of_runs: Path) -> None:
    """That of a variable which is not set does not stand for the working directory."""
    result = CliRunner().invoke(cli.main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the path is empty; write . for the working directory" in result.stderr
    assert sorted(path.name for path in tree_of_runs.iterdir()) == ["empty", "notes.txt", "notes.zip", "runs"]


def test_output_that_does_not_fit_the_disk(tree_of_runs: Path) -> None:
    """It is one line without a traceback, and no failure of this program."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        words = [*PROGRAM, "ls", "runs/a"]
        done = subprocess.run(words, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "Error: the output could not be written: No space left on device; free space, or redirect it elsewhere"
    ]


@pytest.mark.parametrize("closed", ["stdout", "stderr", "stdin"])
@pytest.mark.parametrize(
    "command", ["ls runs/a", "ls -r runs", "show --stats runs/a", "plan runs/a", "verify runs", "clean runs"]
)
def test_streams_that_are_closed(
    command: str, closed: str, tree_of_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``flax-ckpt ls >&-``, where Python has None for the stream, and prints nothing."""
    del tree_of_runs
    monkeypatch.setattr(sys, closed, None)
    assert cli.main(command.split(), standalone_mode=False) in (None, 0)


# Draws each report, and not the first after a quarter of a second, in which a fast machine is done.
AT_ONCE = """
from flax_ckpt_compat._core import progress
from flax_ckpt_compat.cli import main
progress._EVERY_SECONDS = 0.0
main(prog_name="flax-ckpt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("verify runs", "2 checkpoints: 2 ok"),
        ("diff runs/checkpoint_1 runs/checkpoint_2", "3 leaves identical"),
        ("convert runs to --to orbax", "2 converted"),
    ],
)
def test_bars(tmp_path: Path, line: str, printed: str) -> None:
    """A bar is drawn and removed, while results stay; there is none with --json, or where the output is piped."""
    tree = {"w": np.arange(9_000_000.0), "v": np.ones(3), "n": 1}
    for step in (1, 2):
        save(tmp_path / "runs", tree, step=step, format="msgpack")
    words = [sys.executable, "-c", AT_ONCE, *line.split()]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "NO_COLOR"}
    code, written = terminal.raw(words, str(tmp_path), environment)
    assert code == 0
    assert "##" in written
    stays = terminal.plain(terminal.shown(written))
    assert "##" not in stays
    assert printed in " ".join(stays.split())
    if "convert" in line:
        words[words.index("to")] = "to2"
    _, written = terminal.raw([*words, "--json"], str(tmp_path), environment)
    assert "##" not in written
    if "convert" in line:
        words[words.index("to2")] = "to3"
    piped = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert printed in piped.stdout
    assert "\x1b" not in piped.stdout + piped.stderr
