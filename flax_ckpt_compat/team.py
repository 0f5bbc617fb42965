"""Processes that save together: they meet, every wait is bounded, and the error names who did not come.

They talk through the key-value store of ``jax.distributed``, which every job of several processes has. No device
takes part, so a meeting works whatever the accelerators are doing.
"""

from __future__ import annotations

import collections
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from flax_ckpt_compat import errors
from flax_ckpt_compat._core.backend import Share
from flax_ckpt_compat._core.errors import AbsentProcessesError, CheckpointError, TeamError

_POLL_SECONDS = 0.02
_ROOM = "flax_ckpt_compat"
# Meetings of so many earlier saves can still be read by whoever comes late.
_REMEMBERED = 8
_attempts: collections.Counter[str] = collections.Counter()
_held: collections.deque[str] = collections.deque()


class Team:
    """The processes of the job, about to save one checkpoint together; every process makes one for every save.

    Attributes:
        share: this process's.
    """

    def __init__(self, path: str, timeout: float):
        """Takes a seat for a save.

        Args:
            path: of the checkpoint, which the processes have in common.
            timeout: how long to wait for the others at each meeting, in seconds.
        """
        self.share = Share(jax.process_index(), jax.process_count())
        self._path, self._timeout, self._client = path, timeout, _client()
        # By path, and not by a count of saves: a process that left one out is not one behind for ever.
        _attempts[path] += 1
        name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._room = f"{_ROOM}/{name}-{_attempts[path]}"

    def meet(
        self,
        stage: str,
        *,
        failed: BaseException | None = None,
        agree: str = "",
        lead: Callable[[], str] = lambda: "",
    ) -> str:
        """Waits for all processes; then process 0 does something, and all get its result.

        Args:
            stage: name of the meeting, which is not met twice in one save.
            failed: why this process cannot go on; then none does.
            agree: text that has to be the same in all processes.
            lead: what process 0 does once all have come and none has failed.

        Returns:
            What ``lead`` returned, in process 0.

        Raises:
            AbsentProcessesError: processes did not come in time.
            TeamError: another process failed, or said something else than ``agree``; with its reason.
            CheckpointError: what ``lead`` raised, in every process.
            BaseException: ``failed`` itself, in the process that gave it.
        """
        seat = f"{self._room}/{stage}/{self.share.index}"
        self._set(seat, {"agree": agree, "error": None if failed is None else _told(failed)})
        verdict = self._lead(stage, lead, failed) if self.share.index == 0 else self._verdict(stage)
        if failed is not None:
            raise failed
        if verdict["error"] is not None:
            raise _raised(verdict["error"], self._path)
        return str(verdict["value"])

    def _lead(self, stage: str, lead: Callable[[], str], failed: BaseException | None) -> Mapping[str, Any]:
        error: BaseException | None
        try:
            self._collect(stage)
            value, error = lead(), None
        except BaseException as raised:  # noqa: BLE001  (the others have to hear of it, whatever it is)
            value, error = "", raised
        verdict = {"value": value, "error": None if error is None else _told(error)}
        self._set(f"{self._room}/{stage}/verdict", verdict)
        self._tidy()
        if error is not None and failed is None:
            raise error
        return verdict

    def _collect(self, stage: str) -> None:
        """Waits for all; the first failure that is told ends the wait."""
        deadline = time.monotonic() + self._timeout
        while True:
            reports = self._reports(stage)
            for index, report in sorted(reports.items()):
                if report["error"] is not None and index == 0:
                    raise _raised(report["error"], self._path)
                if report["error"] is not None:
                    raise TeamError(
                        f"{self._path}: process {index} failed at {stage!r}, so nothing was saved: "
                        f"{report['error']['message']}",
                        path=self._path,
                    )
            if len(reports) == self.share.count:
                self._compare(reports)
                return
            if time.monotonic() > deadline:
                raise self._absent(stage, [index for index in range(self.share.count) if index not in reports])
            time.sleep(_POLL_SECONDS)

    def _compare(self, reports: Mapping[int, Any]) -> None:
        for index, report in sorted(reports.items()):
            if report["agree"] != reports[0]["agree"]:
                raise TeamError(
                    f"{self._path}: process {index} saves {report['agree']}, process 0 {reports[0]['agree']}; call "
                    "save_checkpoint_multiprocess with the same arguments in all processes",
                    path=self._path,
                )

    def _absent(self, stage: str, missing: list[int]) -> AbsentProcessesError:
        shown = ", ".join(map(str, missing))
        return AbsentProcessesError(
            f"{self._path}: process {shown} of {self.share.count} did not come to the meeting {stage!r} within "
            f"{self._timeout:g} s, so nothing was saved. It may have ended, hang, or save something else; "
            "save_checkpoint_multiprocess has to be called by all processes. If it only needs longer, raise the "
            "setting coordination_timeout.",
            path=self._path,
            absent=tuple(missing),
        )

    def _verdict(self, stage: str) -> Mapping[str, Any]:
        """What process 0 says; it may wait as long as anybody for the others, and then has its own work to do."""
        key = f"{self._room}/{stage}/verdict"
        deadline = time.monotonic() + 2 * self._timeout
        while time.monotonic() < deadline:
            found = self._get(key, min(1.0, self._timeout))
            if found is not None:
                verdict: Mapping[str, Any] = json.loads(found)
                return verdict
        raise self._absent(stage, [0])

    def _reports(self, stage: str) -> dict[int, Any]:
        found = self._call(lambda: self._client.key_value_dir_get(f"{self._room}/{stage}/"))
        seats = ((key.rpartition("/")[2], value) for key, value in found)
        return {int(seat): json.loads(value) for seat, value in seats if seat.isdecimal()}

    def _get(self, key: str, seconds: float) -> str | None:
        try:
            value: str = self._client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise self._gone(error) from error
        return value

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        self._call(lambda: self._client.key_value_set(key, json.dumps(value)))

    def _call(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> TeamError:
        return AbsentProcessesError(
            f"{self._path}: process 0, through which all others talk, does not answer: {error}",
            path=self._path,
            absent=(0,),
        )

    def _tidy(self) -> None:
        """Forgets the meetings of long ago."""
        if self._room not in _held:
            _held.append(self._room)
        if len(_held) > _REMEMBERED:
            old = _held.popleft()
            self._call(lambda: self._client.key_value_delete(f"{old}/"))


def _client() -> Any:
    # There is no public way to the store, which multihost_utils and Orbax use in just this way.
    from jax._src import distributed

    client = getattr(distributed.global_state, "client", None)
    if client is None:
        raise TeamError(
            f"jax counts {jax.process_count()} processes but has no connection between them; call "
            "jax.distributed.initialize() in all of them first"
        )
    return client


def _told(error: BaseException) -> dict[str, Any]:
    """An error as text that goes to other processes."""
    message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    step = getattr(error, "args", (None, None))
    return {
        "kind": type(error).__name__,
        "message": message,
        "path": getattr(error, "path", None),
        "leaf": getattr(error, "leaf", None),
        "step": str(step[1]) if isinstance(error, errors.InvalidCheckpointError) else None,
        "absent": list(getattr(error, "absent", ())),
    }


def _raised(told: Mapping[str, Any], path: str) -> CheckpointError:
    """The error again, of the class that it had where that is one of ours."""
    message, where = told["message"], told["path"] or path
    if told["kind"] == "InvalidCheckpointError":
        return errors.InvalidCheckpointError(message, path=where, step=told["step"])
    if told["kind"] == "AbsentProcessesError":
        return AbsentProcessesError(message, path=where, absent=tuple(told["absent"]))
    kind = getattr(errors, told["kind"], None)
    plain = {"StorageError", "StepError", "UnsupportedLeafError", "NameCollisionError", "SettingError", "TeamError"}
    if kind is not None and told["kind"] in plain:
        error: CheckpointError = kind(message, path=where)
        error.leaf = told["leaf"]
        return error
    return TeamError(f"{path}: {message}", path=where)
