"""Coordinate the processes of a multi-process save: barriers with timeouts, and errors that every process raises.

They are built on jax's key-value store. jax's own ``wait_at_barrier`` needs an identifier that all processes agree on,
which is what `Coordinator.join` finds out; it blocks signals for the whole timeout, and names only some of the missing
processes.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax

from flax_ckpt_compat._core.backend import ProcessInfo
from flax_ckpt_compat._core.errors import CheckpointError, MultiprocessSaveError, ProcessTimeoutError
from flax_ckpt_compat._save.key_value_store import KeyValueStore, decode_error, encode_error, growing
from flax_ckpt_compat._save.tree_agreement import TreeSummary

# How much longer to wait for the rest once the save has failed, so that they get the reason too.
_GRACE_SECONDS = 30.0
_FIRST_WAIT_SECONDS = 1.0
# Keys of so many earlier saves are kept for late processes.
_KEPT_SAVES = 8
_Registrations = dict[int, tuple[str, Any]]  # process → registration id, content
# By the clock, so that a process which was started anew takes no answer to the one before for its own.
_registration_ids = itertools.count(time.time_ns())
_old_keys: collections.deque[str] = collections.deque()


class Coordinator:
    """One process's view of a save by all processes of the job; each process makes one for each save.

    `join` comes first: the other processes register, and process 0 looks for those that save its path. It counts
    nothing, so a process that skipped a save is not one behind for ever. All later keys have a prefix of this save.
    """

    def __init__(self, path: str, timeout: float):
        """Prepare a save to ``path``, the same in all processes; nothing is sent yet."""
        self.process = ProcessInfo(jax.process_index(), jax.process_count())
        self._path, self.timeout, self._store = path, timeout, KeyValueStore(path)
        # Process 0 has reported that the save failed; all processes came to the first barrier with the same proposal.
        self.is_aborted = self.agrees = False
        self._short = min(timeout, _GRACE_SECONDS)
        self._id = f"{self.process.index}-{next(_registration_ids):020}"
        self._prefix = f"flax_ckpt_compat/{self._id}"
        self._registered, self._results = "flax_ckpt_compat/registrations", "flax_ckpt_compat/results"
        # Holds the failure of process 0 for processes that register for this path later.
        self._failure_folder = f"flax_ckpt_compat/failures/{path.encode('utf-8', 'surrogateescape').hex()}/"

    def join(
        self,
        *,
        failed: BaseException | None = None,
        signature: str = "",
        summary: TreeSummary | None = None,
        proposal: str = "",
        on_primary: Callable[[], str] = lambda: "",
    ) -> str:
        """Wait at the first barrier, for all processes that save this path.

        As `barrier`, with what has to be the same in all processes: the signature, and the arrays of the summary that
        are spread over processes. Sets `agrees` if proposals and sampled values match.
        """
        signature += f" and {summary.spread}" if summary is not None else ""
        if self.process.index == 0:
            return self._answer_registrations(signature, summary, proposal, failed, on_primary)
        details = {} if summary is None else summary.details
        content = {
            "path": self._path,
            "signature": signature,
            "tree": details,
            "proposal": proposal,
            "error": encode_error(failed),
        }
        try:
            self._store.set(f"{self._registered}/{self._id}", content)
            result = self._wait_registered(failed is not None)
        except BaseException as error:
            self._unregister(error)
            if failed is not None and isinstance(error, CheckpointError):
                raise failed from error
            raise
        self._prefix, self.agrees = result.get("prefix", self._prefix), result.get("agrees", False)
        if failed is not None:
            raise failed
        return self._unwrap(result)

    def barrier(
        self, stage: str, *, failed: BaseException | None = None, on_primary: Callable[[], str] = lambda: ""
    ) -> str:
        """Wait for all processes; process 0 then runs ``on_primary``, and every process returns its result.

        ``failed`` is why this process cannot continue, and raised in it; the save then fails in all, with that reason.
        Raise ProcessTimeoutError if processes do not arrive in time, and in every process what ``on_primary`` raises. A
        ``stage`` is unique within a save."""
        earlier = None if failed is None else self._result_of(stage)
        self._store.set(f"{self._prefix}/{stage}/{self.process.index}", {"error": encode_error(failed)})
        if self.process.index == 0:
            return self._collect_and_run(stage, failed, on_primary)
        if failed is None:
            return self._receive(stage)
        # If process 0 has given up, it has removed what this one was writing to. It may have done so for this report.
        self.is_aborted = self._result_of(stage) is not None
        if earlier is None:
            raise failed
        raise decode_error(earlier["error"], self._path) from failed

    def _result_of(self, stage: str) -> Mapping[str, Any] | None:
        return self._store.read_folder(f"{self._prefix}/{stage}/").get("result")

    def _send(self, stage: str, failed: BaseException | None, value: str = "") -> None:
        """Publish an outcome from process 0 without waiting; the others `_receive` it."""
        self._store.set(f"{self._prefix}/{stage}/result", {"value": value, "error": encode_error(failed)})
        self._delete_later(f"{self._prefix}/")

    def _receive(self, stage: str) -> str:
        """Wait for the outcome of process 0, which may itself wait for the full timeout before it works."""
        result = self._store.wait_for(f"{self._prefix}/{stage}/result", 2 * self.timeout)
        if result is None:
            raise self._timeout_error(stage, [0])
        return self._unwrap(result)

    def _unwrap(self, result: Mapping[str, Any]) -> str:
        self.is_aborted = result["error"] is not None
        if self.is_aborted:
            raise decode_error(result["error"], self._path)
        return str(result["value"])

    def _wait_registered(self, failed: bool) -> Mapping[str, Any]:
        """Return the answer of process 0 to this registration, or its earlier failure if it does not try again."""
        key, earlier = f"{self._results}/{self._id}", None
        # It may be about to try again: only then look for a failure.
        result = self._store.wait_for(key, _FIRST_WAIT_SECONDS)
        if result is None:
            earlier = self._store.read_folder(self._failure_folder).get("result")
            result = self._store.wait_for(key, self._short if failed or earlier else 2 * self.timeout)
        self._store.delete(f"{self._registered}/{self._id}" if result is None else key)
        if (answer := result or earlier) is None:
            raise self._timeout_error("begin", [0])
        return answer

    def _unregister(self, error: BaseException) -> None:
        """Delete the registration after an interruption, so that no later save waits for this process.

        If process 0 has answered, it already waits at the commit: report the error there.
        """
        with suppress(CheckpointError):
            self._store.delete(f"{self._registered}/{self._id}")
            result = self._store.read_folder(f"{self._results}/").get(self._id, {})
            self._store.delete(f"{self._results}/{self._id}")
            if "prefix" in result and result["error"] is None:
                self._store.set(f"{result['prefix']}/commit/{self.process.index}", {"error": encode_error(error)})

    def _answer_registrations(
        self,
        signature: str,
        summary: TreeSummary | None,
        proposal: str,
        failed: BaseException | None,
        on_primary: Callable[[], str],
    ) -> str:
        """Run the first barrier in process 0."""
        self._store.delete(self._failure_folder)
        here: _Registrations = {}
        others: _Registrations = {}
        value, error = "", None
        try:
            here, others = self._wait_for_registrations(failed is not None)
            self._validate("begin", {index: content for index, (_, content) in here.items()}, others, failed)
            self._compare(signature, summary, proposal, here)
            value = on_primary()
        except BaseException as raised:  # noqa: BLE001  (reported to the other processes)
            error = raised
        result = {"value": value, "error": encode_error(error), "prefix": self._prefix, "agrees": self.agrees}
        if error is not None and len(here) + len(others) < self.process.count - 1:
            self._store.set(f"{self._failure_folder}result", result)
            self._delete_later(self._failure_folder)
            here |= self._registrations()[0]  # those that registered before they could see that key
        registered = [name for name, _ in (*here.values(), *others.values())]
        for name in registered:  # before any deletion, because they wait
            self._store.set(f"{self._results}/{name}", result)
        for name in registered:
            self._store.delete(f"{self._registered}/{name}")
        if error is not None:
            raise error
        return value

    def _wait_for_registrations(self, failed: bool) -> tuple[_Registrations, _Registrations]:
        """Wait for the other processes, for a shorter time once the save has failed; see `_registrations`."""
        start = time.monotonic()
        for pause in growing(0.005, min(0.5, self.timeout / 20)):
            here, others = self._registrations()
            if len(here) == self.process.count - 1:
                break
            hopeless = failed or any(content["error"] for _, content in here.values())
            # A registration for another path may be of another thread of a process that still registers here.
            bound = self._short if hopeless or others else self.timeout
            if (hopeless and len(here) + len(others) == self.process.count - 1) or time.monotonic() > start + bound:
                break
            time.sleep(pause)
        return here, others

    def _registrations(self) -> tuple[_Registrations, _Registrations]:
        """Return registrations for this path, and those of processes that registered for other paths only."""
        here: _Registrations = {}
        others: _Registrations = {}
        latest: dict[tuple[int, str], str] = {}
        for name, content in self._store.read_folder(f"{self._registered}/").items():
            index, path = int(name.partition("-")[0]), content["path"]
            if (index, path) in latest:  # the process gave up the earlier one, and could not delete it
                self._store.delete(f"{self._registered}/{latest[index, path]}")
            latest[index, path] = name
            (here if path == self._path else others)[index] = name, content
        return here, {index: entry for index, entry in others.items() if index not in here}

    def _collect_and_run(self, stage: str, failed: BaseException | None, on_primary: Callable[[], str]) -> str:
        """Run a later barrier in process 0; after a failure wait briefly, until the others have stopped writing."""
        start = time.monotonic()
        try:
            for pause in growing(0.005, min(0.5, self.timeout / 20)):
                found = self._store.read_folder(f"{self._prefix}/{stage}/")
                reports = {int(name): report for name, report in found.items() if name.isdecimal()}
                bound = self._short if any(report["error"] for report in reports.values()) else self.timeout
                if len(reports) == self.process.count or time.monotonic() > start + bound:
                    break
                time.sleep(pause)
            self._validate(stage, reports, failed=failed)
            value = on_primary()
        except BaseException as error:
            self._send(stage, error)
            raise
        self._send(stage, None, value)
        return value

    def _validate(
        self,
        stage: str,
        reports: Mapping[int, Any],
        others: _Registrations | None = None,
        failed: BaseException | None = None,
    ) -> None:
        """Raise if a process has failed, this one first, or saves something else, or is missing."""
        if failed is not None:
            raise failed
        for index, report in sorted(reports.items()):
            if report["error"] is not None:
                raise MultiprocessSaveError(
                    f"{self._path}: process {index} failed at {stage!r}, so nothing was saved: "
                    f"{report['error']['message']}",
                    path=self._path,
                )
        for index, (_, content) in sorted((others or {}).items()):
            raise self._mismatch(index, content["path"], self._path)
        missing = [index for index in range(1, self.process.count) if index not in reports]
        if missing:
            raise self._timeout_error(stage, missing)

    def _compare(self, signature: str, summary: TreeSummary | None, proposal: str, here: _Registrations) -> None:
        for index, (_, content) in sorted(here.items()):
            if content["signature"] != signature:
                hint = "" if summary is None else summary.why_spread_differs(content["tree"])
                raise self._mismatch(index, content["signature"], signature, hint)
        trees = {index: content["tree"] for index, (_, content) in here.items()}
        differs = summary is not None and summary.warn_of_differences(self._path, trees)
        self.agrees = not differs and all(content["proposal"] == proposal for _, content in here.values())

    def _mismatch(self, index: int, theirs: str, mine: str, hint: str = "") -> MultiprocessSaveError:
        return MultiprocessSaveError(
            f"{self._path}: process {index} saves {theirs}, process 0 {mine}{hint}; call "
            "save_checkpoint_multiprocess with the same arguments in all processes",
            path=self._path,
        )

    def _timeout_error(self, stage: str, missing: list[int]) -> ProcessTimeoutError:
        shown, waited = ", ".join(map(str, missing)), self.timeout * (2 if missing == [0] else 1)
        # Process 0 commits, and may have done so before it stopped answering.
        outcome = "so nothing was saved"
        if missing == [0] and stage == "commit":
            outcome = "so it is not known here whether the checkpoint was saved"
        return ProcessTimeoutError(
            f"{self._path}: process {shown} of {self.process.count} did not reach barrier {stage!r} within "
            f"{waited:g} s, {outcome}. It may have exited, hang, or run other code: all processes have to "
            "call save_checkpoint_multiprocess. If it only needs more time, raise the setting coordination_timeout.",
            path=self._path,
            absent=tuple(missing),
        )

    def _delete_later(self, key: str) -> None:
        """Delete the keys of old saves, and keep this one for the next few."""
        _old_keys.append(key)
        if len(_old_keys) > _KEPT_SAVES:
            self._store.delete(_old_keys.popleft())
