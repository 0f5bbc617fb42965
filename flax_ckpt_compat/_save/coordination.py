"""Processes that save together: they meet, every wait is bounded, and the error names who did not come.

They talk through the key-value store of ``jax.distributed``, which every job of several processes has. No device
takes part, so a meeting works whatever the accelerators are doing.
"""

from __future__ import annotations

import collections
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import jax

from flax_ckpt_compat._core.backend import ProcessInfo
from flax_ckpt_compat._core.errors import CheckpointError, MultiprocessSaveError, ProcessTimeoutError
from flax_ckpt_compat._save.agreement import Summary
from flax_ckpt_compat._save.error_messages import decode_error, encode_error

_ROOT = "flax_ckpt_compat"
_LOBBY, _VERDICTS = f"{_ROOT}/lobby", f"{_ROOT}/verdicts"
# How much longer to wait for the rest once it is clear that nothing will be saved; they shall hear why.
_GRACE_SECONDS = 30.0
# Meetings of so many earlier saves can still be read by whoever comes late.
_REMEMBERED = 8
# The first and the longest wait for an answer, in seconds; Python hears no signal meanwhile.
_WAITS = (1.0, 4.0)
_Guests = dict[int, tuple[str, Any]]
_seats = itertools.count(1)
_held: collections.deque[str] = collections.deque()


class Coordinator:
    """The processes of the job, about to save one checkpoint together; every process makes one for every save.

    At first, the others announce themselves in a lobby and process 0 looks for those who came for its path. Nothing is
    counted, so a process that left a save out is not one behind for ever. Then they have a room of their own.

    Attributes:
        share: this process's.
        timeout: how long it waits for the others at each meeting, in seconds.
        is_over: process 0 has said that the save failed.
    """

    def __init__(self, path: str, timeout: float):
        """Takes a seat for a save.

        Args:
            path: of the checkpoint, which the processes have in common.
            timeout: how long to wait for the others at each meeting, in seconds.
        """
        self.share = ProcessInfo(jax.process_index(), jax.process_count())
        self._path, self.timeout, self._client = path, timeout, _client()
        self.is_over = False
        self._short = min(timeout, _GRACE_SECONDS)
        self._seat = f"{self.share.index}-{next(_seats):08}"
        self._room = f"{_ROOT}/{self._seat}"
        # Why process 0 gave up, for those who come for this path after that.
        self._note = f"{_ROOT}/notes/{path.encode('utf-8', 'surrogateescape').hex()}/"

    def gather(
        self,
        *,
        failed: BaseException | None = None,
        agree: str = "",
        tree: Summary | None = None,
        lead: Callable[[], str] = lambda: "",
    ) -> str:
        """The first meeting: `meet`, with all who want to save this path.

        Args:
            agree: text that has to be the same in all processes.
            tree: what this process saves, of which the arrays that are spread have to be the same.
            failed, lead: as for `meet`.

        Returns, Raises:
            As `meet`.
        """
        details = {} if tree is None else tree.details
        agree += f" and {tree.spread}" if tree is not None else ""
        if self.share.index == 0:
            verdict = self._receive_all(agree, tree, failed, lead)
        else:
            guest = {"path": self._path, "agree": agree, "tree": details, "error": encode_error(failed)}
            try:
                self._set(f"{_LOBBY}/{self._seat}", guest)
                verdict = self._wait_in_lobby(failed is not None)
            except BaseException as error:
                self._leave_lobby(error)
                raise
        self._room = verdict.get("room", self._room)
        return self._taken(verdict, failed)

    def meet(self, stage: str, *, failed: BaseException | None = None, lead: Callable[[], str] = lambda: "") -> str:
        """Waits for all processes; then process 0 does something, and all get its result.

        Args:
            stage: name of the meeting, which is not met twice in one save.
            failed: why this process cannot go on; then none does.
            lead: what process 0 does once all have come and none has failed.

        Returns:
            What ``lead`` returned, in process 0.

        Raises:
            ProcessTimeoutError: processes did not come in time.
            MultiprocessSaveError: another process failed, or saves something else; with its reason.
            CheckpointError: what ``lead`` raised, in every process.
            BaseException: ``failed`` itself, in the process that gave it.
        """
        self._set(f"{self._room}/{stage}/{self.share.index}", {"error": encode_error(failed)})
        if failed is not None and self.share.index:
            # If process 0 has given up before, it has removed what this one was writing to.
            earlier = self._look(f"{self._room}/{stage}/", "verdict")
            if earlier is not None:
                self.is_over = True
                raise decode_error(json.loads(earlier)["error"], self._path) from failed
            raise failed
        return self._taken(self._lead(stage, lead) if self.share.index == 0 else self._verdict(stage), failed)

    def announce(self, stage: str, failed: BaseException | None) -> None:
        """Process 0 says how something ended, and waits for nobody; the others `hear` it."""
        self._set(f"{self._room}/{stage}/verdict", {"value": "", "error": encode_error(failed)})
        self._tidy(f"{self._room}/")

    def hear(self, stage: str) -> None:
        """Waits for what process 0 announces, in bounded time.

        Raises:
            ProcessTimeoutError: it said nothing.
            CheckpointError: what it failed with.
        """
        self._taken(self._verdict(stage), None)

    def _taken(self, verdict: Mapping[str, Any], failed: BaseException | None) -> str:
        if failed is not None:
            raise failed
        if isinstance(verdict["error"], BaseException):
            raise verdict["error"]
        self.is_over = verdict["error"] is not None
        if verdict["error"] is not None:
            raise decode_error(verdict["error"], self._path)
        return str(verdict["value"])

    def _leave_lobby(self, error: BaseException) -> None:
        """Take the seat back after an interruption, so that no later save waits for who will not come.

        If process 0 has answered, it waits at the commit already, and hears there why this process does not come.
        """
        with suppress(CheckpointError):
            self._delete(f"{_LOBBY}/{self._seat}")
            verdict = json.loads(self._look(f"{_VERDICTS}/", self._seat) or "{}")
            self._delete(f"{_VERDICTS}/{self._seat}")
            if "room" in verdict and verdict["error"] is None:
                self._set(f"{verdict['room']}/commit/{self.share.index}", {"error": encode_error(error)})

    def _receive_all(
        self, agree: str, tree: Summary | None, failed: BaseException | None, lead: Callable[[], str]
    ) -> Mapping[str, Any]:
        """What process 0 does at first."""
        self._delete(self._note)
        here: _Guests = {}
        others: _Guests = {}
        value, error = "", failed
        try:
            here, others = self._watch_lobby(failed is not None)
            if failed is None:
                self._judge("begin", {index: guest for index, (_, guest) in here.items()}, others)
                self._compare(agree, tree, here)
                value = lead()
        except BaseException as raised:  # noqa: BLE001  (the others have to hear of it, whatever it is)
            error = raised
        verdict = {"value": value, "error": encode_error(error), "room": self._room}
        seats = [seat for seat, _ in (*here.values(), *others.values())]
        for seat in seats:  # all of them first, because they wait
            self._set(f"{_VERDICTS}/{seat}", verdict)
        for seat in seats:
            self._delete(f"{_LOBBY}/{seat}")
        if error is not None and len(here) + len(others) < self.share.count - 1:
            self._set(f"{self._note}why", verdict)
            self._tidy(self._note)
        return {**verdict, "error": error}

    def _watch_lobby(self, hurried: bool) -> tuple[_Guests, _Guests]:
        """Waits for the others, less long once it is clear that nothing will be saved.

        Returns:
            By process: seat and announcement of those who came for this path, and of those who only came for others.
        """
        start = time.monotonic()
        for pause in _growing(0.005, min(0.5, self.timeout / 20)):
            here, others = self._lobby()
            if len(here) == self.share.count - 1:
                break
            failed = hurried or any(guest["error"] for _, guest in here.values())
            # Whoever is there for another path may belong to another thread of this process, which is on its way.
            bound = self._short if failed or others else self.timeout
            if (failed and len(here) + len(others) == self.share.count - 1) or time.monotonic() > start + bound:
                break
            time.sleep(pause)
        return here, others

    def _lobby(self) -> tuple[_Guests, _Guests]:
        found = self._call(lambda: self._client.key_value_dir_get(f"{_LOBBY}/"))
        here: _Guests = {}
        others: _Guests = {}
        for key, text in sorted(found):
            seat, guest = key.rpartition("/")[2], json.loads(text)
            index = int(seat.partition("-")[0])
            group = here if guest["path"] == self._path else others
            if index in group:  # the process has left that seat, and could not take it back
                self._delete(f"{_LOBBY}/{group[index][0]}")
            group[index] = seat, guest
        return here, {index: guest for index, guest in others.items() if index not in here}

    def _judge(self, stage: str, reports: Mapping[int, Any], others: _Guests | None = None) -> None:
        """Raises if one has failed, saves something else, or has not come."""
        for index, report in sorted(reports.items()):
            if report["error"] is not None and index == 0:
                raise decode_error(report["error"], self._path)
            if report["error"] is not None:
                raise MultiprocessSaveError(
                    f"{self._path}: process {index} failed at {stage!r}, so nothing was saved: "
                    f"{report['error']['message']}",
                    path=self._path,
                )
        for index, (_, guest) in sorted((others or {}).items()):
            raise self._differ(index, guest["path"], self._path)
        missing = [index for index in range(1, self.share.count) if index not in reports]
        if missing:
            raise self._absent(stage, missing)

    def _wait_in_lobby(self, hurried: bool) -> Mapping[str, Any]:
        """What process 0 says to this one. If it has given up before, it may come again, but soon."""
        start, why, waits = time.monotonic(), None, _growing(*_WAITS)
        bound = self._short if hurried else 2 * self.timeout
        while (left := start + bound - time.monotonic()) > 0:
            found = self._get(f"{_VERDICTS}/{self._seat}", min(next(waits), left))
            if found is not None:
                self._delete(f"{_VERDICTS}/{self._seat}")
                return dict(json.loads(found))
            if why is None and (why := self._look(self._note, "why")) is not None:
                bound = time.monotonic() - start + self._short
        self._delete(f"{_LOBBY}/{self._seat}")
        return {"error": self._absent("begin", [0])} if why is None else dict(json.loads(why))

    def _lead(self, stage: str, lead: Callable[[], str]) -> Mapping[str, Any]:
        value, error = "", None
        try:
            self._collect(stage)
            value = lead()
        except BaseException as raised:  # noqa: BLE001  (the others have to hear of it, whatever it is)
            error = raised
        self._set(f"{self._room}/{stage}/verdict", {"value": value, "error": encode_error(error)})
        self._tidy(f"{self._room}/")
        return {"value": value, "error": error}

    def _collect(self, stage: str) -> None:
        """Waits for all; once one has failed not for long, but the rest shall have stopped writing by then."""
        start = time.monotonic()
        for pause in _growing(0.005, min(0.5, self.timeout / 20)):
            reports = self._reports(stage)
            bound = self._short if any(report["error"] for report in reports.values()) else self.timeout
            if len(reports) == self.share.count or time.monotonic() > start + bound:
                self._judge(stage, reports)
                return
            time.sleep(pause)

    def _compare(self, agree: str, tree: Summary | None, here: _Guests) -> None:
        for index, (_, guest) in sorted(here.items()):
            if guest["agree"] != agree:
                look_at = "" if tree is None else tree.differences(guest["tree"])
                raise self._differ(index, guest["agree"], agree, look_at)
        if tree is not None:
            tree.warn_of_values(self._path, {index: guest["tree"] for index, (_, guest) in here.items()})

    def _differ(self, index: int, theirs: str, mine: str, look_at: str = "") -> MultiprocessSaveError:
        return MultiprocessSaveError(
            f"{self._path}: process {index} saves {theirs}, process 0 {mine}{look_at}; call "
            "save_checkpoint_multiprocess with the same arguments in all processes",
            path=self._path,
        )

    def _absent(self, stage: str, missing: list[int]) -> ProcessTimeoutError:
        shown, waited = ", ".join(map(str, missing)), self.timeout * (2 if missing == [0] else 1)
        # Process 0 commits, and may have done so before it fell silent.
        outcome = "so nothing was saved"
        if missing == [0] and stage in ("commit", "published"):
            outcome = "so it is not known here whether the checkpoint was saved"
        return ProcessTimeoutError(
            f"{self._path}: process {shown} of {self.share.count} did not come to the meeting {stage!r} within "
            f"{waited:g} s, {outcome}. It may have ended, hang, or save something else; save_checkpoint_multiprocess "
            "has to be called by all processes. If it only needs longer, raise the setting coordination_timeout.",
            path=self._path,
            absent=tuple(missing),
        )

    def _verdict(self, stage: str) -> Mapping[str, Any]:
        """What process 0 says; it may wait as long as anybody for the others, and then has its own work to do."""
        deadline, waits = time.monotonic() + 2 * self.timeout, _growing(*_WAITS)
        while (left := deadline - time.monotonic()) > 0:
            found = self._get(f"{self._room}/{stage}/verdict", min(next(waits), left))
            if found is not None:
                return dict(json.loads(found))
        raise self._absent(stage, [0])

    def _look(self, folder: str, name: str) -> str | None:
        """What is in the store now; to get one key alone is to wait for it."""
        return dict(self._call(lambda: self._client.key_value_dir_get(folder))).get(folder + name)

    def _reports(self, stage: str) -> dict[int, Any]:
        found = self._call(lambda: self._client.key_value_dir_get(f"{self._room}/{stage}/"))
        seats = ((key.rpartition("/")[2], value) for key, value in found)
        return {int(seat): json.loads(value) for seat, value in seats if seat.isdecimal()}

    def _get(self, key: str, seconds: float) -> str | None:
        try:
            return str(self._client.blocking_key_value_get(key, max(1, int(seconds * 1000))))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise self._gone(error) from error

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        self._call(lambda: self._client.key_value_set(key, json.dumps(value)))

    def _call(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> MultiprocessSaveError:
        return ProcessTimeoutError(
            f"{self._path}: process 0, through which all others talk, does not answer: {error}",
            path=self._path,
            absent=(0,),
        )

    def _tidy(self, key: str) -> None:
        """Forgets the meetings of long ago."""
        _held.append(key)
        if len(_held) > _REMEMBERED:
            self._delete(_held.popleft())

    def _delete(self, key: str) -> None:
        """Of a key that ends in a slash, all that is below it."""
        self._call(lambda: self._client.key_value_delete(key))


def _growing(seconds: float, most: float) -> Iterator[float]:
    """Pauses between looks, in seconds: long enough for thousands of processes that wait long."""
    while True:
        yield seconds
        seconds = min(1.5 * seconds, most)


def _client() -> Any:
    # There is no public way to the store, which multihost_utils and Orbax use in just this way.
    from jax._src import distributed

    client = getattr(distributed.global_state, "client", None)
    if client is None:
        raise MultiprocessSaveError(
            f"jax counts {jax.process_count()} processes but has no connection between them; call "
            "jax.distributed.initialize() in all of them first"
        )
    return client
