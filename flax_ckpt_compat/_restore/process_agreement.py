"""Let the processes of a job compare which checkpoint each has found, so that none goes on from other values.

Each leaves what it found in the job's key-value store, and looks at what the others left: without a barrier, because a
caller may restore in one process alone. So of those that disagree, every one but the first to come raises.
"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir
from flax_ckpt_compat._save import coordination
from flax_ckpt_compat._save.coordination import KeyValueStore
from flax_ckpt_compat.errors import CheckpointError, MultiprocessRestoreError

_log = logging.getLogger("flax_ckpt_compat")
_ROOT = "flax_ckpt_compat/found"
# What this process reported last, by subject: how many times it has looked, the path, and the key in the store.
_own: dict[str, tuple[int, str | None, str]] = {}


class Agreement:
    """One process's view of what those of its job find for one directory, prefix and step; alone, it tells nothing."""

    def __init__(self, checkpoint_dir: CheckpointDir, step: Any):
        """Begin to look; nothing is sent yet."""
        self._root, self._prefix, self._step = checkpoint_dir.root.path, checkpoint_dir.given_prefix, step
        self._start = time.time()
        self.process, self._count = coordination.process_and_count()
        self.has_reported = False

    def report(self, found: Location | None) -> None:
        """Tell the others what this process found, None for nothing; raise if another one found something else."""
        if self._count < 2:
            return
        self.has_reported = True
        subject = _digest(self._root, self._prefix, None if self._step is None else str(self._step))
        try:
            count, before, others = self._exchange(subject, "" if found is None else found.path)
        except CheckpointError:  # the store cannot be reached: process 0 is gone, and the job with it
            return
        for process, record in sorted(others.items()):
            if record["path"] == before and (record["count"] < count or self._was_removed(found, record["time"])):
                continue  # both saw it, and the other has not looked again since
            if self._contradicts(found, record["path"], record["time"]):
                raise self._error(found, process, record["path"])
        if self._step is not None and found is not None:
            with suppress(CheckpointError):
                self._warn_of_other_steps(_digest(self._root, self._prefix, "any step"), found.path)

    def _warn_of_other_steps(self, subject: str, path: str) -> None:
        """Warn if another process restored another named step as its restore of this number; it may be meant."""
        count, _, others = self._exchange(subject, path)
        for process, record in sorted(others.items()):
            if record["count"] == count and record["path"] != path:
                _log.warning(
                    "process %d of this job restores %s, and process %d restores %s: their values differ; pass one "
                    "step in all of them, unless this is meant",
                    *(process, record["path"], self.process, path),
                )
                return

    def _exchange(self, subject: str, path: str) -> tuple[int, str | None, dict[int, dict[str, Any]]]:
        """Tell the others a path; return how often this process did, its path before, and what the others told last."""
        store, folder = KeyValueStore(self._root), f"{_ROOT}/{subject}/"
        count, before, old_key = _own.get(subject, (0, None, ""))
        count += 1
        key = f"{folder}{self.process}-{count:010}"
        _own[subject] = count, path, key
        store.set(key, {"path": path, "time": time.time(), "count": count})
        if old_key:
            store.delete(old_key)
        by_process = {int(name.partition("-")[0]): record for name, record in store.read_folder(folder).items()}
        return count, before, {process: record for process, record in by_process.items() if process != self.process}

    def _contradicts(self, found: Location | None, path: str, when: float) -> bool:
        """Return whether another process, which looked at a time and found a path, sees another directory than this."""
        if found is None:
            return bool(path)
        if found.path == path:
            return False
        changed = _changed(found)
        if changed is None or changed > when:  # in stores; or it came after the other had looked
            return False
        appeared = _changed(location_of(path)) if path else None
        return appeared is None or appeared <= self._start

    def _was_removed(self, found: Location | None, when: float) -> bool:
        """Return whether what both processes saw may have gone after a time: its folder changed since."""
        if found is not None:
            return False
        folder = location_of(self._root)
        while (changed := _changed(folder)) is None and folder.parent != folder:
            folder = folder.parent
        return changed is None or changed > when

    def _error(self, found: Location | None, process: int, path: str) -> MultiprocessRestoreError:
        here, there = "nothing" if found is None else found.path, path or "nothing"
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
