"""Let real releases of Flax and Orbax read our files: ``python -m tests.readers_matrix [RELEASE…] [--write]``.

Each release, such as ``0.8.2+0.5.7`` (Flax and Orbax; all by default), is installed into a new virtual environment,
which is removed afterwards. ``results.json`` keeps what was found; ``--write`` writes the table of all into the guide.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from . import table
from .table import RELEASES, Release

_READER = Path(__file__).with_name("read.py")


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Write the table into the guide.")
def main(names: tuple[str, ...], write: bool) -> None:
    """Run the releases one after another; see the module."""
    if unknown := set(names) - RELEASES.keys():
        raise click.BadParameter(f"{sorted(unknown)}; the releases are {', '.join(RELEASES)}")
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary, "files")
        _write_cases(files)
        for name in names or RELEASES:
            found = _run(RELEASES[name], Path(temporary, "venv"), files)
            if found is not None:
                table.record(name, found)
                click.echo(table.row(name, []))
    if write:
        table.write_guide()


def _write_cases(files: Path) -> None:
    code = f"from pathlib import Path; from tests.readers_matrix import cases; cases.write(Path({str(files)!r}))"
    flags = "--xla_force_host_platform_device_count=8"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "XLA_FLAGS": flags})


def _run(release: Release, venv: Path, files: Path) -> dict[str, str] | None:
    """Return what a release reads: case/way → "" or the reason, or None if it cannot be installed here."""
    python = _find_python(release.python)
    if python is None:
        click.echo(f"no Python {release.python} here", err=True)
        return None
    try:
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
        pip = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
        subprocess.run([*pip, *release.requirements], check=True, stderr=subprocess.DEVNULL)
        # Not in this directory, where the reader would import the packages beside it.
        read = subprocess.run(
            [venv / "bin" / "python", str(_READER), str(files)], capture_output=True, text=True, timeout=900, cwd=venv
        )
        if read.returncode:
            raise click.ClickException(f"{release}: {read.stderr[-2000:]}")
        lines = [json.loads(line) for line in read.stdout.splitlines() if line.startswith("[")]
        return {f"{case}/{way}": result for case, way, result in lines}
    finally:
        shutil.rmtree(venv, ignore_errors=True)


def _find_python(version: str) -> str | None:
    found = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


if __name__ == "__main__":
    main()
