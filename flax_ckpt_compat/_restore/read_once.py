"""Read each array that several processes restore in one of them, and exchange the values (setting ``read_once``).

The processes meet twice: before they read, to compare what they restore, and after, to learn of failures. Until they
have met for the second time each can still read everything itself, which is what it does if anything goes wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from typing import Any

import jax

from flax_ckpt_compat._core.errors import CheckpointError, MultiprocessRestoreError, ProcessTimeoutError
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._restore import casting
from flax_ckpt_compat._restore.device_exchange import exchange
from flax_ckpt_compat._restore.plan import TreePlan
from flax_ckpt_compat._restore.read_assignment import Shares
from flax_ckpt_compat._save.coordination import Coordinator

_log = logging.getLogger("flax_ckpt_compat")
_turn = threading.Lock()


class RestoreCoordinator(Coordinator):
    """One process's view of a restore by all processes of the job."""

    root = "flax_ckpt_compat/restores"
    verb, outcome, call = "restores", "nothing was exchanged", "restore the same checkpoint"

    @property
    def name(self) -> str:
        """Return what tells this restore from others of the job, the same in all processes once they have joined."""
        return self._prefix

    def wait_for_reads(self, failed: BaseException | None, turn: ExitStack) -> None:
        """Wait at the second barrier, then for this process's turn to exchange arrays, which ``turn`` ends.

        The restores of one process take turns in an order that process 0 sets. Raises as `barrier`.
        """
        try:
            self.barrier("read", failed=failed, on_primary=lambda: self._begin_turn(turn))
        except ProcessTimeoutError:
            with suppress(CheckpointError):
                self._store.set(f"{self._prefix}/left/{self.process.index}", {})
            raise
        if self.process.index:
            self._take_turn(turn)

    def _begin_turn(self, turn: ExitStack) -> str:
        if self._store.read_folder(f"{self._prefix}/left/"):  # others waited too long, and read everything
            raise self._timeout_error("read", [0])
        self._take_turn(turn)
        return ""

    def _take_turn(self, turn: ExitStack) -> None:
        if not _turn.acquire(timeout=self.timeout):
            raise MultiprocessRestoreError(
                f"{self._path}: another restore of this process has exchanged arrays for {self.timeout:g} s; restore "
                "one checkpoint after the other, or raise the setting coordination_timeout",
                path=self._path,
            )
        turn.callback(_turn.release)


def read(
    plan: TreePlan,
    wanted: Sequence[casting.Readable],
    casts: Mapping[casting.Readable, casting.Cast],
    mapped: Set[casting.Readable],
    path: str,
    meter: Meter,
) -> dict[casting.Readable, Any]:
    """Read and cast as `casting.read`, in all processes of the job at once: what several want, in one of them.

    ``path`` is the checkpoint's, the same in all of them; that of the plan may be of one item. Raise
    MultiprocessRestoreError if another process died or hung while values were exchanged."""
    shares, failed = None, None
    timeout, values = plan.options.settings.coordination_timeout, dict[casting.Readable, Any]()
    with ExitStack() as turn:
        try:
            coordinator = RestoreCoordinator(path, timeout)
            try:
                shares = Shares(plan, wanted, casts, mapped)
            except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
                failed = error
            signature, proposal = ("", "") if shares is None else (shares.signature, shares.proposal)
            coordinator.join(failed=failed, signature=signature, proposal=proposal)
            assert shares is not None
            shares.divide(agrees=coordinator.agrees)
            try:
                values = casting.read(plan.reader, shares.own, shares.casts, mapped)
                arrays = shares.arrays(values)
            except BaseException as error:  # noqa: BLE001  (likewise)
                failed = error
            coordinator.wait_for_reads(failed, turn)
        except CheckpointError as error:
            if failed is not None:
                raise failed from None
            turn.close()
            _log.warning("%s: this process reads all arrays itself, as without the setting read_once: %s", path, error)
            rest = wanted if shares is None or not values else list(shares.others)
            return {**values, **casting.read(plan.reader, rest, casts, mapped)}
        exchange(path, arrays, timeout, coordinator.name)
        if meter.is_on:
            meter.add(sum([casting.nbytes_of(one) for one in shares.others]), "arrays of other processes")
    return values


def give_up(path: str, timeout: float, error: Exception) -> None:
    """Tell the other processes of the job that this one has failed before it reads, so that they do not wait for it."""
    if jax.process_count() > 1:
        with suppress(Exception):
            RestoreCoordinator(path, timeout).join(failed=error)
