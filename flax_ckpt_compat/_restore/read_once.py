"""Read each array that several processes restore in one of them, and exchange the values (setting ``read_once``).

The processes meet twice: before they read, to compare what they restore, and after, to learn of failures. Until they
have met for the second time each can still read everything itself, which is what it does if anything goes wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._restore import casting
from flax_ckpt_compat._restore.device_exchange import exchange
from flax_ckpt_compat._restore.plan import TreePlan
from flax_ckpt_compat._restore.read_shares import Shares
from flax_ckpt_compat._save.coordination import Coordinator

_log = logging.getLogger("flax_ckpt_compat")


class RestoreCoordinator(Coordinator):
    """One process's view of a restore by all processes of the job."""

    root = "flax_ckpt_compat/restores"
    verb, outcome, call = "restores", "nothing was exchanged", "restore the same checkpoint"


def read(
    plan: TreePlan,
    wanted: Sequence[casting.Readable],
    casts: Mapping[casting.Readable, casting.Cast],
    mapped: Set[casting.Readable],
) -> dict[casting.Readable, Any]:
    """Read and cast as `casting.read`, in all processes of the job at once: what several want, in one of them.

    Raises:
        MultiprocessRestoreError: another process died or hung while values were exchanged.
        CheckpointError: as if this process restored alone.
    """
    shares, failed = None, None
    timeout, values = plan.options.settings.coordination_timeout, dict[casting.Readable, Any]()
    try:
        coordinator = RestoreCoordinator(plan.path, timeout)
        try:
            shares = Shares(plan, wanted, casts, mapped)
        except BaseException as error:  # noqa: BLE001  (the others must not wait for this process)
            failed = error
        coordinator.join(failed=failed, signature="" if shares is None else shares.signature)
        assert shares is not None
        try:
            values = casting.read(plan.reader, shares.own, casts, mapped)
            arrays = shares.arrays(values)
        except BaseException as error:  # noqa: BLE001  (likewise)
            failed = error
        coordinator.barrier("read", failed=failed)
    except CheckpointError as error:
        if failed is not None:
            raise failed from None
        _log.warning("%s: this process reads all arrays itself, as without the setting read_once: %s", plan.path, error)
        rest = wanted if shares is None or not values else list(shares.others)
        return {**values, **casting.read(plan.reader, rest, casts, mapped)}
    exchange(plan.path, arrays, timeout)
    return values
