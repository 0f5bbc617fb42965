"""Coordinate the processes of a job by jax's key-value store: barriers with timeouts, and errors that all raise.

jax's own ``wait_at_barrier`` blocks signals for the whole timeout, and names only some of the missing processes.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax

from flax_ckpt_compat import errors
from flax_ckpt_compat._core.backend import ProcessInfo
from flax_ckpt_compat.errors import CheckpointError, MultiprocessSaveError, ProcessTimeoutError

BEGIN, COMMIT = "begin", "commit"  # the barriers of a save
_GRACE_SECONDS = 30.0  # how much longer to wait for the rest once the save has failed, so that they get the reason too
_READ_SECONDS = 2.0  # of one blocking read; Python handles no signal meanwhile
_REPORTS, _ANSWERS = "flax_ckpt_compat/reports", "flax_ckpt_compat/answers"
_ids = itertools.count(time.time_ns())  # so a process that was started anew takes no answer to the one before
Reports = Mapping[int, Mapping[str, Any]]  # by process, but for process 0


class KeyValueStore:
    """JSON objects under string keys, in process 0; ProcessTimeoutError is raised if that cannot be reached."""

    def __init__(self, path: str):
        """Connect to the store of this job; ``path`` is the checkpoint's, for error messages."""
        self._path, self._client = path, _state().client
        if self._client is None:
            message = f"jax counts {jax.process_count()} processes but has no connection between them"
            raise MultiprocessSaveError(f"{message}; call jax.distributed.initialize() in all of them first")

    def set(self, key: str, value: Mapping[str, Any]) -> None:
        """Set a key that has no value yet."""
        self._call(lambda: self._client.key_value_set(key, json.dumps(value)))

    def read_folder(self, folder: str) -> dict[str, Any]:
        """Return the present values below ``folder``, with its final slash, by the last part of their keys, sorted."""
        found = self._call(lambda: self._client.key_value_dir_get(folder))
        return {key.rpartition("/")[2]: json.loads(text) for key, text in sorted(found)}

    def wait_for(self, key: str, seconds: float) -> dict[str, Any] | None:
        """Wait for a value; return None if there is none in time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                text = self._client.blocking_key_value_get(key, max(1, int(min(_READ_SECONDS, left) * 1000)))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._unreachable(error) from error
            else:
                return dict(json.loads(text))
        return None

    def delete(self, key: str) -> None:
        """Delete a key, or, if it ends in a slash, all keys below it."""
        self._call(lambda: self._client.key_value_delete(key))

    def _call(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ProcessTimeoutError:
        message = f"{self._path}: process 0, which holds the job's key-value store, does not answer: {error}"
        return ProcessTimeoutError(message, path=self._path, absent=(0,))


def process_and_count() -> tuple[int, int]:
    """Return this process's index in its job, and the number of processes; does not start jax's backends."""
    state = _state()
    return state.process_id or 0, state.num_processes or 1


def _state() -> Any:
    # jax has no public way to the store; multihost_utils and Orbax use it in just this way.
    from jax._src import distributed

    return distributed.global_state


def _encode_error(error: BaseException | None) -> dict[str, Any] | None:
    """Return a JSON-serializable form of an error; None for None."""
    if error is None:
        return None
    return {
        "kind": type(error).__name__,
        "message": str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}",
        **{name: getattr(error, name, None) for name in ("path", "leaf", "absent")},
    }


def _decode_error(encoded: Mapping[str, Any], path: str) -> CheckpointError:
    """Return the error of `_encode_error`, as a MultiprocessSaveError if its class is not one of ours."""
    kind, path = getattr(errors, encoded["kind"], None), encoded["path"] or path
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        return MultiprocessSaveError(f"{path}: {encoded['message']}", path=path)
    error = kind(encoded["message"], path=path)
    error.leaf = encoded["leaf"]
    if isinstance(error, ProcessTimeoutError):
        error.absent = tuple(encoded["absent"])
    return error


class Coordinator:
    """One process's view of a save by all processes of the job; each process makes one for each save.

    At a barrier every process leaves a report. Process 0 collects those of its path, acts, and answers each. So it
    learns the identifiers that the others chose for this save: counted, one that skipped a save would stay behind."""

    def __init__(self, path: str, timeout: float):
        """Prepare a save to ``path``, the same in all processes; nothing is sent yet."""
        self.process = ProcessInfo(jax.process_index(), jax.process_count())
        self.is_primary = self.process.index == 0
        self.is_aborted = False  # process 0 has answered that the save failed
        self._path, self.timeout, self._store = path, timeout, KeyValueStore(path)
        self._grace = min(timeout, _GRACE_SECONDS)
        self._id = f"{self.process.index}-{next(_ids):020}"
        self._joined = dict[int, str]()  # in process 0: the identifiers of the others
        # Holds the failure of process 0 for processes that come to this path later.
        self._failures = f"flax_ckpt_compat/failures/{path.encode('utf-8', 'surrogateescape').hex()}/"

    def barrier(
        self,
        stage: str,
        work: Callable[[], Mapping[str, Any] | None],
        *,
        on_primary: Callable[[Reports], Any] = lambda _: None,
    ) -> Any:
        """Do this process's work, and wait for all; process 0 then calls ``on_primary`` with what the others' returned.

        Return its result in all. What it raises, or the work of one, is raised in all; so is ProcessTimeoutError."""
        report, failed = dict[str, Any](), None
        try:
            report.update(work() or {})
        except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
            failed = error
        if self.is_primary:
            return self._lead(stage, failed, on_primary)
        try:
            report.update(path=self._path, error=_encode_error(failed))
            self._store.set(f"{_REPORTS}/{stage}/{self._id}", report)
            answer = self._wait_for_answer(stage, is_failed=failed is not None)
        except BaseException as error:
            if stage == BEGIN:
                self._withdraw(error)
            if failed is not None and isinstance(error, CheckpointError):
                raise failed from error
            raise
        self.is_aborted = answer["error"] is not None
        # Without process 0, which gave up on this one and removed what it was writing to, it fails for that reason.
        was_late = self.is_aborted and self.process.index in (answer["error"]["absent"] or ())
        if failed is not None and not was_late:
            raise failed
        if self.is_aborted:
            raise _decode_error(answer["error"], self._path) from failed
        return answer["value"]

    def _wait_for_answer(self, stage: str, *, is_failed: bool) -> Mapping[str, Any]:
        """Return the answer of process 0, which may itself wait for the full timeout, or its earlier failure."""
        key = f"{_ANSWERS}/{stage}/{self._id}"
        answer = self._store.wait_for(key, self._grace)
        if answer is None and stage == BEGIN:  # process 0 removes it where it tries again
            answer = self._store.read_folder(self._failures).get("answer")
        rest = 2 * (self._grace if is_failed else self.timeout) - self._grace  # process 0 waits for half of both
        answer = answer or self._store.wait_for(key, rest)
        if answer is None:
            raise self._timeout_error(stage, [0])
        self._store.delete(f"{_REPORTS}/{stage}/{self._id}")
        self._store.delete(key)
        return answer

    def _withdraw(self, error: BaseException) -> None:
        """Let process 0 not wait for this process, which was interrupted: not now, and not at the commit."""
        with suppress(CheckpointError):
            self._store.delete(f"{_REPORTS}/{BEGIN}/{self._id}")
            self._store.set(f"{_REPORTS}/{COMMIT}/{self._id}", {"path": self._path, "error": _encode_error(error)})

    def _lead(self, stage: str, failed: BaseException | None, on_primary: Callable[[Reports], Any]) -> Any:
        """Run a barrier in process 0."""
        value, error = None, None
        if stage == BEGIN:
            self._store.delete(self._failures)
        try:
            reports = self._collect(stage, is_failed=failed is not None)
            self._check(stage, reports, failed)
            value = on_primary(reports)
        except BaseException as raised:  # noqa: BLE001  (reported to the other processes)
            error = raised
        answer = {"value": value, "error": _encode_error(error)}
        if error is not None and stage == BEGIN and len(self._joined) < self.process.count - 1:
            self._store.set(f"{self._failures}answer", answer)
            self._reports(stage)  # those that came before they could see that key
        for name in self._joined.values():  # before any deletion, because they wait
            self._store.set(f"{_ANSWERS}/{stage}/{name}", answer)
        for name in self._joined.values():
            self._store.delete(f"{_REPORTS}/{stage}/{name}")
        if error is not None:
            raise error
        return value

    def _collect(self, stage: str, *, is_failed: bool) -> Reports:
        """Wait for the reports of all; once the save has failed, only briefly."""
        start, wanted, pause = time.monotonic(), self.process.count - 1, 0.005
        while True:
            reports = self._reports(stage)
            here = [report for report in reports.values() if report["path"] == self._path]
            is_failed = is_failed or any(report["error"] for report in here)
            # A report for another path may be of another thread of a process that still comes here.
            bound = self._grace if is_failed or len(here) < len(reports) else self.timeout
            is_complete = len(reports if is_failed else here) == wanted
            if is_complete or time.monotonic() > start + bound:
                return reports
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5, self.timeout / 20)

    def _reports(self, stage: str) -> Reports:
        """Return the present reports; at the first barrier also those of processes that save to other paths only."""
        found = self._store.read_folder(f"{_REPORTS}/{stage}/")
        if stage == BEGIN:
            # The latest of each process, unless it has one for this path.
            ordered = sorted(found, key=lambda name: (found[name]["path"] == self._path, name))
            self._joined = {int(name.partition("-")[0]): name for name in ordered}
        return {index: found[name] for index, name in self._joined.items() if name in found}

    def _check(self, stage: str, reports: Reports, failed: BaseException | None) -> None:
        """Raise if a process has failed, this one first, or saves something else, or is missing."""
        if failed is not None:
            raise failed
        for index, report in sorted(reports.items(), key=lambda item: (item[1]["path"] != self._path, item[0])):
            if report["path"] != self._path:
                raise self.mismatch(index, report["path"], self._path)
            if report["error"] is not None:
                failure = f"process {index} failed at {stage!r}, so nothing was saved: {report['error']['message']}"
                raise MultiprocessSaveError(f"{self._path}: {failure}", path=self._path)
        if missing := [index for index in range(1, self.process.count) if index not in reports]:
            raise self._timeout_error(stage, missing)

    def mismatch(self, index: int, theirs: str, mine: str, hint: str = "") -> MultiprocessSaveError:
        """Return the error of a process that saves something else than process 0."""
        remedy = "call save_checkpoint_multiprocess with the same arguments in all processes"
        message = f"{self._path}: process {index} saves {theirs}, process 0 {mine}{hint}; {remedy}"
        return MultiprocessSaveError(message, path=self._path)

    def _timeout_error(self, stage: str, missing: list[int]) -> ProcessTimeoutError:
        shown, waited = ", ".join(map(str, missing)), self.timeout * (2 if missing == [0] else 1)
        # Process 0 commits, and may have done so before it stopped answering.
        is_unknown = missing == [0] and stage == COMMIT
        outcome = "so it is not known here whether the checkpoint was saved" if is_unknown else "so nothing was saved"
        what = f"process {shown} of {self.process.count} did not reach barrier {stage!r} within {waited:g} s"
        why = "It may have exited, hang, or run other code: all processes have to call save_checkpoint_multiprocess"
        remedy = "If it only needs more time, raise the setting coordination_timeout."
        message = f"{self._path}: {what}, {outcome}. {why}. {remedy}"
        return ProcessTimeoutError(message, path=self._path, absent=tuple(missing))
