"""Print what shadow mode recorded."""

from __future__ import annotations

import json
import sys

import click

from flax_ckpt_compat._core.escaping import aligned, format_size, printable
from flax_ckpt_compat._view.shadow_report import ShadowReport, shadow_report

_FORMATS = ("msgpack", "orbax")


def show(directory: str, *, as_json: bool) -> None:
    """Print the report of a directory, and exit with the command's code."""
    report = shadow_report(directory)
    click.echo(json.dumps(report.records, indent=2) if as_json else "\n".join(_lines(report)))
    sys.exit(0 if report.is_clean else 1)


def _lines(report: ShadowReport) -> list[str]:
    compared, differ = report.compared, [record for record in report.records if record.get("differences")]
    failed = [record for record in report.records if "error" in record]
    lines = [f"{len(compared)} saves compared, {len(differ)} differ, {len(failed)} could not be compared", ""]
    if compared:
        rows: list[tuple[str, ...]] = [("format", "write", "read", "size")]
        for format in _FORMATS:
            seconds = [
                f"{report.total(key, format) / len(compared):.3f} s" for key in ("write_seconds", "read_seconds")
            ]
            rows.append((format, *seconds, format_size(int(report.total("bytes", format) / len(compared)))))
        lines += ["Mean of a save:", *aligned(rows, right={1, 2, 3}), ""]
    for record in differ:
        lines += [
            f"{printable(record['name'])} differs:",
            *(f"  {printable(leaf)}" for leaf in record["different_leaves"]),
        ]
    lines += [f"{printable(record['name'])}: {printable(record['error'])}" for record in failed]
    if report.is_clean:
        lines.append("Both formats hold the same values, bit for bit. To flip: FLAX_USE_ORBAX_CHECKPOINTING=true")
    return lines
