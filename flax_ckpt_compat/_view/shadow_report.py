"""Read what shadow mode recorded beside the checkpoints of a directory."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import CheckpointNotFoundError, CorruptCheckpointError
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.text_formatting import aligned, counted, format_size, printable
from flax_ckpt_compat._discovery import not_found
from flax_ckpt_compat._save.shadow import FOLDER

_FORMATS = tuple(format.value for format in Format)


@dataclasses.dataclass(frozen=True)
class ShadowReport:
    """The saves that shadow mode compared.

    Attributes:
        records: one mapping a save, by time: ``name``, ``saved``, ``format``, ``shadow``, ``leaves``, and
            ``write_seconds``, ``read_seconds``, ``bytes`` (by format), ``differences``, ``different_leaves``; or
            ``error``.
    """

    records: tuple[dict[str, Any], ...]

    @property
    def compared(self) -> tuple[dict[str, Any], ...]:
        """Return the saves of which both formats were read back."""
        return tuple(record for record in self.records if "error" not in record)

    @property
    def is_clean(self) -> bool:
        """Return whether every save was compared and none differed."""
        return len(self.compared) == len(self.records) and not any(record["differences"] for record in self.records)

    def total(self, quantity: str, format: str) -> float:
        """Return the sum of ``write_seconds``, ``read_seconds`` or ``bytes`` over the compared saves."""
        return sum(float(record[quantity][format]) for record in self.compared)


def shadow_report(directory: str | os.PathLike[str]) -> ShadowReport:
    """Read the records of shadow mode in a checkpoint directory; raise if there are none, or one is damaged."""
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
    records = [_record(folder / name) for name in names]
    return ShadowReport(tuple(sorted(records, key=lambda record: str(record["saved"]))))


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
        tuple(record[key][name] + 0.0 for key in ("write_seconds", "read_seconds", "bytes") for name in _FORMATS)
    str(record["name"])


def lines(report: ShadowReport) -> list[str]:
    """Return the report as lines of text."""
    compared, differ = report.compared, [record for record in report.records if record.get("differences")]
    failed = [record for record in report.records if "error" in record]
    saves = counted(len(compared), "save")
    lines = [f"{saves} compared, {len(differ)} differ, {len(failed)} could not be compared", ""]
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
        flag = "false" if compared[-1].get("format") == Format.ORBAX.value else "true"
        lines.append(f"Both formats hold the same values, bit for bit. To flip: FLAX_USE_ORBAX_CHECKPOINTING={flag}")
    return lines
