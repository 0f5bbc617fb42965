"""How cost grows with processes and leaves: ``python -m tests.benchmarks.scale``, from the checkout.

Counts what real processes on this machine send, write and read; and lets one process play a thousand.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks import disk, scale_jobs, scale_play
from tests.benchmarks.report import Table
from tests.support.team import Team

PAGE = Path(__file__).parents[2] / "migration_guide" / "scale.md"
# What is measured, of each its own place on the page.
_PARTS = ("real", "simulated")
_FORMATS = {True: "orbax", False: "msgpack"}
# With a file for every shard, more would measure the file system only.
_MOST_FILES = 20_000
# Seconds for one save or restore; of 50,000 leaves by eight processes on two CPUs it takes minutes.
_LIMIT = 900
_KINDS = ("index", "array_metadatas", "_sharding")
_STAGES = ("database s", "merge and check s", "open s")
_PATIENCE = 1_800  # s for one size


def main(arguments: list[str] | None = None) -> None:
    """Runs it, prints tables, and puts them on the page with ``--write``."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few processes and leaves")
    parser.add_argument("--workdir", help="where to write checkpoints; decides the file system")
    parser.add_argument("--only", choices=_PARTS, help="one half: real processes, or those that one process plays")
    parser.add_argument("--write", action="store_true", help=f"put the tables on {PAGE.name}")
    options = parser.parse_args(arguments)
    if options.write and options.quick:
        parser.error("the page holds a whole run: --write does not go with --quick")
    processes = (1, 2) if options.quick else (1, 2, 4, 8)
    leaves = (100,) if options.quick else (500, 5_000, 50_000)
    with tempfile.TemporaryDirectory(dir=options.workdir) as workdir:
        facts = disk.machine_facts(workdir)
        machine = f"{facts['CPUs']} CPUs, {facts['file system']}, jax {facts['jax']}."
        for part in [options.only] if options.only else _PARTS:
            if part == "real":
                tables = real_tables(processes, leaves, workdir)
            else:
                tables = simulated_tables(workdir, quick=options.quick)
            for table in tables:
                table.show()
            if options.write:
                page = PAGE.read_text(encoding="utf-8")
                PAGE.write_text(with_tables(page, part, machine, tables), encoding="utf-8")


def with_tables(page: str, part: str, machine: str, tables: list[Table]) -> str:
    """The page with what was measured in place of what was there."""
    text = "\n".join([f"\n{machine}\n", *(f"{table.markdown()}\n" for table in tables)])
    place = re.compile(rf"(?<=<!-- {part} -->\n).*?(?=<!-- end of {part} -->)", re.DOTALL)
    assert len(place.findall(page)) == 1, part
    return place.sub(lambda _: text, page)


def real_tables(processes: tuple[int, ...], leaves: tuple[int, ...], workdir: str) -> list[Table]:
    """Saves and restores by real processes of two devices each."""
    counts, times = [], []
    for count in processes:
        team = Team(count)
        try:
            for orbax in (True, False):
                for number in leaves:
                    if orbax or number * (2 * count + 1) <= _MOST_FILES:
                        _say(f"{count} processes, {_FORMATS[orbax]}, {number} leaves")
                        with tempfile.TemporaryDirectory(dir=workdir) as folder:
                            one = measure(team, folder, orbax, number)
                        row = (_FORMATS[orbax], str(count), f"{number:,}")
                        counts.append((*row, *counted_row(one)))
                        times.append((*row, *_timed(one)))
        finally:
            team.close()
    head = ("format", "processes", "leaves")
    counted = (
        "messages", "asked again", "bytes sent", "files", "metadata bytes", "read per process", "read calls",
        "restore's messages",
    )  # fmt: skip
    timed = ("prepare s", "write s", "merge or check s", "whole save s", "restore s")
    return [Table("Counted", (*head, *counted), counts), Table("Timed", (*head, *timed), times)]


def measure(team: Team, folder: str, orbax: bool, leaves: int) -> dict[str, Any]:
    """One save and one restore by a team, after a save that nobody looks at.

    Returns:
        ``save`` and ``restore``: what `scale_jobs` says, by process; ``files`` and ``bytes``: by kind of file.
    """
    team.call(scale_jobs.save, folder, orbax, 10, 1, timeout=_LIMIT)
    saved = team.call(scale_jobs.save, folder, orbax, leaves, 2, timeout=_LIMIT)
    files, nbytes = kinds(Path(folder))
    return {
        "save": saved,
        "restore": team.call(scale_jobs.restore, folder, leaves, 2, timeout=_LIMIT),
        "files": files,
        "bytes": nbytes,
    }


def kinds(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The files of step 2, how many and of how many bytes, by kind."""
    files, nbytes = dict[str, int](), dict[str, int]()
    for kind, path in _files_of(folder):
        files[kind] = files.get(kind, 0) + 1
        nbytes[kind] = nbytes.get(kind, 0) + path.stat().st_size
    return files, nbytes


def _say(progress: str) -> None:
    print(progress, file=sys.stderr)


def _files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in (found for top in folder.glob("*_2*") for found in (top, *top.rglob("*")) if found.is_file()):
        parts = path.relative_to(folder).parts
        if len(parts) > 1 and parts[1] in ("d", "manifest.ocdbt"):
            yield "index", path
        elif parts[0].endswith("_gda"):
            yield ".zarray" if parts[-1] == ".zarray" else "chunks", path
        elif len(parts) == 1:
            yield "msgpack", path
        else:
            yield "databases" if parts[1].startswith("ocdbt.") else parts[1], path


def counted_row(one: dict[str, Any]) -> tuple[str, ...]:
    """What `measure` counted, as the cells of a row."""
    methods = [result["messages"] for result in one["save"]]
    sent = sum(result["sent"] for result in one["save"])
    total = sum(sum(found.values()) for found in methods)
    looks = max(0, sum(found.get("key_value_dir_get", 0) for found in methods) - 2)
    again = looks + sum(found.get("blocking_key_value_get", 0) for found in methods) - 2 * (len(methods) - 1)
    restoring = sum(sum(result["messages"].values()) for result in one["restore"])
    metadata = sum(number for kind, number in one["bytes"].items() if kind != "chunks")
    read = statistics.median(result["read"] for result in one["restore"])
    calls = statistics.median(result["calls"] for result in one["restore"])
    return (
        str(total - again),
        str(again),
        f"{sent:,}",
        f"{sum(one['files'].values()):,}",
        f"{metadata:,}",
        f"{read:,.0f}",
        f"{calls:,.0f}",
        str(restoring),
    )


def _timed(one: dict[str, Any]) -> tuple[str, ...]:
    lead = one["save"][0]["seconds"]
    alone = "write" in lead
    write = max(result["seconds"]["write" if alone else "write_process_part"] for result in one["save"])
    stages = (lead["prepare"], write, lead.get("finish_multiprocess"))
    return (
        *("-" if seconds is None else f"{seconds:.2f}" for seconds in stages),
        _both(lead["all"], max(result["cpu"] for result in one["save"])),
        _both(*(max(result[kind] for result in one["restore"]) for kind in ("seconds", "cpu"))),
    )


def _both(clock: float, processor: float) -> str:
    """Seconds of the clock, and in brackets those of the processor."""
    return f"{clock:.2f} ({processor:.2f})"


def simulated_tables(workdir: str, *, quick: bool) -> list[Table]:
    """Barriers and merges of which one process simulates all sides."""
    met = [(f"{count:,}", *_met(count)) for count in ((8, 64) if quick else (8, 64, 256, 1_000))]
    sizes = ((8, 50),) if quick else ((8, 5_000), (64, 1_000), (256, 400), (1_000, 200))
    merged = [(f"{count:,}", f"{leaves:,}", *_merged(count, leaves, workdir)) for count, leaves in sizes]
    return [
        Table("Barriers of one save, simulated", ("processes", "messages", "process 0 s"), met),
        Table(
            "Databases of processes in Orbax's format, simulated",
            ("processes", "leaves", "chunks", "files", *(f"{kind} bytes" for kind in _KINDS), *_STAGES),
            merged,
        ),
    ]


def _met(count: int) -> tuple[str, ...]:
    results = _alone(1, lambda team: [team.call(scale_play.barriers, count, timeout=300)[0] for _ in range(3)])
    seconds = statistics.median(result["seconds"] for result in results)
    return f"{min(sum(result['messages'].values()) for result in results):,}", f"{seconds:.2f}"


def _merged(count: int, leaves: int, workdir: str) -> tuple[str, ...]:
    folder = tempfile.mkdtemp(dir=workdir)
    _say(f"one as {count} processes, {leaves} leaves")
    try:
        seconds = _alone(count, lambda team: team.call(scale_play.merge, folder, leaves, timeout=_PATIENCE)[0])
        files, nbytes = kinds(Path(folder))
    finally:
        shutil.rmtree(folder)
    _say(str(seconds))
    numbers = (count * leaves, sum(files.values()), *(nbytes[kind] for kind in _KINDS))
    times = (_both(*seconds[stage]) for stage in ("share", "end", "open"))
    return (*(f"{number:,}" for number in numbers), *times)


def _alone(devices: int, use: Callable[[Team], Any]) -> Any:
    team = Team(1, devices)
    try:
        return use(team)
    finally:
        team.close()


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
