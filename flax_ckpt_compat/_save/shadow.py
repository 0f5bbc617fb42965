"""Shadow mode: write each checkpoint in the other format too, read both back, compare them, and take the times.

The copy lies in a folder whose name no prefix begins with, so neither Flax nor Orbax takes it for a checkpoint. It is
removed when it was compared; what stays is a small JSON record of each save, which ``flax-ckpt shadow-report`` reads.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import logging
import time
from contextlib import closing
from typing import Any

import jax

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.equality import differences
from flax_ckpt_compat._core.local.syncing import write_file
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.progress import OFF
from flax_ckpt_compat._core.tree import Node, iter_leaves, show_path
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._save.request import SaveRequest

_log = logging.getLogger("flax_ckpt_compat")
FOLDER = steps.SHADOW_FOLDER
_OTHER = {Format.MSGPACK: Format.ORBAX, Format.ORBAX: Format.MSGPACK}
_MAX_DIFFERENCES = 20  # listed in a record


def compare(request: SaveRequest, tree: Node, seconds: float) -> None:
    """Save what was just published in the other format, compare both checkpoints bit by bit, and record the result.

    Never raises what concerns the copy: a failure is logged and recorded. Writing the tree took ``seconds``."""
    folder = request.directory / FOLDER
    record: dict[str, Any] = {
        "name": request.name,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "format": request.format.value,
        "shadow": _OTHER[request.format].value,
        "leaves": sum(1 for _ in iter_leaves(tree)),
    }
    copy = folder / request.name
    try:
        folder.prepare_directory()
        record["write_seconds"] = {request.format.value: seconds, record["shadow"]: _write(request, tree, copy)}
        record |= _compared(request, copy)
    except Exception as error:  # noqa: BLE001 - training goes on; the report says so
        record["error"] = f"{type(error).__name__}: {error}"
    if record.get("error") or record.get("differences"):
        _log.warning("Shadow of %s: %s", request.path, record.get("error") or f"{record['differences']} leaves differ")
    try:
        if not record.get("differences"):
            folder.discard([request.name])
        _write_record(copy.sibling(".json"), record)
    except Exception as error:  # noqa: BLE001
        _log.warning("Cannot record the shadow of %s: %s: %s", request.path, type(error).__name__, error)


def _write(request: SaveRequest, tree: Node, copy: Location) -> float:
    """Write a tree in the other format and return the seconds that it took."""
    backend = backend_for(_OTHER[request.format])
    start = time.perf_counter()
    with copy.temporary(locked=True) as temporary:  # on a full disk, one that stays would make the next saves fail
        with jax.transfer_guard_device_to_host("allow"):
            backend.write(temporary, backend.prepare(tree), dataclasses.replace(request.options, meter=OFF))
        copy.publish(temporary)
    return time.perf_counter() - start


def _compared(request: SaveRequest, copy: Location) -> dict[str, Any]:
    """Read both checkpoints back and return what the record says of them."""
    read: dict[str, float] = {}
    with (
        closing(_TimedReader(request.location, request.format, read)) as first,
        closing(_TimedReader(copy, _OTHER[request.format], read)) as second,
    ):
        found = differences(first, second)
        listed = [f"{show_path(path)}: {what}" for path, what in itertools.islice(found, _MAX_DIFFERENCES)]
        more = sum(1 for _ in found)
    stored = {request.format: request.location, _OTHER[request.format]: copy}
    return {
        "read_seconds": read,
        "bytes": {format.value: location.total_size() for format, location in stored.items()},
        "differences": len(listed) + more,
        "different_leaves": listed,
    }


class _TimedReader:
    """Reader that adds the seconds of opening and reading to a mapping, under its format's name."""

    def __init__(self, location: Location, format: Format, seconds: dict[str, float]):
        self._seconds, self._name = seconds, format.value
        start = time.perf_counter()
        self._reader = backend_for(format).open(location)
        self.tree = self._reader.tree
        seconds[self._name] = time.perf_counter() - start

    def read(self, handles: Any) -> list[Any]:
        start = time.perf_counter()
        values = self._reader.read(handles)
        self._seconds[self._name] += time.perf_counter() - start
        return values

    def close(self) -> None:
        self._reader.close()


def _write_record(location: Location, record: dict[str, Any]) -> None:
    with location.temporary() as temporary:
        write_file(temporary, json.dumps(record).encode())
        location.publish(temporary)
