"""Let the processes of a job compare which checkpoint each has found, so that none goes on from other values.

Each leaves what it found in the job's key-value store, and looks at what the others left: without a barrier, because a
caller may restore in one process alone. So of those that disagree, every one but the first to come raises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointError, MultiprocessRestoreError
from flax_ckpt_compat._core.location import Location, of_text
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir
from flax_ckpt_compat._save import coordination
from flax_ckpt_compat._save.coordination import KeyValueStore

_log = logging.getLogger("flax_ckpt_compat")
_ROOT = "flax_ckpt_compat/found"
_FIRST, _REST = "first", "rest"
_MOST = 256  # processes of which each looks at all others; of more, at process 0, which looks at all


@dataclasses.dataclass(slots=True)
class _OwnRecord:
    """The path that this process found last for one subject, the ``count``th time that it looked."""

    count: int = 0
    path: str | None = None
    key: str = ""


_own: dict[str, _OwnRecord] = {}


class Agreement:
    """One process's view of what the processes of a job find for one directory, prefix and step."""

    def __init__(self, checkpoint_dir: CheckpointDir, step: Any):
        """Begin to look; nothing is sent yet."""
        self._root, self._start = checkpoint_dir.root.path, time.time()
        self.process, self._count = coordination.process_and_count()
        self._subject = _digest(self._root, checkpoint_dir.given_prefix, None if step is None else str(step))
        self._steps = None if step is None else _digest(self._root, checkpoint_dir.given_prefix, "any step")
        self.has_reported = False

    def report(self, found: Location | None) -> None:
        """Tell the others what this process found, None for nothing; raise if another one found something else."""
        self.has_reported = True
        others: dict[int, dict[str, Any]] = {}
        own = _own.setdefault(self._subject, _OwnRecord())
        before, own.path, own.count = own.path, "" if found is None else found.path, own.count + 1
        with suppress(CheckpointError):  # the store cannot be reached: process 0 is gone, and the job with it
            others = self._exchange(self._subject, own)
            if self._steps is not None and found is not None:
                self._warn_of_other_steps(self._steps, found.path)
        for process, record in sorted(others.items()):
            if record["path"] == before and (record["count"] < own.count or self._was_removed(found, record["time"])):
                continue  # both saw it, and the other has not looked again since
            if self._contradicts(found, record["path"], record["time"]):
                raise self._error(found, process, record["path"])

    def _warn_of_other_steps(self, subject: str, path: str) -> None:
        """Warn if another process restored another named step as its restore of this number; it may be meant."""
        own = _own.setdefault(subject, _OwnRecord())
        own.path, own.count = path, own.count + 1
        for process, record in sorted(self._exchange(subject, own).items()):
            if record["count"] == own.count and record["path"] != path:
                _log.warning(
                    "process %d of this job restores %s, and process %d restores %s: their values differ; pass one "
                    "step in all of them, unless this is meant",
                    *(process, record["path"], self.process, path),
                )
                return

    def _exchange(self, subject: str, own: _OwnRecord) -> dict[int, dict[str, Any]]:
        store, folder, before = KeyValueStore(self._root), f"{_ROOT}/{subject}", own.key
        own.key = f"{folder}/{_REST if self.process else _FIRST}/{self.process}-{own.count:010}"
        store.set(own.key, {"path": own.path, "time": time.time(), "count": own.count})
        if before:
            store.delete(before)
        read = (_FIRST, _REST) if not self.process or self._count <= _MOST else (_FIRST,)
        records = {name: record for part in read for name, record in store.read_folder(f"{folder}/{part}/").items()}
        by_process = {int(name.partition("-")[0]): record for name, record in sorted(records.items())}
        return {process: record for process, record in by_process.items() if process != self.process}

    def _contradicts(self, found: Location | None, path: str, when: float) -> bool:
        """Return whether another process, which looked at a time and found a path, sees another directory than this."""
        if found is None or found.path == path:
            return found is None and bool(path)
        changed = _changed(found)
        if changed is None or changed > when:  # in stores; or it came after the other had looked
            return False
        appeared = _changed(of_text(path)) if path else None
        return appeared is None or appeared <= self._start

    def _was_removed(self, found: Location | None, when: float) -> bool:
        """Return whether what both processes saw may have gone after a time: its folder changed since."""
        if found is not None:
            return False
        folder = of_text(self._root)
        while (changed := _changed(folder)) is None and folder.parent != folder:
            folder = folder.parent
        return changed is None or changed > when

    def _error(self, found: Location | None, process: int, path: str) -> MultiprocessRestoreError:
        here, there = ("nothing" if one is None else one for one in (found and found.path, path or None))
        return MultiprocessRestoreError(
            f"{self._root}: process {process} of this job found {there}, and process {self.process} finds {here}, so "
            "they would go on from different values. Let all processes see one directory (is it mounted on every "
            "machine?), or pass the step; if only some of them shall restore, call this in those only",
            path=self._root,
        )


def _digest(*subject: str | None) -> str:
    return hashlib.sha256(repr(subject).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _changed(location: Location) -> float | None:
    """Return when a local checkpoint got its name, in seconds since the epoch; None if it is not there."""
    identity = location.identity()
    return None if identity is None else identity[2] / 1e9


def begin(checkpoint_dir: CheckpointDir, step: Any) -> Agreement | None:
    """Return the agreement of a restore in a job of several processes; None in a process on its own."""
    if not coordination.is_connected() or coordination.process_and_count()[1] < 2:
        return None
    return Agreement(checkpoint_dir, step)
