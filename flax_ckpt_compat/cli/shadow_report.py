"""Define ``flax-ckpt shadow-report``: read what shadow mode recorded beside the checkpoints of a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import click

from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import CheckpointNotFoundError, CorruptCheckpointError
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.text_formatting import aligned, counted, format_size, printable
from flax_ckpt_compat._view.report import Line, Report

from ._command_base import Command, json_option, path_argument, print_report

_FORMATS = tuple(format.value for format in Format)
_SECONDS = ("write_seconds", "read_seconds")


@click.command(
    cls=Command,
    examples="""
FLAX_CKPT_COMPAT_SHADOW=true flax-ckpt run train.py --workdir runs/a
flax-ckpt shadow-report runs/a
""",
)
@path_argument("directory")
@json_option("a JSON list with one object a save; seconds, and sizes in bytes,")
def command(directory: str, *, as_json: bool) -> bool:
    """Show what shadow mode found in DIRECTORY: differences between the formats, seconds and bytes of each.

    Turn shadow mode on with FLAX_CKPT_COMPAT_SHADOW=true, or config.update(shadow=True): each save then also
    writes the other format, reads both back and compares them.

    Exit code 1 if saves differ or could not be compared, 2 if nothing was recorded.
    """
    records = read_records(directory)
    is_clean = all("error" not in record and not record["differences"] for record in records)
    lines = [Line(text, hang=2) for text in _lines(records, is_clean=is_clean)]
    return print_report(Report(lines, lambda: records, found=not is_clean), as_json=as_json)


def read_records(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return what shadow mode recorded of each save, by time; raise if there is nothing, or a record is damaged.

    A record has ``name``, ``saved``, ``format``, ``shadow``, ``leaves``, and ``write_seconds``, ``read_seconds``,
    ``bytes`` (by format), ``differences``, ``different_leaves``; or ``error``."""
    from flax_ckpt_compat._discovery import not_found
    from flax_ckpt_compat._save.shadow import FOLDER

    location = location_of(directory)
    folder = location / FOLDER
    names = [name for name in folder.listdir() if name.endswith(".json")] if folder.isdir() else []
    if not location.isdir():
        raise not_found.no_directory(location).error(location)
    if not names:
        raise CheckpointNotFoundError(
            f"{directory} has no records of shadow mode: pass the directory that was saved to, or save with "
            "FLAX_CKPT_COMPAT_SHADOW=true in the environment first",
            path=location.path,
            has_remedy=True,
        )
    return sorted((_record(folder / name) for name in names), key=lambda record: str(record["saved"]))


def _record(file: Location) -> dict[str, Any]:
    try:
        record = json.loads(file.read())
        _check(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{file} is not a record of shadow mode: {error!r}; delete it", path=file.path
        ) from error
    else:
        return {"saved": "", **record}


def _check(record: dict[str, Any]) -> None:
    """Raise what an incomplete record lacks."""
    if "error" not in record:
        record["differences"] + 0, list(record["different_leaves"])
        tuple(record[key][name] + 0.0 for key in (*_SECONDS, "bytes") for name in _FORMATS)
    str(record["name"])


def _lines(records: Sequence[dict[str, Any]], *, is_clean: bool) -> Iterator[str]:
    compared = [record for record in records if "error" not in record]
    differing = [record for record in compared if record["differences"]]
    failed = [record for record in records if "error" in record]
    saves = counted(len(compared), "save")
    yield f"{saves} compared, {len(differing)} differ, {len(failed)} could not be compared"
    yield ""
    if compared:
        yield from ("Mean of a save:", *_means(compared), "")
    for record in differing:
        yield f"{printable(record['name'])} differs:"
        yield from (f"  {printable(leaf)}" for leaf in record["different_leaves"])
    for record in failed:
        yield f"{printable(record['name'])}: {printable(record['error'])}"
    if is_clean:
        flag = "false" if compared[-1].get("format") == Format.ORBAX.value else "true"
        yield f"Both formats hold the same values, bit for bit. To flip: FLAX_USE_ORBAX_CHECKPOINTING={flag}"


def _means(compared: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the seconds and bytes of each format."""
    rows: list[tuple[str, ...]] = [("format", "write", "read", "size")]
    for format in _FORMATS:
        mean = {key: sum(record[key][format] for record in compared) / len(compared) for key in (*_SECONDS, "bytes")}
        rows.append((format, *(f"{mean[key]:.3f} s" for key in _SECONDS), format_size(int(mean["bytes"]))))
    return aligned(rows, right={1, 2, 3})
